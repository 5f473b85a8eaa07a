"""A sealed batch in the state of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from gristmill_service.config import Model
from gristmill_service.pipeline.credit.baselines import BaselineKey
from gristmill_service.run.machine.answers import ColumnPlace
from gristmill_service.run.machine.events import COLUMNS, RowRef, WrittenColumn
from gristmill_service.run.machine.groups import Group


@dataclass(slots=True)
class Batch:
    """A sealed batch that is not freed.

    mini_batches: the number of mini-batches per model; set when the batch is first published, and never unset.
    awaits: the columns that trainers must write for each policy shard before training; until they are complete, the
        published shards are forward shards.
    written: the columns written so far. They are stored like rows, so that the shards can be built again.
    written_ranks: the number of ranks for whose shards they were written.
    baselines: the run's before the batch; None until it is published, and with estimators that keep none.
    """

    policy_version: int
    prompts: int
    groups: list[Group]
    mini_batches: dict[Model, int] | None = None
    is_published: bool = False
    nbytes: int = 0
    awaits: tuple[str, ...] = ()
    written: dict[ColumnPlace, WrittenColumn] = field(default_factory=dict)
    written_ranks: int = 0
    baselines: dict[BaselineKey, float] | None = None

    def places(self, ranks: Collection[int]) -> Iterator[ColumnPlace]:
        """Yields the awaited columns of these ranks, written or not."""
        for mini_batch in range((self.mini_batches or {}).get("policy", 0)):
            for rank in ranks:
                for column in self.awaits:
                    yield ColumnPlace(mini_batch, rank, column)

    def refs(self) -> list[RowRef]:
        """Returns references to everything that is stored for the batch: rows and written columns."""
        return [ref for group in self.groups for ref in group.refs()] + self.written_refs()

    def written_refs(self) -> list[RowRef]:
        return [RowRef(column.table, COLUMNS) for column in self.written.values()]

    @property
    def row_bytes(self) -> int:
        rows = sum(group.nbytes for group in self.groups)
        return rows + sum(column.nbytes for column in self.written.values())
