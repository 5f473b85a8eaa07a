"""The client of a trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypedDict, Unpack, cast, overload

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.transport import TIMEOUT_S, Transport
from gristmill._client.rollout.requests import check_run
from gristmill._client.trainer.batch import METRICS_PREFIX, Batch, Plan, S, batch_metrics
from gristmill._client.trainer.shards.chosen_columns import ChosenColumns
from gristmill._client.trainer.shards.pull import Opened
from gristmill._client.trainer.shards.shard_reader import ShardReader, Wanted
from gristmill._client.trainer.training_order import Ranks, TrainingOrder
from gristmill._client.trainer.written_columns import write_requests
from gristmill._torch.conversion import Conversion
from gristmill._torch.rows import MiniBatch, Shard
from gristmill._wire.addresses import MODELS, Position
from gristmill._wire.batch_table import BatchTable
from gristmill._wire.codecs import columns_codec
from gristmill._wire.codecs.row_codec import decode
from gristmill._wire.column_spec import ColumnSpec, tensor_names
from gristmill._wire.columns import Array
from gristmill._wire.rows import to_rows
from gristmill.errors import BatchFailedError, FailedPreconditionError, InvalidArgumentError
from gristmill.v1 import run_pb2, trainer_pb2

if TYPE_CHECKING:
    import torch


# An attempt to write a column may take longer by the column's size at this rate.
_WRITTEN_BYTES_PER_S = 8 << 20


class TrainerOptions(TypedDict, total=False):
    """The options of a `TrainerClient`, for type checkers."""

    cp_rank: int | None
    dp_size: int | None
    model: str
    device: torch.device | str | None
    dtypes: Mapping[str, torch.dtype] | None
    auto_commit: bool
    acks: bool
    prefetch: int
    columns: Sequence[str] | None
    timeout_s: float
    credentials: Credentials | None


class TrainerClient(Generic[S]):
    """Reads a run's batches for one or several data-parallel ranks: returns their shards as torch tensors, acknowledges
    them, and resumes after a restart.

    address, run: as for RolloutClient; separate several replicas by commas. The first call waits up to `timeout_s`
        until the run exists, and logs a warning meanwhile.
    rank: the data-parallel rank of this process, from 0. Batches yield a `Shard` for each mini-batch.
    ranks: instead of `rank`, for a controller that distributes work to several ranks: a range, or "all" for every rank
        of the run. Batches yield a `MiniBatch` for each mini-batch, with the shard of each rank in `shards[rank]`. It
        is acknowledged for all ranks. If a crash left ranks at different mini-batches, all continue at the first
        mini-batch that a rank has not acknowledged.
    cp_rank: the context-parallel rank of this process, from 0: shards contain its part of the tokens, if the run has
        `cp_shards`. None: shards are whole.
    dp_size: if set, it must equal the run's `dp_size`, so that a trainer of another size does not start by mistake. To
        resume with another number of ranks, call `load_state_dict`.
    model: `policy`, or `critic` if the run has one. Each model has its own training order.
    device, dtypes: the device and dtypes to which tensors are converted at first use, for example `device="cuda"` and
        `dtypes={"tokens": torch.int64, "masks": torch.int64, "loss_mask": torch.float32}`. Keys of `dtypes` are kinds
        (also `floats`), or names of tensors or declared columns. By default, tensors are not converted.
    auto_commit: whether an acknowledgement also commits. Use True without checkpoints. With checkpoints, pass False and
        call `commit` after each.
    acks: set it to False in all but one process of a data-parallel rank (tensor, pipeline, context parallel). These
        processes read the same shards, and their `ack` changes only their own position. A `cp_rank` above 0 never
        acknowledges.
    prefetch: the number of shards to open in the background during training, including the first shard of the next
        batch if that is published. Opened shards are in memory, unless they are mapped. 0 opens each shard on demand.
    columns: the declared columns to read; None: all. Other columns are not streamed, copied or converted.
    timeout_s: how long to retry a call while the service is unreachable, and to wait for a run that does not exist yet.
        Waiting for a batch has no limit.
    credentials: the token and certificates (`gristmill.Credentials`). None: from the environment variables, if set.

    Worked example, for one rank:

        trainer = TrainerClient("127.0.0.1:50051", run="my-run", rank=rank, dp_size=dp_size)
        for batch in trainer:                                    # waits; ends when the run is finished
            for shard in batch.mini_batches():                   # one optimizer step each
                for micro in shard.micro_batches():
                    logprobs = micro.logprobs(model(micro["sequences"], micro.position_ids()))
                    loss = -(logprobs * micro["advantages"] * micro["loss_mask"]).sum()
                    (loss * dp_size).backward()                  # DDP and FSDP average: see below
                optimizer.step()
                optimizer.zero_grad()
                shard.ack()

    A controller:

        trainer = TrainerClient("127.0.0.1:50051", run="my-run", ranks="all", dp_size=workers.dp_size)
        for batch in trainer:
            for mini_batch in batch.mini_batches():
                workers.train([(shard["sequences"], shard["advantages"]) for shard in mini_batch.shards.values()])
                mini_batch.ack()

    A trainer that iterates over mini-batches and epochs itself uses `list(batch.epoch())`, and calls `batch.ack()`.

    **The loss.** With a `loss_reduction`, advantages are scaled over the whole mini-batch, so that
    `sum(loss of a token * advantage)`, summed over tokens, micro-batches *and ranks*, is the reduction. If ranks
    *average* gradients (DDP, FSDP), multiply the loss by `dp_size` to undo the division. If ranks sum gradients, do
    not. The denominators for KL and entropy terms are in `shard.metadata["loss_denominators"]`.

    **Without checkpoints**, an acknowledgement commits immediately. After a crash the run continues after the last
    acknowledged mini-batch, and mini-batches with lost optimizer steps are not trained again.

    **With checkpoints**, save `state_dict()` with the weights, and call `commit()` when they are saved. After a
    restart, call `load_state_dict(state)` on all ranks before the first batch. The restored weights are then trained on
    every mini-batch exactly once.
    """

    @overload
    def __init__(
        self: TrainerClient[Shard], address: str, run: str, rank: int, **options: Unpack[TrainerOptions]
    ) -> None: ...

    @overload
    def __init__(
        self: TrainerClient[MiniBatch],
        address: str,
        run: str,
        *,
        ranks: range | Literal["all"],
        **options: Unpack[TrainerOptions],
    ) -> None: ...

    def __init__(
        self,
        address: str,
        run: str,
        rank: int | None = None,
        *,
        ranks: range | Literal["all"] | None = None,
        cp_rank: int | None = None,
        dp_size: int | None = None,
        model: str = "policy",
        device: torch.device | str | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        auto_commit: bool = True,
        acks: bool = True,
        prefetch: int = 1,
        columns: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        credentials: Credentials | None = None,
    ) -> None:
        if model not in MODELS:
            raise InvalidArgumentError(f"model is {model!r}; expected one of {', '.join(MODELS)}")
        if prefetch < 0:
            raise InvalidArgumentError(f"prefetch is {prefetch}; set the number of shards to open ahead, 0 or more")
        if isinstance(columns, str):
            raise InvalidArgumentError(f"columns is {columns!r}; pass a list of names: [{columns!r}]")
        if cp_rank is not None and ranks is not None:
            raise InvalidArgumentError(f"cp_rank is {cp_rank} and ranks is {ranks}; set rank instead of ranks")
        self.run, self.model = check_run(run), model
        self._ranks = Ranks.of(rank, ranks)
        self._transport = Transport(address, timeout_s, "TrainerClient", credentials)
        self._convert = Conversion(device, dtypes)
        self._columns = ChosenColumns(run, columns)
        self._declared: Sequence[ColumnSpec] = ()
        self._order = TrainingOrder(
            self._transport,
            run,
            model,
            self._ranks,
            dp_size=dp_size,
            auto_commit=auto_commit,
            acks=acks and not cp_rank,
            on_read=self._declare,
            on_resume=self._forget_opened,
        )
        self._reader = ShardReader(
            self._transport,
            run,
            model,
            convert=self._convert,
            columns=self._columns,
            ahead=prefetch,
            position=lambda: self.position,
            cp_rank=cp_rank,
        )
        # The plan of the last batch, and the seconds that the trainer waited for it.
        self._last_batch: tuple[dict[str, Any], float] | None = None

    def __repr__(self) -> str:
        return f"<TrainerClient of {self._order.name} {self._transport.state}: {self.model}, {self._order}>"

    def _declare(self, columns: Sequence[ColumnSpec]) -> None:
        self._declared = columns
        self._columns.declare(columns)
        self._convert.check(name for column in columns for name in tensor_names(column))

    def _forget_opened(self) -> None:
        self._reader.kept.forget()
        self._expect(())

    # The position in training.

    @property
    def position(self) -> Position:
        """Return the position of the next mini-batch to train, which follows the last acknowledged one. The first use
        requests it from the service.

        The first use also begins the ranks' training, and supersedes trainers that began to train these ranks earlier.

        Raises NotFoundError if the run does not exist after `timeout_s`, and InvalidArgumentError if it has another
        `dp_size`, or does not have the rank or the model. Raises FailedPreconditionError if an earlier trainer
        acknowledged mini-batches that it did not commit; call `load_state_dict` first.
        """
        return self._order.position

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training and the identity of the run as plain values. Save them together with the
        weights in the trainer's checkpoint.

        `run_id` distinguishes the run from a run that is created later under the same name. `generation` grows each
        time the service has lost acknowledged data of the run, for example by a failover of Redis.
        """
        return self._order.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], launch: str | None = None, give_up_reason: str | None = None
    ) -> None:
        """Resume at the position that `state_dict` returned, as a new incarnation of the trainer. Every rank calls it,
        with the state of the same checkpoint, before its first batch. Calls of processes that were started earlier
        then fail with StaleIncarnationError.

        If the client's `dp_size` differs from the run's, the service plans the mini-batches that not all ranks have
        acknowledged again, for the new size and from the same rows.

        Call `commit` after all ranks have loaded. If the crash happened between saving and `commit`, the batches before
        the state's position are still stored, and may use the whole capacity of the run.

        state: from `state_dict`. Without a checkpoint pass `{}`: all ranks continue at the committed position, even if
            a crash left them at different mini-batches. A state of an early version does not contain the run's
            identity, which is then not checked.
        launch: a name of this start of the trainer, the same on all ranks and never used before. By default rank 0
            chooses it and torch.distributed broadcasts it (a collective call of every process). With dp_size 1 it is
            random. Otherwise `launch` is required.
        give_up_reason: allows a state that is ahead of the run's acknowledged position. The prompt groups in between
            are dropped and counted under this reason. Pass it once, after you have read what would be lost.

        Raises InvalidArgumentError for a state of another run, model or version. Raises FailedPreconditionError if the
        state's position is freed already (committed by a later checkpoint), or if the state is of an earlier run of
        this name, which was deleted; load `{}` to start the new run. Also raises it if the state is ahead of the run's
        acknowledged position, so that accepted rows would be skipped. The message then says what would be lost and
        which position fits: load the checkpoint of that position, or pass `give_up_reason`.
        """
        self._order.resume(state, launch, give_up_reason)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Commit a position, because a checkpoint contains all training before it. The service frees the batches before
        it after every rank has acknowledged them. Idempotent. One rank calls it; if tokens are bound to ranks, each
        rank calls it.

        state: the checkpoint's `state_dict`, if training has continued since; by default the current position.
        """
        self._order.commit(state)

    def ack(self, position: Position, following: Position) -> None:
        """Acknowledge a mini-batch, even if it was not opened. `Shard.ack` and `Batch.ack` call this method.

        following: the position after it. Raises the errors of `Shard.ack`.
        """
        self._order.ack(position, following)

    def announce_policy_version(self, version: int, *, keep_later: bool = False) -> None:
        """Announce a policy version to rollout workers, after its weights can be loaded. Idempotent. One rank calls it:
        before its first batch, with the version that it begins with, and between a batch's last acknowledgement and the
        next batch, so that workers do not run ahead with weights that are about to be replaced.

        keep_later: do nothing if a later version was announced, for example when a trainer resumes from an earlier
            checkpoint. Otherwise FailedPreconditionError is raised, because versions never decrease.
        """
        self._order.wait_for_run()
        if keep_later and version < self._announced_version():
            return
        request = run_pb2.AnnouncePolicyVersionRequest(run=self.run, version=version)
        self._transport.call(self._transport.runs.AnnouncePolicyVersion, request)

    def _announced_version(self) -> int:
        request = run_pb2.WaitPolicyVersionRequest(run=self.run, at_least=0, wait_s=0.0)
        answer: run_pb2.WaitPolicyVersionResponse = self._transport.call(
            self._transport.runs.WaitPolicyVersion, request
        )
        return answer.version

    # Batches.

    def __iter__(self) -> Iterator[Batch[S]]:
        """Yield batches, starting at the ranks' position, until the run is finished. Waits for each without limit.

        Raises BatchFailedError with the reason if a batch could not be built. Iterating again continues with the next
        batch, and frees the rows of the failed one. If a batch could not be aligned, you can resume with another
        `dp_size` instead. (A batch that failed before this trainer started is skipped; `load_state_dict` logs a
        warning.) Raises FailedPreconditionError if the next batch is requested before this one is fully acknowledged.
        """
        while (batch := self._next_batch()) is not None:
            yield batch
            if not len(batch):
                # The batch has no mini-batch for this model.
                self._order.skip_to(batch.number + 1)
            elif self.position.batch == batch.number:
                raise FailedPreconditionError(
                    f"{self._order.name}: the loop left batch {batch.number} at {self.position}; iterate its "
                    "mini_batches() to the end and ack() each"
                )

    def metrics(self, prefix: str = METRICS_PREFIX) -> dict[str, float]:
        """Return the metrics of the last batch that the loop received, for an experiment tracker: numbers by name.

        Each name begins with the prefix. The names are `batch`, `prompts`, `rows_received`, `rows` (after merging),
        `optimizer_steps`, `waited_s` (the time that the trainer waited for the batch), the plan's `metrics` such as
        `score_mean`, `pass_at_n`, `padding_share` and `staleness_mean`, its `counts` as `counts/NAME`, and the metrics
        of each tag as `tags/TAG/NAME`. All values except `waited_s` are equal on all ranks, so one rank can log them.

            for batch in trainer:
                wandb.log(trainer.metrics(), step=batch.number)

        Raises FailedPreconditionError before the first batch.
        """
        if self._last_batch is None:
            raise FailedPreconditionError(
                f"{self._order.name}: the trainer has no batch yet; call metrics() inside `for batch in trainer`"
            )
        return batch_metrics(*self._last_batch, prefix)

    def _next_batch(self) -> Batch[S] | None:
        self._order.step_over_failed()
        number, asked = self.position.batch, time.monotonic()
        try:
            answer: trainer_pb2.GetBatchResponse = self._transport.wait(
                lambda wait_s: self._ask_batch(number, wait_s),
                lambda answer: bool(answer.state != trainer_pb2.BATCH_STATE_PENDING),
                inf,
            )
        except BatchFailedError:
            self._order.failed(number)
            raise
        if answer.state == trainer_pb2.BATCH_STATE_END:
            return None
        if answer.HasField("shard"):
            self._reader.use_answer(self._wanted(self.position, forward=False), answer.shard)
        awaits = frozenset(awaited.column for awaited in answer.awaits)
        plan = Plan(json.loads(answer.plan_json))
        self._last_batch = plan, time.monotonic() - asked
        return Batch(self, number, plan, self.model, self._order.epochs, awaits)

    def _ask_batch(self, number: int, wait_s: float) -> trainer_pb2.GetBatchResponse:
        # A critic waits until all of the policy's ranks have written their columns.
        ranks = self._order.ranks if self.model == "policy" else ()
        request = trainer_pb2.GetBatchRequest(
            run=self.run,
            batch=number,
            wait_s=wait_s,
            ranks=ranks,
            trains=MODELS[self.model] if self._order.acks else run_pb2.MODEL_UNSPECIFIED,
            shard=self._first_shard(),
        )
        response: trainer_pb2.GetBatchResponse = self._transport.call(
            self._transport.trainers.GetBatch, request, wait_s=wait_s
        )
        return response

    def _first_shard(self) -> trainer_pb2.GetShardRequest | None:
        """Return the request for the first shard, which the answer for its batch then includes. Return None if there
        are several ranks, because each has its own shard."""
        wanted = self._wanted(self.position, forward=False)
        return self._reader.request(wanted, wanted.ranks[0]) if len(wanted.ranks) == 1 else None

    # Shards.

    def open_shard(self, position: Position, *, forward: bool = False) -> S:
        """Open any mini-batch of the training order: map it if the service's shared memory is on this machine, else
        stream it. May be repeated until the batch is freed. The shard cannot be acknowledged.

        Waits for a batch up to the client's current one, because a restarted service rebuilds published batches.
        forward: whether to accept the forward shard while the batch waits for columns.

        Raises NotFoundError if the batch is freed, BatchFailedError if it could not be built, and
        FailedPreconditionError if it is a later batch that is not published yet, or its columns were lost.
        """
        return self._open(position, forward=forward)

    def _open(self, position: Position, *, forward: bool = False, ack: Callable[[], None] | None = None) -> S:
        opened = self._reader.open(self._wanted(position, forward))
        if self._ranks.is_one:
            return cast("S", self._shard(opened[0], position, ack))
        shards = {rank: self._shard(one, position) for rank, one in zip(self._order.ranks, opened, strict=True)}
        return cast("S", MiniBatch(position, shards, ack))

    def _shard(self, opened: Opened, position: Position, ack: Callable[[], None] | None = None) -> Shard:
        return Shard(
            opened.tensors,
            opened.metadata,
            self._convert,
            position,
            is_mapped=opened.is_mapped,
            ack=ack,
            copies=opened.copies,
            is_forward=opened.is_forward,
        )

    def _wanted(self, position: Position, forward: bool) -> Wanted:
        # Reading the position reads the run, and with it the ranks.
        _ = self.position
        return Wanted(position, self._order.ranks, forward, self._order.incarnation)

    def _expect(self, positions: Iterable[Position], *, forward: bool = False) -> None:
        """Open the next shards in the background, in this order, at most `prefetch` of them. Release all other shards
        that were opened ahead.

        Errors are raised when the shard is opened. Transient errors are retried.
        """
        self._reader.expect(self._wanted(position, forward) for position in positions)

    def write(self, shard: Shard, columns: Mapping[str, Any]) -> None:
        """Write columns of `source: trainer` for a shard of `batch.forward()`. After all columns were written for every
        shard of every rank, `mini_batches()` yields the batch.

        columns: for each name a tensor in the shape of the shard's `response_mask` (scope `row`: one value per row), or
            a list with one tensor per micro-batch. Values for padding, prompts and padding rows are ignored.

            for shard in batch.forward():
                trainer.write(shard, {"values": [critic(micro) for micro in shard.micro_batches()]})

        Idempotent. Does nothing if the shard is not a forward shard, because it already has its columns. Raises
        AlreadyExistsError if this incarnation wrote other values before (after `load_state_dict` all columns are
        written again), and StaleIncarnationError if a newer incarnation exists. Each column is stored completely
        or not at all. A column of a shard may have eight times `--max-message-bytes` of the service.
        """
        self._transport.check_usable()
        written = self._columns.written
        for name, request, file in write_requests(
            shard, columns, written, self.run, self._order.incarnation, self._order.dp_size
        ):
            send = partial(self._send_columns, request)
            self._transport.call(send, file, wait_s=len(file) // _WRITTEN_BYTES_PER_S)
            self._reader.kept.wrote(request, name)

    def _send_columns(self, request: trainer_pb2.WriteColumnsRequest, file: bytes, timeout: float) -> None:
        self._transport.write_columns(columns_codec.messages(request, file), timeout=timeout)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """Return the rows of a sealed batch in the form in which `submit` accepts them, in the batch's order, so that a
        restarted trainer need not sample them again. Raises NotFoundError if the batch is freed, and
        FailedPreconditionError if it is not sealed yet.
        """
        request = trainer_pb2.ExportBatchRequest(run=self.run, batch=batch)
        pages = self._transport.call(
            lambda request, timeout: list(self._transport.trainers.ExportBatch(request, timeout=timeout)), request
        )
        return [row for page in pages for row in to_rows(decode(page.rows), self._declared)]

    def table(self, batch: int) -> dict[str, Array]:
        """Return the table of a batch, like `Batch.table`, also of one that is freed, as long as the service has it: a
        process keeps the tables of its newest batches in memory. Raises NotFoundError if it has it no longer, or if the
        batch is not sealed yet.
        """
        request = trainer_pb2.ReadTableRequest(run=self.run, batch=batch)
        pieces = self._transport.call(
            lambda request, timeout: list(self._transport.trainers.ReadTable(request, timeout=timeout)), request
        )
        return BatchTable.decode(b"".join(piece.data for piece in pieces)).by_row()

    # The end.

    def close(self) -> None:
        """Close the connection and stop opening shards ahead. Shards that are in use stay valid. Idempotent."""
        self._transport.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
