"""Prompt groups and their trajectories while they are collected: the part of a run's state that rows change.

Only `state.apply` changes groups. Every change takes O(1) per row and cannot fail, because the decision checked it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from gristmill._wire.row_fields import UNKNOWN
from gristmill_service.run.machine.described_rows import reward_rest
from gristmill_service.run.machine.events import GroupKey, RowName, RowRef, SetReward, StoredRow

SURPLUS = "surplus"
"""The reason for aborting a trajectory whose group has enough complete ones."""


class Released(NamedTuple):
    """The rows that an event releases.

    refs: stored rows that nothing needs any more. rows, tokens: the number of rows that left their group, and of their
        tokens; a row that left may still be stored, because other rows share its first tokens.
    """

    refs: list[RowRef]
    rows: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, parts: Sequence[Released]) -> Released:
        """Returns the sum of these parts."""
        refs = [ref for part in parts for ref in part.refs]
        return cls(refs, sum(part.rows for part in parts), sum(part.tokens for part in parts))


NOTHING = Released([])


class Lacking(NamedTuple):
    """Why groups are not complete: their samples without a row, those without some steps, such as the last, and those
    that have every step and wait for a reward."""

    rows: int = 0
    steps: int = 0
    rewards: int = 0

    @classmethod
    def of(cls, parts: Iterable[Lacking]) -> Lacking:
        """Returns the sum of these parts."""
        return cls(*map(sum, zip(*parts, strict=True)))

    def __str__(self) -> str:
        causes = (
            ("without a reward", self.rewards),
            ("without their last step or an earlier one", self.steps),
            ("not begun", self.rows),
        )
        counts = ", ".join(f"{cause}: {count}" for cause, count in causes if count)
        return f"samples {counts}" if counts else ""


@dataclass(slots=True)
class Trajectory:
    """The rows of one trajectory's current attempt, by step."""

    attempt: int
    rows: dict[int, StoredRow] = field(default_factory=dict)
    last: int | None = None
    highest: int = -1
    pending: int = 0

    @property
    def has_every_step(self) -> bool:
        return self.last is not None and len(self.rows) == self.last + 1

    @property
    def is_complete(self) -> bool:
        return self.has_every_step and not self.pending

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
            reward_rest=reward_rest(np.frombuffer(reward.token_values), reward.value) if reward.token_values else 0.0,
            nbytes=row.nbytes + len(reward.token_values),
        )
        self.pending -= 1

    def ordered_rows(self) -> list[StoredRow]:
        return [self.rows[step] for step in sorted(self.rows)]


@dataclass(slots=True)
class Group:
    """An admitted prompt group.

    samples: the number of trajectories that the group needs. surplus: how many more are sampled.
    finished: the complete trajectories, in order of completion. aborted: the reason of each aborted trajectory.
    given_up: the aborted attempt of each aborted trajectory that a client may sample again.
    tag: the group's environment or task; "" if unknown.
    kept: rows that left the group, but whose first tokens are shared by rows of the group.
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
    given_up: dict[int, int] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        """The number of trajectories to sample, including surplus ones."""
        return self.samples + self.surplus

    @property
    def done(self) -> int:
        """The number of complete trajectories."""
        return len(self.finished)

    @property
    def is_complete(self) -> bool:
        """Whether the group needs no more trajectories. Surplus ones may still have to be aborted (`left_out`)."""
        done = len(self.finished)
        return done >= self.samples or 0 < done == self.samples + self.surplus - len(self.aborted)

    def lacking(self) -> Lacking:
        """Returns why the group is not complete."""
        begun = [trajectory for sample, trajectory in self.trajectories.items() if sample not in self.finished]
        rewards = sum(trajectory.has_every_step for trajectory in begun)
        return Lacking(self.sampled - len(self.trajectories) - len(self.aborted), len(begun) - rewards, rewards)

    def left_out(self) -> list[int]:
        """Returns the samples that are not needed because enough others are complete."""
        if self.done < self.samples:
            return []
        kept = set(islice(self.finished, self.samples))
        return [sample for sample in range(self.sampled) if sample not in kept and sample not in self.aborted]

    def takes(self, sample: int, attempt: int) -> bool:
        """Returns whether rows of this attempt are accepted. For an aborted trajectory, only a higher attempt is, and
        only while the group needs more trajectories."""
        if sample not in self.aborted:
            return True
        return self.takes_again(sample) and attempt > self.given_up[sample]

    def takes_again(self, sample: int) -> bool:
        """Returns whether a higher attempt of this aborted trajectory is accepted."""
        return sample in self.given_up and self.done < self.samples

    def store(self, row: StoredRow) -> Released:
        """Stores a row. Returns the released rows of lower attempts that it replaces."""
        sample = row.trajectory.sample
        if sample in self.aborted:
            del self.aborted[sample], self.given_up[sample]
        trajectory = before = self.trajectories.get(sample)
        if trajectory is None or trajectory.attempt < row.attempt:
            trajectory = self.trajectories[sample] = Trajectory(row.attempt)
        trajectory.store(row)
        self.nbytes += row.nbytes
        # Release the old attempt only after the new row is stored, because the new row may share its tokens.
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

    def abort(self, sample: int, reason: str, attempt: int = 0) -> Released:
        """Aborts a trajectory: its stored attempt, and all attempts up to `attempt`. Returns its released rows."""
        trajectory = self.trajectories.pop(sample, None)
        released = NOTHING if trajectory is None else self._forget(sample, trajectory)
        self.aborted[sample] = reason
        self.given_up[sample] = attempt if trajectory is None else max(attempt, trajectory.attempt)
        return released

    def close(self, reason: str) -> Released:
        """Aborts every incomplete trajectory; no higher attempt is accepted. Returns the released rows."""
        released = []
        for sample in range(self.sampled):
            trajectory = self.trajectories.get(sample)
            if sample not in self.aborted and (trajectory is None or not trajectory.is_complete):
                released.append(self.abort(sample, reason))
        self.given_up.clear()
        return Released.of(released)

    def ordered_rows(self) -> Iterator[StoredRow]:
        """Yields the rows by sample, then step: their order in a batch."""
        for sample in sorted(self.trajectories):
            yield from self.trajectories[sample].ordered_rows()

    def stored_rows(self) -> Iterator[StoredRow]:
        """Yields all stored rows, including `kept` ones, in no particular order."""
        for trajectory in self.trajectories.values():
            yield from trajectory.rows.values()
        yield from self.kept.values()

    def find(self, name: RowName) -> StoredRow:
        """Returns the row with this name, from the group's trajectories or from `kept`."""
        trajectory = self.trajectories.get(name.sample)
        is_own = trajectory is not None and trajectory.attempt == name.attempt
        return trajectory.rows[name.step] if trajectory is not None and is_own else self.kept[name]

    def refs(self) -> list[RowRef]:
        return [row.ref for row in self.stored_rows()]

    def released(self) -> Released:
        """Returns all rows of the group as released."""
        rows = [row for trajectory in self.trajectories.values() for row in trajectory.rows.values()]
        return Released(self.refs(), len(rows), sum(row.tokens for row in rows))

    def oldest_version(self) -> int | None:
        """Returns the oldest policy version that sampled a row of the group; None if no version is known."""
        versions = (row.version for row in self.ordered_rows() if row.version != UNKNOWN)
        return min(versions, default=None)

    def _forget(self, sample: int, trajectory: Trajectory) -> Released:
        """Releases a trajectory that left the group, except for rows whose tokens are shared by other rows."""
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
    """Yields each group's consecutive rows; a group may be yielded several times."""
    for key, same in groupby(rows, lambda row: row.trajectory[:2]):
        yield GroupKey(*key), list(same)
