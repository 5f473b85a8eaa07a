"""How rows are named, for all rows of a request at once: those of a group mostly stand together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gristmill._wire.named_tuples import made_of
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill_service.run.machine.events import GroupKey, RowName, StoredRow


class RowKeys(NamedTuple):
    """trajectories: of each row. names: of each, within its group. groups: for rows that stand together, of which group
    they are, and which rows these are; a group may come again."""

    trajectories: Sequence[TrajectoryKey]
    names: Sequence[RowName]
    groups: Sequence[tuple[GroupKey, range]]

    @classmethod
    def of(cls, steps: Steps) -> RowKeys:
        rounds, samples = steps.rounds.tolist(), steps.samples.tolist()
        groups: list[tuple[GroupKey, range]] = []
        uids: list[str] = []
        first = 0
        for (round_, uid), same in groupby(zip(rounds, steps.uids, strict=True)):
            count = len(list(same))
            groups.append((GroupKey(round_, uid), range(first, first + count)))
            # One string for all of them: the state keeps it as long as the rows.
            uids += [uid] * count
            first += count
        return cls(
            made_of(TrajectoryKey, rounds, uids, samples),
            made_of(RowName, samples, steps.attempts.tolist(), steps.steps.tolist()),
            groups,
        )


def by_group(rows: Iterable[StoredRow]) -> Iterator[tuple[GroupKey, list[StoredRow]]]:
    """The rows that stand together and are of one group; a group may come again."""
    for key, same in groupby(rows, lambda row: row.trajectory[:2]):
        yield GroupKey(*key), list(same)
