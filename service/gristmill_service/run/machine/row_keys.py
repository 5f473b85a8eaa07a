"""How rows are named, for all rows of a request at once: those of a group mostly stand together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gristmill._wire.named_tuples import made_of
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill_service.run.machine.events import GroupKey, RowName, StoredRow


class RowKeys(NamedTuple):
    """trajectories: of each row. names: of each, within its group."""

    trajectories: Sequence[TrajectoryKey]
    names: Sequence[RowName]

    @classmethod
    def of(cls, steps: Steps) -> RowKeys:
        rounds, samples = steps.rounds.tolist(), steps.samples.tolist()
        uids: list[str] = []
        for uid, same in groupby(steps.uids):
            # One string for all of them: the state keeps it as long as the rows.
            uids += [uid] * len(list(same))
        return cls(
            made_of(TrajectoryKey, rounds, uids, samples),
            made_of(RowName, samples, steps.attempts.tolist(), steps.steps.tolist()),
        )


def by_group(rows: Iterable[StoredRow]) -> Iterator[tuple[GroupKey, list[StoredRow]]]:
    """The rows that stand together and are of one group; a group may come again."""
    for key, same in groupby(rows, lambda row: row.trajectory[:2]):
        yield GroupKey(*key), list(same)
