"""The work that follows from applied events, and that a run's writer leaves to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gristmill_service.run.machine.events import BatchFailed, BatchSealed
from gristmill_service.storage.row_tables import Stored


@dataclass(frozen=True, slots=True)
class SparseTable:
    """A table on the heap of which at most half is needed. live: where each needed row is."""

    number: int
    stored: Stored
    live: dict[int, int]


@dataclass(slots=True)
class Effects:
    """
    builds: whether a batch is to be built. freed: batches whose shards are to be removed. empty: row tables that
    nothing needs. sparse: row tables to be copied without what is not needed. wakes: callers whose wait is over.
    sealed, failed: batches to be logged.
    """

    builds: bool = False
    freed: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    sparse: list[SparseTable] = field(default_factory=list)
    wakes: list[Callable[[], None]] = field(default_factory=list)
    sealed: list[BatchSealed] = field(default_factory=list)
    failed: list[BatchFailed] = field(default_factory=list)
