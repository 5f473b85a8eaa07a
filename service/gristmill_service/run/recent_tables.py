"""The plans and tables of the newest batches of a process, to be looked at also after the batches are freed."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from gristmill.errors import NotFoundError

MOST_BYTES = 32 << 20


class BatchNumbers(NamedTuple):
    """plan: as JSON. table: `BatchTable.encode`."""

    plan: bytes
    table: bytes


def gone(batch: int) -> NotFoundError:
    return NotFoundError(
        f"batch {batch} is freed, and its numbers are gone: a process keeps those of the newest batches that it "
        "published, until it ends; read tables while their batches are trained"
    )


class RecentTables:
    """Keeps as many as fit into `MOST_BYTES`; forgets the oldest first. Only the event loop uses them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], BatchNumbers] = OrderedDict()
        self._nbytes = 0

    def put(self, run_id: str, batch: int, numbers: BatchNumbers) -> None:
        self._drop((run_id, batch))
        self._kept[run_id, batch] = numbers
        self._nbytes += sum(map(len, numbers))
        while self._nbytes > MOST_BYTES:
            self._drop(next(iter(self._kept)))

    def get(self, run_id: str, batch: int) -> BatchNumbers | None:
        return self._kept.get((run_id, batch))

    def batches(self, run_id: str) -> list[int]:
        """Returns the batches of a run whose tables are kept, the newest last."""
        return sorted(batch for of, batch in self._kept if of == run_id)

    def forget(self, run_id: str) -> None:
        """Forgets the batches of a deleted run."""
        for key in [key for key in self._kept if key[0] == run_id]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        if (numbers := self._kept.pop(key, None)) is not None:
            self._nbytes -= sum(map(len, numbers))
