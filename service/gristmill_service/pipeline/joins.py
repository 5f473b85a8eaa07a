"""Which step of its trajectory each step continues: the one whose sequence (prompt + response) its prompt begins with.

Most steps extend the one before them, which one pass over the batch finds. Only what is left is searched for, step by
step, among the earlier ones of its trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill_service.pipeline.validate import Received

NONE = -1
_COMPARED_FIRST = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Joins:
    """Whom each step joins.

    parents: int64 (steps,), the earlier step of its trajectory that it continues; -1 where it joins none.
    commons: int64 (steps,), with how many tokens of that one's sequence its prompt begins: with all of them, or, where
        their tail was tokenised anew, fewer. 0 where it joins none.
    """

    parents: Int64s
    commons: Int64s


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that joined none. before: the step that it is held against, by its number: the one before it, or, with
    `merge: tree`, the one that has most in common with it. index: in its prompt, of the first token that differs, or
    the prompt's length when it merely ends too early."""

    trajectory: int
    step: int
    before: int
    index: int


def find_joins(received: Received, mode: str, tail: int) -> Joins:
    """Returns whom each step joins under `merge: prefix` or `tree`. tail: `retokenised_tail`.

    With `prefix` that is the step before or none. With `tree` it is the earlier step with which its prompt has most in
    common: of several the shortest, of which least is cut, and of these the latest. All of a sequence but `tail` tokens
    has to be there, and all of the prompt with which that path begins: it is the row's prompt.
    """
    steps, count = received.steps, len(received.steps)
    settled = extends_before(received)
    if mode == "tree":
        settled &= ~_behind_longer(received)
    parents = np.where(settled, np.arange(count) - 1, NONE)
    commons = np.where(settled, np.roll(steps.tokens.lengths, 1), 0)
    bounds = received.trajectory_bounds
    is_open = ~settled
    is_open[bounds[:-1]] = False
    for trajectory in np.unique(received.trajectory_of_step[is_open]).tolist():
        own = slice(int(bounds[trajectory]), int(bounds[trajectory + 1]))
        search = _Search(steps.tokens.take(own), steps.prompt_lengths[own], tail)
        found = search.joins(parents[own] - own.start, commons[own], is_open[own], mode)
        parents[own] = np.where(found.parents < 0, NONE, found.parents + own.start)
        commons[own] = found.commons
    return Joins(parents, commons)


def extends_before(received: Received) -> NDArray[np.bool_]:
    """Finds the steps whose prompt begins with all of the step before them; bool (steps,)."""
    steps = received.steps
    fits = np.zeros(len(steps), np.bool_)
    fits[1:] = steps.tokens.lengths[:-1] <= steps.prompt_lengths[1:]
    fits[received.trajectory_bounds[:-1]] = False
    return extends(steps.tokens, fits)


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
    """Holds the steps of one trajectory against each other. Steps are numbered within it, and all are (steps,)."""

    def __init__(self, tokens: Ragged, prompt_lengths: Int64s, tail: int) -> None:
        self._tokens, self._prompts, self._tail = tokens, prompt_lengths, tail
        # Of each step the prompt with which its path begins: its own, until it joins another.
        self._roots = prompt_lengths.copy()

    def joins(self, parents: Int64s, commons: Int64s, is_open: NDArray[np.bool_], mode: str) -> Joins:
        """Settles the open steps. parents, commons: of those that are settled; they are not changed."""
        parents, commons = parents.copy(), commons.copy()
        for step in range(1, len(parents)):
            if is_open[step]:
                parents[step], commons[step] = self._join(step, 0 if mode == "tree" else step - 1)
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
            common = common_prefix(self._tokens[other], prompt)
            if common >= needed:
                best_common, best_length, best = max((best_common, best_length, best), (common, -length, other))
        return best, best_common

    def _candidates(self, step: int, earliest: int) -> list[tuple[int, int, int]]:
        """Returns the steps that this one may join, the longest first: each one's length, and how many of its tokens
        are needed. The last of these is the same in the prompt."""
        starts, lengths = self._tokens.starts[earliest:step], self._tokens.lengths[earliest:step]
        needed = np.maximum(lengths - self._tail, self._roots[earliest:step])
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


def mismatch(received: Received, step: int, mode: str) -> Mismatch:
    """Returns how a step that joined none differs. step: among all of the batch."""
    steps, trajectory = received.steps, int(np.searchsorted(received.trajectory_bounds, step, "right")) - 1
    first = int(received.trajectory_bounds[trajectory])
    prompt = steps.tokens[step][: steps.prompt_lengths[step]]
    earlier = range(first if mode == "tree" else step - 1, step)
    index, before = max((common_prefix(steps.tokens[other], prompt), other) for other in earlier)
    return Mismatch(trajectory, step - first, before - first, index)


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Counts the tokens with which both begin. Reads little of long ones that differ early."""
    shorter, begin, size = min(len(one), len(other)), 0, _COMPARED_FIRST
    while begin < shorter:
        end = min(begin + size, shorter)
        differs = one[begin:end] != other[begin:end]
        at = int(differs.argmax())
        if differs[at]:
            return begin + at
        begin, size = end, 2 * size
    return shorter
