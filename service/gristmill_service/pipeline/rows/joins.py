"""Which step of its trajectory each step continues: the one whose sequence (prompt + response) its prompt begins with.

Most steps extend the one before them, which one pass over the batch finds. Only what is left is searched for, step by
step, among the earlier ones of its trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.validate import Received

NONE = -1
_COMPARED_FIRST, _COMPARED_NEXT = 1 << 7, 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Joins:
    """Whom each step joins.

    parents: int64 (steps,), the earlier step of its trajectory that it continues; -1 where it joins none.
    commons: int64 (steps,), with how many tokens of that one's sequence its prompt begins: with all of them, or, where
        their tail was retokenized, fewer. 0 where it joins none.
    are_plain: every step that joins one joins all of the one before it.
    """

    parents: Int64s
    commons: Int64s
    are_plain: bool = False


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that joined none.

    before: the step that it is compared with, by its number: the one before it, or, where the mode branches, the one
        that has most in common with it.
    index: in its prompt, of the first token that differs, or the prompt's length when it merely ends too early.
    column: the declared column in which the two differ, where no token keeps them apart.
    """

    trajectory: int
    step: int
    before: int
    index: int
    column: str = ""


def find_joins(received: Received, config: RunConfig) -> Joins:
    """Returns whom each step joins under the run's merge mode."""
    return _MODES[config.merge](received, config)


def _none(received: Received, config: RunConfig) -> Joins:
    return _plain(received, np.zeros(len(received.steps), np.bool_))


def _before(received: Received, config: RunConfig) -> Joins:
    """The step before or none."""
    settled = joins_before(received, config.columns)
    return _searched(received, settled, config) if config.retokenized_tail else _plain(received, settled)


def _any_earlier(received: Received, config: RunConfig) -> Joins:
    """The earlier step with which its prompt has most in common: of several the shortest, of which least is cut, and
    of these the latest."""
    return _searched(received, joins_before(received, config.columns) & ~_behind_longer(received), config)


_MODES: dict[str, Callable[[Received, RunConfig], Joins]] = {"none": _none, "prefix": _before, "tree": _any_earlier}
"""By their names in `config.MERGE_MODES`."""


def _plain(received: Received, settled: NDArray[np.bool_]) -> Joins:
    """Returns that these steps join the one before them, and no others any. settled: bool (steps,)."""
    parents = np.where(settled, np.arange(len(settled)) - 1, NONE)
    commons = np.where(settled, np.roll(received.steps.tokens.lengths, 1), 0)
    return Joins(parents, commons, are_plain=True)


def _searched(received: Received, settled: NDArray[np.bool_], config: RunConfig) -> Joins:
    """Returns the joins of the settled steps, each with the one before it, and of the others as far as they have any.

    All of a sequence but its last `retokenized_tail` tokens has to be in the prompt, and all of the prompt with which
    that path begins: it is the row's. No column that keeps steps apart (`merge: equal`) may differ.
    """
    steps, plain = received.steps, _plain(received, settled)
    parents, commons, bounds = plain.parents, plain.commons, received.trajectory_bounds
    is_open = ~settled
    is_open[bounds[:-1]] = False
    for trajectory in np.unique(received.trajectory_of_step[is_open]).tolist():
        own = slice(int(bounds[trajectory]), int(bounds[trajectory + 1]))
        search = _Search(steps, own, config)
        found = search.joins(parents[own] - own.start, commons[own], is_open[own])
        parents[own] = np.where(found.parents < 0, NONE, found.parents + own.start)
        commons[own] = found.commons
    return Joins(parents, commons)


def joins_before(received: Received, columns: Sequence[ColumnSpec]) -> NDArray[np.bool_]:
    """Finds the steps whose prompt begins with all of the step before them, and that no column keeps apart from it;
    bool (steps,)."""
    steps = received.steps
    fits = np.zeros(len(steps), np.bool_)
    fits[1:] = steps.tokens.lengths[:-1] <= steps.prompt_lengths[1:]
    fits[received.trajectory_bounds[:-1]] = False
    joins = extends(steps.tokens, fits)
    if any(column.merge == "equal" for column in columns):
        for step in np.flatnonzero(joins).tolist():
            joins[step] = not differing(columns, steps, step - 1, step, int(steps.tokens.lengths[step - 1]))
    return joins


def differing(columns: Sequence[ColumnSpec], steps: Steps, before: int, step: int, common: int) -> str:
    """Returns the first column with `merge: equal` in which a step differs from an earlier one that it would join,
    where they overlap; empty where there is none.

    The values of a row are compared; those of the tokens that both have, `common` of them; items, with which the later
    one's begin.
    """
    for column in columns:
        if column.merge == "equal" and column.scope != "response" and (extra := steps.extras.get(column.name)):
            one, other = extra.values[before], extra.values[step]
            one = one[:common] if column.scope == "token" else one
            # A NaN, where a column takes it, is as good as itself.
            same = np.array_equal(one, other[: len(one)], equal_nan=one.dtype.kind == "f")
            if extra.given[before] != extra.given[step] or not same:
                return column.name
    return ""


def extends(tokens: Ragged, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Finds the rows that begin with the whole row before them; bool (rows,).

    fits: bool (rows,), which to look at; these are no shorter than the one before, which the first row has not.

    Rows that begin at one place in memory have the same tokens as far as both go: nothing is compared there. All others
    are, from the last row to the first: each with the longest row known to extend the one after it, for if that one
    does not begin with it, nor does the one after. So one row of a whole trajectory is copied, into bytes, whose
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
        if fit and start != start_after:
            if longest is None:
                longest = data[start_after:end_after].tobytes()
            fit = longest.startswith(data[start:end])
        if not fit:
            longest = None
        joins.append(fit)
        start_after, end_after = start, end
    return np.array([False, *reversed(joins)], np.bool_)


def _behind_longer(received: Received) -> NDArray[np.bool_]:
    """Finds the steps with an earlier one in their trajectory that is longer than the one before them; bool (steps,).

    No other can be more of a step's prompt than the one before it, where that one is all in it.
    """
    lengths = received.steps.tokens.lengths
    found = np.zeros(len(lengths), np.bool_)
    # Of each trajectory all are larger than of the one before it.
    ranked = lengths + received.trajectory_of_step * (lengths.max(initial=0) + 1)
    found[1:] = (np.maximum.accumulate(ranked) > ranked)[:-1]
    return found


class _Search:
    """Holds the steps of one trajectory against each other. Steps are numbered within it, and all are (steps,).

    steps: of the batch. own: which of them are the trajectory's.
    """

    def __init__(self, steps: Steps, own: slice, config: RunConfig) -> None:
        self._steps, self._first, self._config = steps, own.start, config
        self._tokens, self._prompts = steps.tokens.take(own), steps.prompt_lengths[own]
        # Of each step the prompt with which its path begins: its own, until it joins another.
        self._roots = self._prompts.copy()

    def joins(self, parents: Int64s, commons: Int64s, is_open: NDArray[np.bool_]) -> Joins:
        """Settles the open steps. parents, commons: of those that are settled; they are not changed."""
        parents, commons = parents.copy(), commons.copy()
        for step in range(1, len(parents)):
            if is_open[step]:
                parents[step], commons[step] = self._join(step, 0 if self._config.merging.branches else step - 1)
            if parents[step] >= 0:
                self._roots[step] = self._roots[parents[step]]
        return Joins(parents, commons)

    def _join(self, step: int, earliest: int) -> tuple[int, int]:
        """Returns which step it joins, none before `earliest`, and how many tokens they have in common."""
        prompt = self._tokens[step][: self._prompts[step]]
        best_common, best_length, best = 0, 0, NONE
        for other, length, needed in self._candidates(step, earliest):
            if length < best_common:
                break
            is_one_memory = self._tokens.starts[other] == self._tokens.starts[step]
            common = min(length, len(prompt)) if is_one_memory else common_prefix(self._tokens[other], prompt)
            if common >= needed and not self._keeps_apart(other, step, common):
                best_common, best_length, best = max((best_common, best_length, best), (common, -length, other))
        return best, best_common

    def _keeps_apart(self, other: int, step: int, common: int) -> bool:
        return differing(self._config.columns, self._steps, self._first + other, self._first + step, common) != ""

    def _candidates(self, step: int, earliest: int) -> list[tuple[int, int, int]]:
        """Returns the steps that this one may join, the longest first: each one's length, and how many of its tokens
        are needed. The last of these is the same in the prompt."""
        starts, lengths = self._tokens.starts[earliest:step], self._tokens.lengths[earliest:step]
        needed = np.maximum(lengths - self._config.retokenized_tail, self._roots[earliest:step])
        fits = np.flatnonzero(needed <= self._prompts[step])
        ends, values = needed[fits] - 1, self._tokens.values
        fits = fits[values[starts[fits] + ends] == values[self._tokens.starts[step] + ends]]
        fits = fits[np.argsort(-lengths[fits])]
        return list(zip((fits + earliest).tolist(), lengths[fits].tolist(), needed[fits].tolist(), strict=True))


def breaks(received: Received, begins: Int64s) -> Int64s:
    """Returns the steps that joined none, without those with which trajectories begin; ascending.

    begins: the steps with which the paths of rows begin, each once or more.
    """
    if len(begins) < len(received.trajectory_bounds):
        # One a trajectory.
        return np.empty(0, np.int64)
    found = np.zeros(len(received.steps), np.bool_)
    found[begins] = True
    found[received.trajectory_bounds[:-1]] = False
    return np.flatnonzero(found)


def mismatch(received: Received, step: int, config: RunConfig) -> Mismatch:
    """Returns how a step that joined none differs. step: among all of the batch."""
    steps, trajectory = received.steps, int(np.searchsorted(received.trajectory_bounds, step, "right")) - 1
    first = int(received.trajectory_bounds[trajectory])
    prompt = steps.tokens[step][: steps.prompt_lengths[step]]
    earlier = range(first if config.merging.branches else step - 1, step)
    index, before = max((common_prefix(steps.tokens[other], prompt), other) for other in earlier)
    is_enough = index >= steps.tokens.lengths[before] - config.retokenized_tail
    column = differing(config.columns, steps, before, step, index) if is_enough else ""
    return Mismatch(trajectory, step - first, before - first, len(prompt) if column else index, column)


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Counts the tokens with which both begin. Reads little of long ones that differ early."""
    shorter, begin, size = min(len(one), len(other)), 0, _COMPARED_FIRST
    while begin < shorter:
        end = min(begin + size, shorter)
        differs = one[begin:end] != other[begin:end]
        at = int(differs.argmax())
        if differs[at]:
            return begin + at
        begin, size = end, max(2 * size, _COMPARED_NEXT)
    return shorter
