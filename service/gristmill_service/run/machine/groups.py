"""Prompt groups and their trajectories while they are collected: the part of a run's state that rows change.

Changed by `state.apply` only. Every change is O(1) a row and cannot fail: what may happen was decided before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gristmill._wire.steps import UNKNOWN
from gristmill_service.run.machine.events import GroupKey, RowRef, SetReward, StoredRow


@dataclass(slots=True)
class Trajectory:
    """The rows of one trajectory's current attempt, by step."""

    attempt: int
    rows: dict[int, StoredRow] = field(default_factory=dict)
    last: int | None = None
    highest: int = -1
    pending: int = 0

    @property
    def is_complete(self) -> bool:
        return self.last is not None and len(self.rows) == self.last + 1 and not self.pending

    def store(self, row: StoredRow) -> None:
        self.rows[row.step] = row
        self.highest = max(self.highest, row.step)
        if row.is_last:
            self.last = row.step
        if row.reward is None:
            self.pending += 1

    def set_reward(self, reward: SetReward) -> None:
        row = self.rows[reward.step]
        self.rows[reward.step] = row._replace(
            reward=reward.value,
            reward_digest=reward.digest,
            late_rewards=reward.token_values,
            nbytes=row.nbytes + len(reward.token_values),
        )
        self.pending -= 1

    def ordered_rows(self) -> list[StoredRow]:
        return [self.rows[step] for step in sorted(self.rows)]


@dataclass(slots=True)
class Group:
    """One admitted prompt group.

    samples: how many trajectories it is to have. done: how many are complete. aborted: those given up, and why.
    """

    key: GroupKey
    samples: int
    admitted_at: float
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    aborted: dict[int, str] = field(default_factory=dict)
    done: int = 0
    nbytes: int = 0

    @property
    def is_complete(self) -> bool:
        return self.done > 0 and self.done + len(self.aborted) == self.samples

    def store(self, row: StoredRow) -> list[RowRef]:
        """Takes a row in; returns the rows of lower attempts that it replaces."""
        sample = row.trajectory.sample
        trajectory = self.trajectories.get(sample)
        released: list[RowRef] = []
        if trajectory is not None and trajectory.attempt < row.attempt:
            released = self._forget(sample)
            trajectory = None
        if trajectory is None:
            trajectory = self.trajectories[sample] = Trajectory(row.attempt)
        self.done -= trajectory.is_complete
        trajectory.store(row)
        self.done += trajectory.is_complete
        self.nbytes += row.nbytes
        return released

    def set_reward(self, reward: SetReward) -> None:
        trajectory = self.trajectories[reward.trajectory.sample]
        trajectory.set_reward(reward)
        self.done += trajectory.is_complete
        self.nbytes += len(reward.token_values)

    def abort(self, sample: int, reason: str) -> list[RowRef]:
        """Gives a trajectory up; returns its rows."""
        released = self._forget(sample)
        self.aborted[sample] = reason
        return released

    def close(self, reason: str) -> list[RowRef]:
        """Gives up every trajectory that is not complete; returns their rows."""
        released = []
        for sample in range(self.samples):
            trajectory = self.trajectories.get(sample)
            if sample not in self.aborted and (trajectory is None or not trajectory.is_complete):
                released += self.abort(sample, reason)
        return released

    def ordered_rows(self) -> Iterator[StoredRow]:
        """Its rows by sample, then step: their order in a batch, however they came."""
        for sample in sorted(self.trajectories):
            yield from self.trajectories[sample].ordered_rows()

    def refs(self) -> list[RowRef]:
        return [row.ref for trajectory in self.trajectories.values() for row in trajectory.rows.values()]

    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a row of it, None when none is known."""
        versions = (row.version for row in self.ordered_rows() if row.version != UNKNOWN)
        return min(versions, default=None)

    def _forget(self, sample: int) -> list[RowRef]:
        trajectory = self.trajectories.pop(sample, None)
        if trajectory is None:
            return []
        self.done -= trajectory.is_complete
        self.nbytes -= sum(row.nbytes for row in trajectory.rows.values())
        return [row.ref for row in trajectory.rows.values()]
