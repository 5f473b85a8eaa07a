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
    """Trains one data-parallel rank, or several, on a run: batches, their shards as torch tensors, acknowledgements,
    resuming.

    address, run: as for RolloutClient, also several replicas with commas between. The run exists before the first call.
    rank: the data-parallel rank of this process, from 0. Batches give a `Shard` for each mini-batch.
    ranks: in place of `rank`, for a controller that hands several ranks their work: a range, or "all" for every rank of
        the run. Batches give a `MiniBatch` for each mini-batch, with the shard of each rank in `shards[rank]`; it is
        acknowledged for all of them. Where a crash left ranks at different mini-batches, they continue from the first
        one that not all of them acknowledged.
    dp_size: when given, checked against the run's, so that a trainer of another size does not start unknowingly:
        `load_state_dict` is how it comes back with other ranks.
    model: `policy`, or `critic` where the run has one; each has an order of its own.
    device, dtypes: what tensors become when they are used, such as `device="cuda"` and
        `dtypes={"tokens": torch.int64, "masks": torch.int64, "loss_mask": torch.float32}`: by kind (also `floats`), and
        by name for a tensor or a declared column; left alone, they are as the mapped file has them.
    auto_commit: whether an acknowledgement also commits. Without checkpoints this is what you want; with them, pass
        False and call `commit` after each.
    acks: False for all but one of the processes of a data-parallel rank (tensor, pipeline, context parallel):
        they read the same shards and call `ack` likewise, which then only moves themselves.
    prefetch: how many shards are opened in the background while one is trained, so that the next is there when it is
        asked for, also the next batch's first where that is published already. Each is held in memory, unless it is
        mapped. 0 opens each when it is asked for.
    columns: which of the columns that the run declares are wanted; None: all. No byte of the others is streamed, copied
        or converted.
    timeout_s: for how long a call is tried while the service is away. Waiting for a batch is not bounded.
    credentials: the token and certificates of calls (`gristmill.Credentials`). None: what the environment has, which is
        nothing where no variable is set.

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

    **Without checkpoints** an acknowledgement commits at once: after a crash the run goes on behind what was
    acknowledged, and what the lost optimizer steps had learned is not offered again.

    **With checkpoints**, save `state_dict()` beside the weights, `commit()` when they are safe, and after a restart
    `load_state_dict(state)` on all ranks before the first batch. Every mini-batch is then trained exactly once by the
    weights that go on living.
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
            place=lambda: self.position,
        )
        # The plan of the batch that was given last, and the seconds that it was waited for.
        self._given: tuple[dict[str, Any], float] | None = None

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
        """The next mini-batch to train: the one after the last acknowledged. Asks the service when first used.

        Raises NotFoundError where there is no such run, and InvalidArgumentError where it has another `dp_size`, no
        such rank, or no such model.
        """
        return self._order.position

    def state_dict(self) -> dict[str, Any]:
        """The position in training and the identity of the run, for the trainer's checkpoint: plain values, to be saved
        together with the weights.

        `run_id` distinguishes the run from one that is created later under its name. `generation` counts how often the
        service found less of the run than it had acknowledged, as after a failover of Redis that lost the last writes.
        """
        return self._order.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], launch: str | None = None, give_up_reason: str | None = None
    ) -> None:
        """Puts the rank back to the position that `state_dict` gave, as a new incarnation of the trainer; every rank
        calls it, with the state of the same checkpoint, before its first batch. Calls of processes that were started
        earlier are refused from then on, with StaleIncarnationError.

        With another `dp_size` than the run has (given to the constructor), mini-batches that not all ranks have
        acknowledged are planned and cut again for it, from the same rows.

        Call `commit` once all ranks have loaded: where the crash came between saving and `commit`, the batches before
        the state's position are still held, and may be all that there is room for.

        state: of `state_dict`; `{}`, where there is no checkpoint, stands for the committed position, which brings
            ranks together that a crash left at different mini-batches. A state of an earlier gristmill, which does not
            name the run's identity, is not checked against it.
        launch: names this start of the trainer, the same on all its ranks and never used before. Not given, it is
            rank 0's choice, broadcast by torch.distributed (then a collective call of every process); random when
            dp_size is 1; else refused.
        give_up_reason: goes on from a state that is ahead of what the run has acknowledged: the prompt groups that it
            steps over are dropped and counted under this reason. Give it once, after you read what would be lost.

        Raises InvalidArgumentError for a state of another run's name, model or version. Raises FailedPreconditionError
        when the state's position is freed already (committed by a later checkpoint); when the state is of an earlier
        run, which was deleted and created again under the name: load `{}` to begin the new one; and when it is ahead of
        what the run has acknowledged, so that accepted rows would be skipped. The message then says what would be lost
        and which position fits: load the checkpoint of that position, or give `give_up_reason`.
        """
        self._order.resume(state, launch, give_up_reason)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Says that a checkpoint holds all training before its position: batches before it are freed once every rank
        has acknowledged them. Idempotent; any rank may call it, one is enough.

        state: the checkpoint's `state_dict`, where training went on since; else the position now.
        """
        self._order.commit(state)

    def ack(self, position: Position, following: Position) -> None:
        """Acknowledges a mini-batch that need not be opened; `Shard.ack` and `Batch.ack` call this.

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
        """Batches from the ranks' place on, each waited for as long as it takes, until the run is finished.

        Raises BatchFailedError with the reason for a batch that could not be made; iterating again goes on behind it,
        and lets its rows go. One that could not be aligned may be for another `dp_size`: its rows are kept until then.
        (One that failed before this trainer started is stepped over; `load_state_dict` logs a warning.)
        Raises FailedPreconditionError when asked for the next batch before all of this one is acknowledged.
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
        """The figures of the batch that iterating gave last, for an experiment tracker: numbers by name.

        The names are `batch`, `prompts`, `rows_received`, `rows` (after merging), `optimizer_steps`, `waited_s` (from
        asking for the batch until it came), those of the plan's `metrics`, such as `score_mean`, `pass_at_n`,
        `padding_share` and `staleness_mean`, those of its `counts` as `counts/NAME`, and of each tag as
        `tags/TAG/NAME`; each after the prefix. All ranks have the same but for `waited_s`: one logs them.

            for batch in trainer:
                wandb.log(trainer.metrics(), step=batch.number)

        Raises FailedPreconditionError before the first batch.
        """
        if self._given is None:
            raise FailedPreconditionError(
                f"{self._order.name}: the trainer has given no batch yet; call metrics() inside `for batch in trainer`"
            )
        return batch_metrics(*self._given, prefix)

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
            self._reader.found(self._wanted(self.position, forward=False), answer.shard)
        awaits = frozenset(awaited.column for awaited in answer.awaits)
        plan = Plan(json.loads(answer.plan_json))
        self._given = plan, time.monotonic() - asked
        return Batch(self, number, plan, self.model, self._order.epochs, awaits)

    def _ask_batch(self, number: int, wait_s: float) -> trainer_pb2.GetBatchResponse:
        # A critic waits for what the policy's ranks are awaited for, all of them.
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
        """The shard that is opened first, to be found with its batch; None where each of many ranks has one."""
        wanted = self._wanted(self.position, forward=False)
        return self._reader.request(wanted, wanted.ranks[0]) if len(wanted.ranks) == 1 else None

    # Shards.

    def open_shard(self, position: Position, *, forward: bool = False) -> S:
        """Opens one mini-batch, wherever it is in the training order: mapped where the service's shared memory is this
        machine's, else streamed. May be repeated until its batch is freed. It cannot be acknowledged.

        A batch up to the client's own is waited for: a service that comes back makes what it had published again.
        forward: whether the forward shard is wanted, too, while the batch waits for columns. Raises NotFoundError for a
        batch that is freed, BatchFailedError for one that could not be made, and FailedPreconditionError for one ahead
        that is not published yet, or whose columns were lost.
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
        # Asking for the place is what reads the run, and with it the ranks.
        _ = self.position
        return Wanted(position, self._order.ranks, forward, self._order.incarnation)

    def _expect(self, positions: Iterable[Position], *, forward: bool = False) -> None:
        """Names the shards that will be opened next, in this order: as many as `prefetch` says are opened in the
        background meanwhile, and others that were opened ahead are released.

        An error is raised when the shard is opened, unless it may be over by then.
        """
        self._reader.expect(self._wanted(position, forward) for position in positions)

    def write(self, shard: Shard, columns: Mapping[str, Any]) -> None:
        """Writes columns of `source: trainer` for a shard of `batch.forward()`. Once every shard of every rank has
        every column, the batch is completed, and its `mini_batches()` are there.

        columns: by name a tensor in the shape of the shard's `response_mask` (scope `row`: a value a row), or a list
            with one for each micro-batch. What stands on padding, prompts and padding rows is ignored.

            for shard in batch.forward():
                trainer.write(shard, {"values": [critic(micro) for micro in shard.micro_batches()]})

        Idempotent; a shard that is no forward shard has its columns. Raises AlreadyExistsError for other values than
        this incarnation wrote before (after `load_state_dict` all is written anew), and StaleIncarnationError.
        """
        self._transport.check_usable()
        written = self._columns.written
        for name, request, data in write_requests(
            shard, columns, written, self.run, self._order.incarnation, self._order.dp_size
        ):
            self._transport.call(self._transport.write_columns, data)
            self._reader.kept.wrote(request, name)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """The rows of a sealed batch as they were submitted, in the batch's order, each as `submit` takes it: what
        a trainer that comes back need not sample again. Raises NotFoundError for a batch that is freed, and
        FailedPreconditionError for one that is not sealed yet.
        """
        request = trainer_pb2.ExportBatchRequest(run=self.run, batch=batch)
        pages = self._transport.call(
            lambda request, timeout: list(self._transport.trainers.ExportBatch(request, timeout=timeout)), request
        )
        return [row for page in pages for row in to_rows(decode(page.rows), self._declared)]

    # The end.

    def close(self) -> None:
        """Closes the connection, and ends what is opened ahead. Shards that are there stay valid. Idempotent."""
        self._transport.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
