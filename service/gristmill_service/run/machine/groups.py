"""Prompt groups and their trajectories while they are collected: the part of a run's state that rows change.

Changed by `state.apply` only. Every change is O(1) a row and cannot fail: what may happen was decided before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

from gristmill._wire.steps import UNKNOWN
from gristmill_service.run.machine.events import GroupKey, RowName, RowRef, SetReward, StoredRow


class Released(NamedTuple):
    """The rows that an event releases.

    refs: rows of tables that nothing needs any more. rows, tokens: how many rows are no part of a group any more, and
    their tokens; some may be kept as the beginnings of other rows.
    """

    refs: list[RowRef]
    rows: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, parts: Sequence[Released]) -> Released:
        """Adds up these parts."""
        refs = [ref for part in parts for ref in part.refs]
        return cls(refs, sum(part.rows for part in parts), sum(part.tokens for part in parts))


NOTHING = Released([])


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
        step = row.step
        self.rows[step] = row
        if step > self.highest:
            self.highest = step
        if row.is_last:
            self.last = step
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

    samples: how many trajectories it is made of. surplus: how many more are sampled. finished: those that are complete,
    in the order in which they became so. aborted: those given up, and why. tag: its environment or task, "" where
    nobody said. kept: rows that are no part of it any more, and that have tokens with which rows of it begin.
    """

    key: GroupKey
    samples: int
    admitted_at: float
    surplus: int = 0
    tag: str = ""
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    aborted: dict[int, str] = field(default_factory=dict)
    finished: dict[int, None] = field(default_factory=dict)
    nbytes: int = 0
    kept: dict[RowName, StoredRow] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        """How many trajectories are sampled, with those that may be left out."""
        return self.samples + self.surplus

    @property
    def done(self) -> int:
        """How many trajectories are complete."""
        return len(self.finished)

    @property
    def is_complete(self) -> bool:
        done = len(self.finished)
        return 0 < done <= self.samples and done + len(self.aborted) == self.samples + self.surplus

    def left_out(self) -> list[int]:
        """Returns the samples that are not needed, because enough of the others are complete."""
        if self.done < self.samples or self.is_complete:
            return []
        kept = set(islice(self.finished, self.samples))
        return [sample for sample in range(self.sampled) if sample not in kept and sample not in self.aborted]

    def store(self, row: StoredRow) -> Released:
        """Stores a row; releases the rows of lower attempts that it replaces."""
        sample = row.trajectory.sample
        trajectory = before = self.trajectories.get(sample)
        if trajectory is None or trajectory.attempt < row.attempt:
            trajectory = self.trajectories[sample] = Trajectory(row.attempt)
        trajectory.store(row)
        self.nbytes += row.nbytes
        # Release the old attempt only after storing the new row, which may begin with a row of it.
        released = NOTHING if before is None or before is trajectory else self._forget(sample, before)
        if trajectory.is_complete:
            self.finished.setdefault(sample)
        return released

    def set_reward(self, reward: SetReward) -> None:
        trajectory = self.trajectories[reward.trajectory.sample]
        trajectory.set_reward(reward)
        if trajectory.is_complete:
            self.finished.setdefault(reward.trajectory.sample)
        self.nbytes += len(reward.token_values)

    def abort(self, sample: int, reason: str) -> Released:
        """Aborts a trajectory; releases its rows."""
        trajectory = self.trajectories.pop(sample, None)
        released = NOTHING if trajectory is None else self._forget(sample, trajectory)
        self.aborted[sample] = reason
        return released

    def close(self, reason: str) -> Released:
        """Aborts every trajectory that is not complete; releases their rows."""
        released = []
        for sample in range(self.sampled):
            trajectory = self.trajectories.get(sample)
            if sample not in self.aborted and (trajectory is None or not trajectory.is_complete):
                released.append(self.abort(sample, reason))
        return Released.of(released)

    def ordered_rows(self) -> Iterator[StoredRow]:
        """Yields its rows by sample, then step: their order in a batch, however they came."""
        for sample in sorted(self.trajectories):
            yield from self.trajectories[sample].ordered_rows()

    def stored_rows(self) -> Iterator[StoredRow]:
        """Yields its rows in no particular order, and the rows that are kept for them."""
        for trajectory in self.trajectories.values():
            yield from trajectory.rows.values()
        yield from self.kept.values()

    def find(self, name: RowName) -> StoredRow:
        """Returns the row of that name, which is in the group or kept for a row of it."""
        trajectory = self.trajectories.get(name.sample)
        is_own = trajectory is not None and trajectory.attempt == name.attempt
        return trajectory.rows[name.step] if trajectory is not None and is_own else self.kept[name]

    def refs(self) -> list[RowRef]:
        return [row.ref for row in self.stored_rows()]

    def released(self) -> Released:
        """Releases the whole group."""
        rows = [row for trajectory in self.trajectories.values() for row in trajectory.rows.values()]
        return Released(self.refs(), len(rows), sum(row.tokens for row in rows))

    def oldest_version(self) -> int | None:
        """Returns the oldest policy version that sampled a row of it; None when none is known."""
        versions = (row.version for row in self.ordered_rows() if row.version != UNKNOWN)
        return min(versions, default=None)

    def _forget(self, sample: int, trajectory: Trajectory) -> Released:
        """Releases a trajectory that is no part of the group any more, but for rows with which others begin."""
        self.finished.pop(sample, None)
        left = self.kept | {row.name: row for row in trajectory.rows.values()}
        self.kept = {}
        live = (row for trajectory in self.trajectories.values() for row in trajectory.rows.values())
        for row in live:
            name = row.parent
            while name is not None and (parent := left.pop(name, None)) is not None:
                self.kept[name] = parent
                name = parent.parent
        self.nbytes -= sum(row.nbytes for row in left.values())
        gone = trajectory.rows.values()
        return Released([row.ref for row in left.values()], len(gone), sum(row.tokens for row in gone))


def by_group(rows: Iterable[StoredRow]) -> Iterator[tuple[GroupKey, list[StoredRow]]]:
    """Yields each group's consecutive rows; a group may come again."""
    for key, same in groupby(rows, lambda row: row.trajectory[:2]):
        yield GroupKey(*key), list(same)
