"""The client of a trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from gristmill._wire.codecs.row_codec import decode
from gristmill._wire.column_spec import ColumnSpec, tensor_names
from gristmill._wire.rows import to_rows
from gristmill.errors import BatchFailedError, FailedPreconditionError, InvalidArgumentError
from gristmill.v1 import run_pb2, trainer_pb2

if TYPE_CHECKING:
    import torch


class TrainerOptions(TypedDict, total=False):
    """The options of a `TrainerClient`, for type checkers."""

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
    """Reads a run's batches for one or several data-parallel ranks: gives their shards as torch tensors, acknowledges
    them, and resumes after a restart.

    address, run: as for RolloutClient; separate several replicas by commas. The run must exist before the first call.
    rank: the data-parallel rank of this process, from 0. Batches give a `Shard` for each mini-batch.
    ranks: instead of `rank`, for a controller that distributes work to several ranks: a range, or "all" for every rank
        of the run. Batches give a `MiniBatch` for each mini-batch, with the shard of each rank in `shards[rank]`; it is
        acknowledged for all of them. If a crash left ranks at different mini-batches, they continue from the first
        one that not all of them acknowledged.
    dp_size: if given, it must equal the run's, so that a trainer of another size does not start by mistake. To resume
        with another number of ranks, call `load_state_dict`.
    model: `policy`, or `critic` if the run has one; each has an order of its own.
    device, dtypes: the device and dtypes to which tensors are converted when they are used, such as `device="cuda"` and
        `dtypes={"tokens": torch.int64, "masks": torch.int64, "loss_mask": torch.float32}`: by kind (also `floats`), or
        by the name of a tensor or a declared column. By default tensors are as the mapped file has them.
    auto_commit: whether an acknowledgement also commits. Keep it True without checkpoints; with them, pass False and
        call `commit` after each.
    acks: False for all but one of the processes of a data-parallel rank (tensor, pipeline, context parallel):
        they read the same shards and call `ack` likewise, which then changes only their own position.
    prefetch: the number of shards to open in the background while one is trained, including the first of the next
        batch if it is published already. Each is in memory, unless it is mapped. 0 opens each on demand.
    columns: the declared columns to read; None: all. No byte of the others is streamed, copied or converted.
    timeout_s: how long to retry a call while the service is unreachable. Waiting for a batch has no limit.
    credentials: the token and certificates of calls (`gristmill.Credentials`). None: those of the environment
        variables, if any is set.

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

    A trainer that goes through mini-batches and epochs itself takes `list(batch.epoch())`, and calls `batch.ack()`.

    **The loss.** With a `loss_reduction`, advantages are scaled over the whole mini-batch, so that
    `sum(loss of a token * advantage)`, summed over tokens, micro-batches *and ranks*, is the reduction. A trainer whose
    ranks *average* gradients (DDP, FSDP) divides by dp_size once too often: multiply its loss by `dp_size`. One that
    sums gradients does not. KL and entropy terms find the denominators in `shard.metadata["loss_denominators"]`.

    **Without checkpoints** an acknowledgement commits at once: after a crash the run continues after the last
    acknowledged mini-batch, and mini-batches whose optimizer steps were lost are not trained again.

    **With checkpoints**, save `state_dict()` with the weights, `commit()` when they are safe, and after a restart
    `load_state_dict(state)` on all ranks before the first batch. The surviving weights have then trained every
    mini-batch exactly once.
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
            raise InvalidArgumentError(f"model is {model!r}; known are {', '.join(MODELS)}")
        if prefetch < 0:
            raise InvalidArgumentError(f"prefetch is {prefetch}; give how many shards to open ahead, 0 for none")
        if isinstance(columns, str):
            raise InvalidArgumentError(f"columns is {columns!r}; give a list of names, as [{columns!r}]")
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
            acks=acks,
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
        )
        # The plan of the batch that was given last, and how many seconds the trainer waited for it.
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
        """Return the position of the next mini-batch to train, after the last acknowledged one. Asks the service when
        first used.

        The first use begins the ranks' training: trainers of these ranks that began before are superseded.

        Raises NotFoundError if the run does not exist, and InvalidArgumentError if it has another `dp_size`, no such
        rank, or no such model. Raises FailedPreconditionError if an earlier trainer acknowledged mini-batches that it
        did not commit: call `load_state_dict` first.
        """
        return self._order.position

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training and the identity of the run as plain values, to be saved together with the
        weights in the trainer's checkpoint.

        `run_id` distinguishes the run from one that is created later under its name. `generation` grows each time that
        the service has lost acknowledged data of the run, as after a failover of Redis that lost the last writes.
        """
        return self._order.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], launch: str | None = None, give_up_reason: str | None = None
    ) -> None:
        """Resume at the position that `state_dict` returned, as a new incarnation of the trainer. Every rank calls it,
        with the state of the same checkpoint, before its first batch. Calls of processes that were started earlier
        then fail with StaleIncarnationError.

        If `dp_size` (of the constructor) is not the run's, the service plans mini-batches that not all ranks have
        acknowledged again for the new size, from the same rows.

        Call `commit` once all ranks have loaded: if the crash came between saving and `commit`, the batches before
        the state's position are still stored, and may use the run's whole capacity.

        state: from `state_dict`. Without a checkpoint give `{}`: all ranks continue at the committed position, also
            if a crash left them at different mini-batches. A state of an earlier gristmill, which does not name the
            run's identity, is not checked against it.
        launch: a name of this start of the trainer, the same on all its ranks and never used before. By default rank 0
            chooses it and torch.distributed broadcasts it (a collective call of every process); with dp_size 1 it is
            random; otherwise the call is refused.
        give_up_reason: continue from a state that is ahead of what the run has acknowledged: the prompt groups in
            between are dropped and counted under this reason. Give it once, after you read what would be lost.

        Raises InvalidArgumentError for a state of another run's name, model or version. Raises FailedPreconditionError
        if the state's position is freed already (committed by a later checkpoint); if the state is of an earlier run,
        which was deleted and created again under the name: load `{}` to start the new one; and if it is ahead of
        what the run has acknowledged, so that accepted rows would be skipped. The message then says what would be lost
        and which position fits: load the checkpoint of that position, or give `give_up_reason`.
        """
        self._order.resume(state, launch, give_up_reason)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Commit: a checkpoint has all training before its position, so that batches before it are freed once every
        rank has acknowledged them. Idempotent; any rank may call it, one is enough, unless tokens are bound to ranks:
        then each calls it.

        state: the checkpoint's `state_dict`, if training has continued since; by default the current position.
        """
        self._order.commit(state)

    def ack(self, position: Position, following: Position) -> None:
        """Acknowledge a mini-batch, opened or not; `Shard.ack` and `Batch.ack` call this.

        following: the position after it. Errors are those of `Shard.ack`.
        """
        self._order.ack(position, following)

    def announce_policy_version(self, version: int, *, keep_later: bool = False) -> None:
        """Announce the policy version that rollout workers can sample from, once its weights can be loaded. Idempotent;
        one rank calls it.

        keep_later: do nothing if a later version was announced, as when a trainer resumes from an earlier checkpoint
            and makes versions again. Otherwise FailedPreconditionError is raised, because versions never go back.
        """
        if keep_later and version <= self._announced_version():
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
        """Yield batches from the ranks' position on, until the run is finished. Waits for each without limit.

        Raises BatchFailedError with the reason for a batch that could not be made. Iterating again continues after it,
        and frees its rows. A batch that could not be aligned may be possible with another `dp_size`: its rows stay
        until then. (A batch that failed before this trainer started is skipped; `load_state_dict` logs a warning.)
        Raises FailedPreconditionError if the next batch is requested before all of this one is acknowledged.
        """
        while (batch := self._next_batch()) is not None:
            yield batch
            if not len(batch):
                # Nothing of it is for this model.
                self._order.skip_to(batch.number + 1)
            elif self.position.batch == batch.number:
                raise FailedPreconditionError(
                    f"{self._order.name}: the loop left batch {batch.number} at {self.position}; train its "
                    "mini_batches() to the end and ack() each"
                )

    def metrics(self, prefix: str = METRICS_PREFIX) -> dict[str, float]:
        """Return the metrics of the batch that was given last, for an experiment tracker: numbers by name.

        The names are `batch`, `prompts`, `rows_received`, `rows` (after merging), `optimizer_steps`, `waited_s` (from
        the request for the batch until its arrival), those of the plan's `metrics`, such as `score_mean`, `pass_at_n`,
        `padding_share` and `staleness_mean`, those of its `counts` as `counts/NAME`, and of each tag as
        `tags/TAG/NAME`; each after the prefix. All ranks have the same except for `waited_s`, so that one logs them.

            for batch in trainer:
                wandb.log(trainer.metrics(), step=batch.number)

        Raises FailedPreconditionError before the first batch.
        """
        if self._last_batch is None:
            raise FailedPreconditionError(
                f"{self._order.name}: the trainer has given no batch yet; call metrics() inside `for batch in trainer`"
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
        """Return the request for the first shard, which the answer for its batch then includes; None with several
        ranks, because each has a shard of its own."""
        wanted = self._wanted(self.position, forward=False)
        return self._reader.request(wanted, wanted.ranks[0]) if len(wanted.ranks) == 1 else None

    # Shards.

    def open_shard(self, position: Position, *, forward: bool = False) -> S:
        """Open any mini-batch of the training order: map it if the service's shared memory is on this machine, else
        stream it. May be repeated until its batch is freed. The shard cannot be acknowledged.

        Waits for a batch that is not later than the client's own: a restarted service rebuilds what it had published.
        forward: whether to accept the forward shard while the batch waits for columns.

        Raises NotFoundError for a batch that is freed, BatchFailedError for one that could not be made, and
        FailedPreconditionError for a later batch that is not published yet, or whose columns were lost.
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
        """Open the next shards in the background, in this order, at most `prefetch` of them; release all others that
        were opened ahead.

        Errors found here are raised when the shard is opened, except transient ones, which are tried again.
        """
        self._reader.expect(self._wanted(position, forward) for position in positions)

    def write(self, shard: Shard, columns: Mapping[str, Any]) -> None:
        """Write columns of `source: trainer` for a shard of `batch.forward()`. Once every shard of every rank has
        every column, the batch is complete, and `mini_batches()` yields it.

        columns: by name a tensor in the shape of the shard's `response_mask` (scope `row`: one value per row), or a
            list with one for each micro-batch. Values on padding, prompts and padding rows are ignored.

            for shard in batch.forward():
                trainer.write(shard, {"values": [critic(micro) for micro in shard.micro_batches()]})

        Idempotent. Does nothing for a shard that is no forward shard, because it has its columns. Raises
        AlreadyExistsError if this incarnation wrote other values before (after `load_state_dict` all columns are
        written again), and StaleIncarnationError.
        """
        self._transport.check_usable()
        written = self._columns.written
        for name, request, data in write_requests(
            shard, columns, written, self.run, self._order.incarnation, self._order.dp_size
        ):
            self._transport.call(self._transport.write_columns, data)
            self._reader.kept.wrote(request, name)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """Return the rows of a sealed batch as they were submitted, in the batch's order, each as `submit` takes it, so
        that a restarted trainer need not sample them again. Raises NotFoundError for a batch that is freed, and
        FailedPreconditionError for one that is not sealed yet.
        """
        request = trainer_pb2.ExportBatchRequest(run=self.run, batch=batch)
        pages = self._transport.call(
            lambda request, timeout: list(self._transport.trainers.ExportBatch(request, timeout=timeout)), request
        )
        return [row for page in pages for row in to_rows(decode(page.rows), self._declared)]

    # The end.

    def close(self) -> None:
        """Close the connection and stop opening shards ahead. Shards that were given stay valid. Idempotent."""
        self._transport.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
