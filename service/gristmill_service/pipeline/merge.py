"""Second stage: steps of a trajectory that extend each other become one row.

A step's full tokens are a prefix of the next step's prompt exactly when the two can be one sequence. The merged row
is then the last step's own tokens, read again from the first step's response on: nothing is concatenated, the stage
yields indices. Source: SkyRL #1479.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill.columns import Int64s, Ragged, bytes_of
from gristmill.steps import UNKNOWN
from gristmill_service.pipeline.validate import Received

REPORTED_MISMATCHES = 3

_SHORT = 2048


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
    """Why a step did not join the one before: `index` in its prompt is the first token that differs, or the prompt's
    length when it merely ends too early."""

    trajectory: int
    step: int
    index: int


def merge(received: Received, mode: str) -> tuple[Rows, list[Mismatch]]:
    """Rows of the batch under `merge: none` or `prefix`, and the first mismatches of each trajectory."""
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
    """Which steps extend the one before them."""
    steps = received.steps
    trajectories = received.trajectory_of_step
    followers = np.flatnonzero(np.diff(trajectories) == 0) + 1
    candidates = followers[steps.tokens.lengths[followers - 1] <= steps.prompt_lengths[followers]]
    joins = np.zeros(len(steps), np.bool_)
    joins[candidates] = _extend(steps.tokens, candidates)
    mismatches: list[Mismatch] = []
    reported: dict[int, int] = {}
    for step in followers[~joins[followers]].tolist():
        trajectory = int(trajectories[step])
        reported[trajectory] = reported.get(trajectory, 0) + 1
        if reported[trajectory] <= REPORTED_MISMATCHES:
            index = _first_difference(steps.tokens[step - 1], steps.tokens[step][: steps.prompt_lengths[step]])
            mismatches.append(Mismatch(trajectory, int(steps.steps[step]), index))
    return joins, mismatches


def _extend(tokens: Ragged, followers: Int64s) -> NDArray[np.bool_]:
    """Of each of these rows, whether it begins with the whole row before it."""
    counts = tokens.lengths[followers - 1]
    ones, others = tokens.starts[followers - 1], tokens.starts[followers]
    is_long = counts >= _SHORT
    same = np.empty(len(followers), np.bool_)
    # Short ones as bytes, whose comparison has the least fixed cost; long ones without a copy.
    data, item = bytes_of(tokens.values), tokens.values.itemsize
    edges = [item * edge[~is_long] for edge in (ones, ones + counts, others, others + counts)]
    spans = zip(*(edge.tolist() for edge in edges), strict=True)
    same[~is_long] = [data[a:b].tobytes() == data[c:d].tobytes() for a, b, c, d in spans]
    same[is_long] = [
        bool((tokens.values[one : one + count] == tokens.values[other : other + count]).all())
        for one, other, count in zip(
            ones[is_long].tolist(), others[is_long].tolist(), counts[is_long].tolist(), strict=True
        )
    ]
    return same


def _first_difference(before: NDArray[np.int32], prompt: NDArray[np.int32]) -> int:
    common = min(len(before), len(prompt))
    differs = before[:common] != prompt[:common]
    return int(differs.argmax()) if differs.any() else len(prompt)


def _oldest(versions: NDArray[np.int32], first: Int64s) -> NDArray[np.int32]:
    """The lowest known policy version of each row's steps; unknown where none is known."""
    if not len(first):
        return versions[:0]
    newest = np.iinfo(np.int32).max
    oldest = np.minimum.reduceat(np.where(versions == UNKNOWN, newest, versions), first)
    return np.where(oldest == newest, UNKNOWN, oldest).astype(np.int32)


def step_loss_tokens(loss_mask: Ragged, trained: NDArray[np.bool_]) -> Int64s:
    """Response tokens with loss_mask 1 of each step; 0 for steps that a filter masked."""
    compact = loss_mask.compact()
    if not len(compact):
        return np.empty(0, np.int64)
    # Sums of uint32 are several times faster than those of int64, and a step has fewer tokens than that holds.
    counts: Int64s = np.add.reduceat(compact.values, compact.starts, dtype=np.uint32).astype(np.int64)
    return counts * trained
