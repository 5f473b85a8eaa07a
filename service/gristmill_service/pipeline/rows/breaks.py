"""Breaks: steps that joined no earlier step, although the run merges, with the reason and the tokens around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gristmill._wire.columns import Int64s, Ragged
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.joins import common_prefix, differing
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.validate import Received

EXAMINED, SHOWN = 3, 200
"""How many breaks of each trajectory are examined, and of how many of a batch the tokens around them are kept, because
thousands of breaks are similar."""
CONTEXT = 6
"""The number of tokens kept before and after the token that differs."""
_PAIRS = 10

CAUSES = ("prompt", "response", "truncated", "column", "further")
"""The causes of `Mismatch`, and `further` for breaks that are not examined."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that joins none, and the reason.

    before: the number of the step that it is compared with: the previous step, or, if the mode branches, the step with
        the longest common prefix.
    index: the index of the first token of its prompt that differs; the prompt's length if the prompt is too short.
    cause: `prompt` or `response` if this token is in that part of the step before; `truncated` if the prompt is too
        short; `column` if a column differs.
    column: the declared column in which the two steps differ, or `partition`, if no token differs.
    """

    trajectory: int
    step: int
    before: int
    index: int
    cause: str
    column: str = ""


class Around(NamedTuple):
    """The tokens around a break. before: the equal ones before it. was, now: those from there in the step that it is
    compared with, and in its prompt."""

    before: list[int]
    was: list[int]
    now: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Breaks:
    """The breaks of a batch.

    steps: int64 (breaks,), the index of each in the batch, ascending. examined: those of them that are examined, the
    first `EXAMINED` of each trajectory. mismatches: their reasons. around: the tokens around the first `SHOWN` of them.
    pairs: the most frequent pairs of tokens that differ, and their number; -1 where the step or the prompt had ended.
    counts: the number of breaks because of a column with `merge: equal`, if the run has one.
    """

    steps: Int64s
    examined: Int64s
    mismatches: list[Mismatch] = field(default_factory=list)
    around: list[Around] = field(default_factory=list)
    pairs: list[tuple[int, int, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def find_breaks(received: Received, rows: Rows, config: RunConfig) -> Breaks:
    """Returns the breaks of a merged batch."""
    compares_columns = any(column.merge == "equal" for column in config.columns)
    if not config.merging.joins:
        return Breaks(rows.first[:0], rows.first[:0], counts={"column_mismatches": 0} if compares_columns else {})
    broken, roots = _broken(received, rows.first), rows.roots(len(received.steps))
    trajectories = np.searchsorted(received.trajectory_bounds, broken, "right")
    is_examined = np.arange(len(broken)) - np.searchsorted(trajectories, trajectories) < EXAMINED
    examined = broken[is_examined]
    mismatches = [_mismatch(received, step, roots, config) for step in examined.tolist()]
    counts = {}
    if compares_columns:
        others = (_mismatch(received, step, roots, config) for step in broken[~is_examined].tolist())
        counts = {"column_mismatches": sum(bool(one.column) for one in (*mismatches, *others))}
    around = [_around(received, one) for one in mismatches[:SHOWN]]
    return Breaks(broken, examined, mismatches, around, _pairs(received, mismatches), counts)


def _around(received: Received, one: Mismatch) -> Around:
    first, at = int(received.trajectory_bounds[one.trajectory]), one.index
    was, now = (received.steps.tokens[first + step] for step in (one.before, one.step))
    end = min(at + CONTEXT + 1, int(received.steps.prompt_lengths[first + one.step]))
    return Around(now[max(0, at - CONTEXT) : at].tolist(), was[at : at + CONTEXT + 1].tolist(), now[at:end].tolist())


def _pairs(received: Received, mismatches: Sequence[Mismatch]) -> list[tuple[int, int, int]]:
    """Returns the most frequent pairs of tokens that differ; see `Breaks.pairs`."""
    tokens, prompts = received.steps.tokens, received.steps.prompt_lengths
    places = [(one.trajectory, one.before, one.step, one.index) for one in mismatches if not one.column]
    trajectories, before, steps, at = np.array(places, np.int64).reshape(-1, 4).T
    first = received.trajectory_bounds[trajectories]
    was = _token_at(tokens, first + before, at, tokens.lengths)
    pairs = Counter(zip(was, _token_at(tokens, first + steps, at, prompts), strict=True))
    return [(*pair, count) for pair, count in pairs.most_common(_PAIRS)]


def _token_at(tokens: Ragged, rows: Int64s, at: Int64s, lengths: Int64s) -> list[int]:
    """Returns the token at this place in each of the rows; -1 where it has ended. lengths: of all rows."""
    ends = lengths[rows]
    found: list[int] = np.where(at < ends, tokens.values[tokens.starts[rows] + np.minimum(at, ends - 1)], -1).tolist()
    return found


def _broken(received: Received, begins: Int64s) -> Int64s:
    """Returns the steps that join none, except the first step of each trajectory, in ascending order.

    begins: the first steps of the rows' paths; a step may occur several times.
    """
    if len(begins) < len(received.trajectory_bounds):
        # Only the first step of each trajectory begins a path.
        return np.empty(0, np.int64)
    is_break = np.zeros(len(received.steps), np.bool_)
    is_break[begins] = True
    is_break[received.trajectory_bounds[:-1]] = False
    return np.flatnonzero(is_break)


def _mismatch(received: Received, step: int, roots: Int64s, config: RunConfig) -> Mismatch:
    """Returns why a step joins none. Compares it with the step that it could join if columns were ignored, or else with
    the step with the longest common prefix.

    step: its index in the batch. roots: int64 (steps,), see `Rows.roots`.
    """
    steps, trajectory = received.steps, int(np.searchsorted(received.trajectory_bounds, step, "right")) - 1
    first = int(received.trajectory_bounds[trajectory])
    prompt = steps.tokens[step][: steps.prompt_lengths[step]]
    earlier = range(first if config.merging.branches else step - 1, step)
    lengths = steps.tokens.lengths
    commons = [(common_prefix(steps.tokens[other], prompt), other) for other in earlier]
    fitting = [
        (common, -int(lengths[other]), other)
        for common, other in commons
        if common >= max(lengths[other] - config.retokenized_tail, roots[other])
    ]
    if fitting:
        common, _, before = max(fitting)
        column = differing(config.columns, steps, before, step, common)
        return Mismatch(trajectory, step - first, before - first, len(prompt), "column", column)
    index, before = max(commons)
    is_in_prompt = index < steps.prompt_lengths[before]
    cause = "truncated" if index >= len(prompt) else "prompt" if is_in_prompt else "response"
    return Mismatch(trajectory, step - first, before - first, index, cause)
