"""The second stage makes one row of the steps of a trajectory that extend each other.

A step's full tokens are a prefix of the next step's prompt exactly when the two can be one sequence. The merged row
is then the last step's own tokens, read again from the first step's response on: nothing is concatenated, the stage
yields indices. Source: SkyRL #1479.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill._wire.steps import UNKNOWN
from gristmill_service.pipeline.validate import Received

REPORTED_MISMATCHES = 3


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows as ranges of steps: row r covers the steps `first[r]..last[r]`, of one trajectory.

    Its tokens are those of step `last[r]`; the first `prompt_lengths[r]` of them are its prompt. The response of step k
    stands at `prompt_lengths[k] - prompt_lengths[first]` of the row's response; what lies between is observation.
    All int64 (rows,) but policy_versions, int32.
    """

    first: Int64s
    last: Int64s
    trajectories: Int64s
    prompt_lengths: Int64s
    lengths: Int64s
    policy_versions: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def response_lengths(self) -> Int64s:
        return self.lengths - self.prompt_lengths


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A step that did not join the one before: `index` in its prompt is the first token that differs, or the prompt's
    length when it merely ends too early."""

    trajectory: int
    step: int
    index: int


def merge(received: Received, mode: str) -> tuple[Rows, list[Mismatch]]:
    """Returns the batch's rows under `merge: none` or `prefix`, and the first mismatches of each trajectory."""
    count = len(received.steps)
    joins = np.zeros(count, np.bool_)
    mismatches: list[Mismatch] = []
    if mode == "prefix":
        joins, mismatches = _joins(received)
    first = np.flatnonzero(~joins)
    last = np.append(first[1:], count) - 1 if count else first
    steps = received.steps
    rows = Rows(
        first=first,
        last=last,
        trajectories=received.trajectory_of_step[first],
        prompt_lengths=steps.prompt_lengths[first],
        lengths=steps.tokens.lengths[last],
        policy_versions=_oldest(steps.policy_versions, first),
    )
    return rows, mismatches


def _joins(received: Received) -> tuple[NDArray[np.bool_], list[Mismatch]]:
    """Finds the steps that extend the one before them."""
    steps = received.steps
    trajectories = received.trajectory_of_step
    follows = np.append(False, trajectories[1:] == trajectories[:-1])[: len(steps)]
    fits = follows.copy()
    fits[1:] &= steps.tokens.lengths[:-1] <= steps.prompt_lengths[1:]
    joins = extends(steps.tokens, fits)
    return joins, [_mismatch(received, trajectories, step) for step in _reported(trajectories, follows & ~joins)]


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


def _mismatch(received: Received, trajectories: Int64s, step: int) -> Mismatch:
    steps = received.steps
    index = _first_difference(steps.tokens[step - 1], steps.tokens[step][: steps.prompt_lengths[step]])
    return Mismatch(int(trajectories[step]), int(steps.steps[step]), index)


def _first_difference(before: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    common = min(len(before), len(prompt))
    differs = before[:common] != prompt[:common]
    return int(differs.argmax()) if differs.any() else len(prompt)


def _oldest(versions: NDArray[np.int32], first: Int64s) -> NDArray[np.int32]:
    """Returns the lowest known policy version of each row's steps; unknown where none is known."""
    if not len(first):
        return versions[:0]
    newest = np.iinfo(np.int32).max
    oldest = np.minimum.reduceat(np.where(versions == UNKNOWN, newest, versions), first)
    return np.where(oldest == newest, UNKNOWN, oldest).astype(np.int32)


def step_loss_tokens(loss_mask: Ragged, trained: NDArray[np.bool_]) -> Int64s:
    """Counts each step's response tokens with loss_mask 1; 0 for steps that a filter masked."""
    if not loss_mask.values.size or loss_mask.values.min() == 1:
        # Most batches: what the policy did not sample stands in prompts.
        return loss_mask.lengths * trained
    compact = loss_mask.compact()
    # Sums of uint32 are several times faster than those of int64, and a step has fewer tokens than that holds.
    counts: Int64s = np.add.reduceat(compact.values, compact.starts, dtype=np.uint32).astype(np.int64)
    return counts * trained
