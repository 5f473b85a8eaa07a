"""Whether what a trainer wrote is kept: a store may lose it, and only the trainer can write it again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gristmill.errors import FailedPreconditionError
from gristmill.v1 import trainer_pb2


class KeptColumns:
    """What a trainer knows to be kept of the batch that it is at."""

    def __init__(self) -> None:
        self._batch = -1
        self.forget()

    def wrote(self, request: trainer_pb2.WriteColumnsRequest, column: str) -> None:
        self._at(request.batch)
        self._written.add((request.mini_batch, request.rank, column))

    def completed(self, batch: int) -> None:
        """All that the batch awaited is there."""
        self._at(batch)
        self._is_complete = True

    def forget(self) -> None:
        """Under another incarnation all is written anew."""
        self._written, self._is_complete = set[tuple[int, int, str]](), False

    def knows(self, batch: int) -> bool:
        return batch == self._batch

    def check(self, run: str, ranks: Collection[int], awaits: Iterable[trainer_pb2.AwaitedColumn]) -> None:
        """Raises FailedPreconditionError where the batch awaits of these ranks, or of who wrote it, what was there."""
        for place in awaits:
            is_own = self._is_complete and place.rank in ranks
            if is_own or (place.mini_batch, place.rank, place.column) in self._written:
                self.forget()
                raise FailedPreconditionError(
                    f"run {run!r}: batch {self._batch} mini-batch {place.mini_batch} rank {place.rank}: {place.column} "
                    "was written, and the service's store has lost it; iterate the trainer again, and write what the "
                    "batch awaits"
                )

    def _at(self, batch: int) -> None:
        if batch != self._batch:
            self._batch = batch
            self.forget()
