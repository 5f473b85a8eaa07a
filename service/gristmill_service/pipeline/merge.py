"""The second stage makes one row of the steps of a trajectory that extend each other.

A step's full tokens are a prefix of a later step's prompt exactly when the two can be one sequence. The merged row
is then the last step's own tokens, read again from the first step's response on: nothing is concatenated, the stage
yields indices. Source: SkyRL #1479.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill._wire.steps import UNKNOWN, Steps
from gristmill_service.pipeline.validate import Received

REPORTED_MISMATCHES = 3


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows as paths of steps: row r visits `steps[edges[r]:edges[r + 1]]`, all of one trajectory, in order.

    Its tokens are those of the last step on its path; the first `prompt_lengths[r]` of them are its prompt, and the
    rest its response. What each visit v adds to the response: from `starts[v]` of it on stand the first `kept[v]`
    tokens of the response of step `steps[v]`; what stands before, from where the visit before ends, is observation. Of
    those tokens an earlier row trains the first `shared[v]`: here they have loss_mask 0.

    Where several rows may share steps, each token is trained once: `shared` is the most that any earlier row kept, but
    no more than `kept`. Of a path's last step all is kept, and nothing shared, so that it ends the row.

    edges: int64 (rows + 1,).
    steps: int64 (visits,), indices of the batch's steps as received; each is on a path, some on several.
    starts, kept, shared: int64 (visits,), in tokens. starts is 0 where a path begins, and nowhere less than where the
        visit before ends.
    trajectories, prompt_lengths, lengths: int64 (rows,). policy_versions: int32 (rows,), of its oldest step.
    """

    edges: Int64s
    steps: Int64s
    starts: Int64s
    kept: Int64s
    shared: Int64s
    trajectories: Int64s
    prompt_lengths: Int64s
    lengths: Int64s
    policy_versions: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def first(self) -> Int64s:
        """The first step on each row's path; int64 (rows,)."""
        return self.steps[self.edges[:-1]]

    @property
    def last(self) -> Int64s:
        """The last step on each row's path, whose tokens are the row's; int64 (rows,)."""
        return self.steps[self.edges[1:] - 1]

    @property
    def response_lengths(self) -> Int64s:
        return self.lengths - self.prompt_lengths

    @property
    def ends(self) -> Int64s:
        """Where each visit ends in its row's response; int64 (visits,)."""
        return self.starts + self.kept

    @property
    def owns_reward(self) -> NDArray[np.bool_]:
        """Tells of each visit whether its step's reward stands there, so that it stands once; bool (visits,)."""
        owned: NDArray[np.bool_] = (self.shared == 0) & (self.kept > 0)
        return owned

    def per_visit(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns of each visit its row's value. values: (rows,); the result: (visits,)."""
        return np.repeat(values, np.diff(self.edges))

    def standing(self, values: Ragged) -> Ragged:
        """Returns of each visit the values of the tokens that stand in its row, also those that are not trained there.

        values: (steps,), one a response token. The result: (visits,), `kept` of each; it shares the values.
        """
        return Ragged(values.values, values.starts[self.steps], self.kept)

    def trained(self, values: Ragged) -> Ragged:
        """Returns what `standing` does without the tokens that an earlier row trains: `kept - shared` of each visit."""
        return Ragged(values.values, values.starts[self.steps] + self.shared, self.kept - self.shared)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that did not join the one before: `index` in its prompt is the first token that differs, or the prompt's
    length when it merely ends too early. column: the declared column in which the two differ, where no token does."""

    trajectory: int
    step: int
    index: int
    column: str = ""


def merge(received: Received, mode: str, columns: Sequence[ColumnSpec] = ()) -> tuple[Rows, list[Mismatch]]:
    """Returns the batch's rows under `merge: none` or `prefix`, and the first mismatches of each trajectory. columns:
    those that the run declares."""
    count = len(received.steps)
    joins = np.zeros(count, np.bool_)
    mismatches: list[Mismatch] = []
    if mode == "prefix":
        joins, mismatches = _joins(received, columns)
    edges = np.append(np.flatnonzero(~joins), count)
    kept, shared = received.steps.response_lengths, np.zeros(count, np.int64)
    return rows_of_paths(received, edges, np.arange(count), kept, shared), mismatches


def rows_of_paths(received: Received, edges: Int64s, path: Int64s, kept: Int64s, shared: Int64s) -> Rows:
    """Returns the rows of these paths; all is as `Rows` has it, `path` its `steps`.

    No prompt on a path may be shorter than the one before it: a visit starts where its step's prompt ends.
    """
    steps, first, last = received.steps, path[edges[:-1]], path[edges[1:] - 1]
    prompt_lengths = steps.prompt_lengths[first]
    return Rows(
        edges=edges,
        steps=path,
        starts=steps.prompt_lengths[path] - np.repeat(prompt_lengths, np.diff(edges)),
        kept=kept,
        shared=shared,
        trajectories=received.trajectory_of_step[first],
        prompt_lengths=prompt_lengths,
        lengths=steps.tokens.lengths[last],
        policy_versions=_oldest(steps.policy_versions[path], edges[:-1]),
    )


def _joins(received: Received, columns: Sequence[ColumnSpec]) -> tuple[NDArray[np.bool_], list[Mismatch]]:
    """Finds the steps that extend the one before them, and do not differ from it in a column that keeps them apart."""
    steps = received.steps
    trajectories = received.trajectory_of_step
    follows = np.append(False, trajectories[1:] == trajectories[:-1])[: len(steps)]
    fits = follows.copy()
    fits[1:] &= steps.tokens.lengths[:-1] <= steps.prompt_lengths[1:]
    joins = extends(steps.tokens, fits)
    apart: dict[int, str] = {}
    if any(column.merge == "equal" for column in columns):
        pairs = ((step, differing(columns, steps, step - 1, step)) for step in np.flatnonzero(joins).tolist())
        apart = {step: column for step, column in pairs if column}
        joins[list(apart)] = False
    reported = _reported(trajectories, follows & ~joins)
    return joins, [_mismatch(received, trajectories, step, apart.get(step, "")) for step in reported]


def differing(columns: Sequence[ColumnSpec], steps: Steps, before: int, step: int) -> str:
    """The first column with `merge: equal` in which a step differs from an earlier one that it extends, where they
    overlap; empty where there is none.

    The values of a row are compared; those of the tokens that both have; items, with which the later one's begin.
    """
    for column in columns:
        if column.merge == "equal" and column.scope != "response" and (extra := steps.extras.get(column.name)):
            one, other = extra.values[before], extra.values[step]
            # A NaN, where a column takes it, is as good as itself.
            same = np.array_equal(one, other[: len(one)], equal_nan=one.dtype.kind == "f")
            if extra.given[before] != extra.given[step] or not same:
                return column.name
    return ""


def extends(tokens: Ragged, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Finds the rows that begin with the whole row before them; bool (rows,).

    fits: bool (rows,), which to look at; these are no shorter than the one before, which the first row has not.

    From the last row to the first, each is compared with the longest row known to extend the one after it: if that
    one does not begin with it, nor does the one after. So one row of a whole trajectory is copied, into bytes, whose
    `startswith` is a memcmp; everything else is read once, where it stands.
    """
    if not fits.any():
        return np.zeros(len(tokens), np.bool_)
    data, item = bytes_of(tokens.values), tokens.values.itemsize
    starts, ends = (item * tokens.starts).tolist(), (item * (tokens.starts + tokens.lengths)).tolist()
    joins: list[bool] = []
    longest: bytes | None = None
    start_after, end_after = starts[-1], ends[-1]
    for start, end, fit in zip(starts[-2::-1], ends[-2::-1], fits[:0:-1].tolist(), strict=True):
        if fit:
            if longest is None:
                longest = data[start_after:end_after].tobytes()
            fit = longest.startswith(data[start:end])
        if not fit:
            longest = None
        joins.append(fit)
        start_after, end_after = start, end
    return np.array([False, *reversed(joins)], np.bool_)


def _reported(trajectories: Int64s, refused: NDArray[np.bool_]) -> list[int]:
    """Returns the first of the refused steps of each trajectory, as many as are reported of one."""
    steps = np.flatnonzero(refused)
    starts = np.searchsorted(trajectories[steps], trajectories[steps])
    reported: list[int] = steps[np.arange(len(steps)) - starts < REPORTED_MISMATCHES].tolist()
    return reported


def _mismatch(received: Received, trajectories: Int64s, step: int, column: str) -> Mismatch:
    steps = received.steps
    index = _first_difference(steps.tokens[step - 1], steps.tokens[step][: steps.prompt_lengths[step]])
    return Mismatch(int(trajectories[step]), int(steps.steps[step]), index, column)


def _first_difference(before: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    common = min(len(before), len(prompt))
    differs = before[:common] != prompt[:common]
    return int(differs.argmax()) if differs.any() else len(prompt)


def _oldest(versions: NDArray[np.int32], begins: Int64s) -> NDArray[np.int32]:
    """Returns the lowest known policy version of each row's visits; unknown where none is known. begins: (rows,)."""
    if not len(begins):
        return versions[:0]
    newest = np.iinfo(np.int32).max
    oldest = np.minimum.reduceat(np.where(versions == UNKNOWN, newest, versions), begins)
    return np.where(oldest == newest, UNKNOWN, oldest).astype(np.int32)


def row_loss_tokens(rows: Rows, loss_mask: Ragged, unfiltered: NDArray[np.bool_]) -> Int64s:
    """Counts each row's tokens with loss_mask 1, of those that it trains; int64 (rows,).

    loss_mask: uint8 (steps,) over the response; a lengths file has none, and all its tokens count.
    unfiltered: bool (steps,), False for steps that a filter masked.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    per_visit = _ones(rows.trained(loss_mask)) * unfiltered[rows.steps]
    counts: Int64s = np.add.reduceat(per_visit, rows.edges[:-1])
    return counts


def _ones(masks: Ragged) -> Int64s:
    """Counts the ones of each; 0 of an empty one. masks: uint8 of 0 and 1."""
    if not masks.values.size or masks.values.min() == 1:
        # Most batches: what the policy did not sample stands in prompts.
        return masks.lengths
    compact = masks.compact()
    counts, some = np.zeros(len(masks), np.int64), masks.lengths > 0
    # Sums of uint32 are several times faster than those of int64, and a step has fewer tokens than that holds.
    counts[some] = np.add.reduceat(compact.values, compact.starts[some], dtype=np.uint32)
    return counts
