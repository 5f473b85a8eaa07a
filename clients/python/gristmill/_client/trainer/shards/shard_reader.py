"""Opens shards wherever they are, mapped or streamed, and some ahead of their use. Owns no place in training order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from gristmill._client.connection.transport import Transport
from gristmill._client.trainer.shards.chosen_columns import ChosenColumns
from gristmill._client.trainer.shards.prefetch import Prefetch
from gristmill._client.trainer.shards.pull import Opened, ReplacedError, map_published, stream
from gristmill._client.trainer.written_columns import KeptColumns
from gristmill._torch.conversion import Conversion
from gristmill._wire.addresses import MODELS, Position, ShardAddress
from gristmill.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    GristmillError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill.v1 import trainer_pb2

_WITHDRAWN_PAUSE_S = 0.1


class Wanted(NamedTuple):
    """The shards of a mini-batch that some ranks have, or their forward shards while its batch waits for columns.

    incarnation: the trainer's; its shards may be cut for another dp_size than those of an earlier one.
    """

    position: Position
    ranks: Sequence[int]
    forward: bool
    incarnation: int


class ShardReader:
    """Opens the shards of one model of a run.

    convert: begins to copy what is opened ahead to the device. columns: which of the declared ones are wanted.
    ahead: how many mini-batches are opened in the background. place: the position that the trainer is at.
    kept: what is known of columns that the trainer wrote.
    """

    def __init__(
        self,
        transport: Transport,
        run: str,
        model: str,
        *,
        convert: Conversion,
        columns: ChosenColumns,
        ahead: int,
        place: Callable[[], Position],
    ) -> None:
        self._transport, self._run, self._model = transport, run, model
        self._convert, self._columns, self._place = convert, columns, place
        self.kept = KeptColumns()
        self._found: tuple[Wanted, trainer_pb2.GetShardResponse] | None = None
        self._prefetch: Prefetch[Wanted, list[Opened]] = Prefetch(self._open_ahead, ahead)

    def open(self, wanted: Wanted) -> list[Opened]:
        """One a rank: what was opened ahead, else opened now.

        A batch up to the trainer's own is waited for. Raises NotFoundError for one that is freed, BatchFailedError for
        one that could not be made, and FailedPreconditionError for one ahead that is not published yet, or whose
        columns the trainer has to write again.
        """
        self._transport.check_usable()
        opened = self._prefetch.take(_in_any_epoch(wanted)) or self._open(wanted)
        if not any(shard.is_forward for shard in opened):
            self.kept.completed(wanted.position.batch)
        return opened

    def found(self, wanted: Wanted, answer: trainer_pb2.GetShardResponse) -> None:
        """Says where the shard of one rank is, which need not be asked for when it is opened."""
        self._found = wanted, answer

    def request(self, wanted: Wanted, rank: int, wait_s: float = 0.0) -> trainer_pb2.GetShardRequest:
        """Asks where the rank's shard is."""
        return trainer_pb2.GetShardRequest(
            run=self._run,
            model=MODELS[self._model],
            rank=rank,
            position=wanted.position.message(),
            wait_s=wait_s,
            incarnation=wanted.incarnation,
            forward=wanted.forward,
        )

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Names what will be opened next, in this order; all else that was opened ahead is thrown away."""
        if self._transport.fork_guard.is_here():
            self._prefetch.expect(map(_in_any_epoch, wanted))

    def close(self) -> None:
        """Returns when nothing is opened any more; the transport is closed before."""
        if self._transport.fork_guard.is_here():
            self._prefetch.close()

    def _open_ahead(self, wanted: Wanted, is_wanted: Callable[[], bool]) -> list[Opened] | None:
        is_next_batch = wanted.position.batch > self._place().batch
        try:
            opened = self._open(wanted, is_wanted)
        except (UnavailableError, DeadlineExceededError, ResourceExhaustedError):
            # The service has until the shard is needed to come back.
            return None
        except GristmillError:
            if is_next_batch:
                # Not published yet, or no batch at all: iterating the trainer raises which.
                return None
            raise
        return [shard._replace(copies=self._convert.begin(shard.tensors)) for shard in opened]

    def _open(self, wanted: Wanted, is_wanted: Callable[[], bool] = lambda: True) -> list[Opened]:
        return [self._open_rank(wanted, rank, is_wanted) for rank in wanted.ranks]

    def _open_rank(self, wanted: Wanted, rank: int, is_wanted: Callable[[], bool]) -> Opened:
        position = wanted.position
        while True:
            found = self._find_shard(wanted, rank, is_wanted)
            is_forward = found.state == trainer_pb2.BATCH_STATE_FORWARD
            address = ShardAddress(self._run, self._model, rank, position.batch, position.mini_batch)
            mapped = map_published(address, found.shared_memory_path, found.size_bytes)
            try:
                columns = self._columns.of(is_forward)
                tensors, metadata = mapped or stream(self._transport, address, found.size_bytes, columns)
            except (NotFoundError, ReplacedError):
                # Withdrawn since it was found, or freed: the next answer says which.
                self._transport.pause(_WITHDRAWN_PAUSE_S)
                continue
            return Opened(self._columns.among(tensors), metadata, is_mapped=mapped is not None, is_forward=is_forward)

    def _find_shard(self, wanted: Wanted, rank: int, is_wanted: Callable[[], bool]) -> trainer_pb2.GetShardResponse:
        if (known := self._found) is not None and known[0] == wanted:
            # Once: where it is gone by now, the next answer says where it is.
            self._found = None
            if known[1].state == trainer_pb2.BATCH_STATE_PUBLISHED:
                return known[1]
        position = wanted.position
        found: trainer_pb2.GetShardResponse = self._transport.wait(
            lambda wait_s: self._ask_shard(wanted, rank, wait_s),
            lambda answer: bool(answer.state != trainer_pb2.BATCH_STATE_PENDING) or not is_wanted(),
            inf if position.batch <= self._place().batch else 0.0,
        )
        if found.state not in (trainer_pb2.BATCH_STATE_PUBLISHED, trainer_pb2.BATCH_STATE_FORWARD):
            raise FailedPreconditionError(
                f"run {self._run!r}: {position} is not published; iterate the trainer to wait"
            )
        return found

    def _ask_shard(self, wanted: Wanted, rank: int, wait_s: float) -> trainer_pb2.GetShardResponse:
        response: trainer_pb2.GetShardResponse = self._transport.call(
            self._transport.trainers.GetShard, self.request(wanted, rank, wait_s), wait_s=wait_s
        )
        if response.state == trainer_pb2.BATCH_STATE_PENDING and self._model == "policy":
            self._check_kept(wanted)
        return response

    def _check_kept(self, wanted: Wanted) -> None:
        """Who waits for what it wrote itself would wait for ever where that is lost."""
        batch = wanted.position.batch
        if self.kept.knows(batch):
            request = trainer_pb2.GetBatchRequest(run=self._run, batch=batch, ranks=wanted.ranks)
            answer: trainer_pb2.GetBatchResponse = self._transport.call(self._transport.trainers.GetBatch, request)
            self.kept.check(self._run, wanted.ranks, answer.awaits)


def _in_any_epoch(wanted: Wanted) -> Wanted:
    """A mini-batch has the same shards in every epoch."""
    return wanted._replace(position=wanted.position._replace(epoch=0))
