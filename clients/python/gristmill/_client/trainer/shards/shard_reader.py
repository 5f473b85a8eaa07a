"""Opens shards, mapped or streamed, some ahead of their use. The caller owns the position in the training order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from gristmill._client.connection.transport import Transport
from gristmill._client.trainer.shards.chosen_columns import ChosenColumns
from gristmill._client.trainer.shards.prefetch import Prefetch
from gristmill._client.trainer.shards.pull import Opened, ReplacedError, map_published, stream
from gristmill._client.trainer.written_columns import KeptColumns
from gristmill._torch.context_parallel import cut_shard
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
# A call that takes longer has waited for the batch.
_WAITED_S = 1.0


class Wanted(NamedTuple):
    """Identifies the shards of a mini-batch for some ranks, or their forward shards while its batch waits for columns.

    incarnation: the trainer's incarnation. Shards of an earlier one may be planned for another dp_size.
    """

    position: Position
    ranks: Sequence[int]
    forward: bool
    incarnation: int


class ShardReader:
    """Opens the shards of one model of a run.

    convert: starts copying shards that are opened ahead to the device. columns: the declared columns to read.
    ahead: the number of mini-batches to open in the background. position: returns the trainer's position.
    cp_rank: the context-parallel rank whose part of each shard to return; None: whole shards.
    kept: records which columns the trainer has stored.
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
        position: Callable[[], Position],
        cp_rank: int | None = None,
    ) -> None:
        self._transport, self._run, self._model = transport, run, model
        self._convert, self._columns, self._position = convert, columns, position
        self._cp_rank = cp_rank
        self.kept = KeptColumns()
        self._answer: tuple[Wanted, trainer_pb2.GetShardResponse] | None = None
        self._prefetch: Prefetch[Wanted, list[Opened]] = Prefetch(self._open_ahead, ahead)

    def open(self, wanted: Wanted) -> list[Opened]:
        """Return one shard per rank, which may have been opened ahead.

        Waits for a batch up to the trainer's current one. Raises NotFoundError if the batch is freed, BatchFailedError
        if it could not be built, and FailedPreconditionError if it is a later batch that is not published yet, or if
        the trainer must write its columns again.
        """
        self._transport.check_usable()
        opened = self._prefetch.take(_in_any_epoch(wanted)) or self._open(wanted)
        if not any(shard.is_forward for shard in opened):
            self.kept.completed(wanted.position.batch)
        return opened

    def use_answer(self, wanted: Wanted, answer: trainer_pb2.GetShardResponse) -> None:
        """Store the service's answer to `request`, so that opening this shard does not request it again."""
        self._answer = wanted, answer

    def request(self, wanted: Wanted, rank: int, wait_s: float = 0.0) -> trainer_pb2.GetShardRequest:
        """Return the request for the location of the rank's shard."""
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
        """Open the next shards in the background, in this order. Drop all other shards that were opened ahead."""
        if self._transport.fork_guard.is_here():
            self._prefetch.expect(map(_in_any_epoch, wanted))

    def close(self) -> None:
        """Stop opening shards, and wait for the thread to end. Close the transport first."""
        if self._transport.fork_guard.is_here():
            self._prefetch.close()

    def _open_ahead(self, wanted: Wanted, is_wanted: Callable[[], bool]) -> list[Opened] | None:
        is_next_batch = wanted.position.batch > self._position().batch
        try:
            opened = self._open(wanted, is_wanted)
        except (UnavailableError, DeadlineExceededError, ResourceExhaustedError):
            # The service may recover before the shard is needed.
            return None
        except GristmillError:
            if is_next_batch:
                # The batch is not published yet, or does not exist. Iterating the trainer raises the right error.
                return None
            raise
        return [shard._replace(copies=self._convert.begin(shard.tensors)) for shard in opened]

    def _open(self, wanted: Wanted, is_wanted: Callable[[], bool] = lambda: True) -> list[Opened]:
        return [self._open_rank(wanted, rank, is_wanted) for rank in wanted.ranks]

    def _open_rank(self, wanted: Wanted, rank: int, is_wanted: Callable[[], bool]) -> Opened:
        position, missed_since = wanted.position, inf
        while True:
            asked = time.monotonic()
            answer = self._find_shard(wanted, rank, is_wanted)
            if time.monotonic() - asked > _WAITED_S:
                # The batch was withdrawn, and is published again.
                missed_since = inf
            is_forward = answer.state == trainer_pb2.BATCH_STATE_FORWARD
            address = ShardAddress(self._run, self._model, rank, position.batch, position.mini_batch)
            mapped = map_published(address, answer.shared_memory_path, answer.size_bytes)
            try:
                columns = self._columns.of(is_forward)
                tensors, metadata = mapped or stream(self._transport, address, answer.size_bytes, columns)
            except (NotFoundError, ReplacedError) as error:
                # The shard was withdrawn or freed since the answer. The next answer says which.
                missed_since = min(missed_since, asked)
                if time.monotonic() - missed_since > self._transport.timeout_s:
                    raise UnavailableError(
                        f"{address}: the service says that the shard is published, and has not returned it for "
                        f"{self._transport.timeout_s:g} s: {error}; look for errors of the shard store in the "
                        "service's log, and restart the service"
                    ) from None
                self._transport.pause(_WITHDRAWN_PAUSE_S)
                continue
            tensors, is_mapped = self._columns.among(tensors), mapped is not None
            if self._cp_rank is not None:
                tensors, metadata = cut_shard(tensors, metadata, self._cp_rank)
                is_mapped = False
            return Opened(tensors, metadata, is_mapped=is_mapped, is_forward=is_forward)

    def _find_shard(self, wanted: Wanted, rank: int, is_wanted: Callable[[], bool]) -> trainer_pb2.GetShardResponse:
        if (known := self._answer) is not None and known[0] == wanted:
            # Use the answer once. If the shard has moved since, it must be requested again.
            self._answer = None
            if known[1].state == trainer_pb2.BATCH_STATE_PUBLISHED:
                return known[1]
        position = wanted.position
        answer: trainer_pb2.GetShardResponse = self._transport.wait(
            lambda wait_s: self._ask_shard(wanted, rank, wait_s),
            lambda answer: bool(answer.state != trainer_pb2.BATCH_STATE_PENDING) or not is_wanted(),
            inf if position.batch <= self._position().batch else 0.0,
        )
        if answer.state not in (trainer_pb2.BATCH_STATE_PUBLISHED, trainer_pb2.BATCH_STATE_FORWARD):
            raise FailedPreconditionError(
                f"run {self._run!r}: {position} is not published yet; iterate the trainer to wait for it"
            )
        return answer

    def _ask_shard(self, wanted: Wanted, rank: int, wait_s: float) -> trainer_pb2.GetShardResponse:
        response: trainer_pb2.GetShardResponse = self._transport.call(
            self._transport.trainers.GetShard, self.request(wanted, rank, wait_s), wait_s=wait_s
        )
        if response.state == trainer_pb2.BATCH_STATE_PENDING and self._model == "policy":
            self._check_kept(wanted)
        return response

    def _check_kept(self, wanted: Wanted) -> None:
        """Raise an error if the store lost a column that this trainer wrote, because the wait for it would not end."""
        batch = wanted.position.batch
        if self.kept.knows(batch):
            request = trainer_pb2.GetBatchRequest(run=self._run, batch=batch, ranks=wanted.ranks)
            answer: trainer_pb2.GetBatchResponse = self._transport.call(self._transport.trainers.GetBatch, request)
            self.kept.check(self._run, wanted.ranks, answer.awaits)


def _in_any_epoch(wanted: Wanted) -> Wanted:
    """Return the key of epoch 0, because a mini-batch has the same shards in every epoch."""
    return wanted._replace(position=wanted.position._replace(epoch=0))
