"""The client of trainer ranks. Owns a rank's place in the training order; what shards there are is the service's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gristmill._client.checkpoint import Checkpoint, checkpoint_of
from gristmill._client.chosen_columns import ChosenColumns
from gristmill._client.prefetch import Prefetch
from gristmill._client.pull import Opened, ReplacedError, map_published, stream
from gristmill._client.requests import check_run
from gristmill._client.trainer_batch import Batch
from gristmill._client.transport import TIMEOUT_S, Transport
from gristmill._wire.addresses import MODELS, Position, ShardAddress
from gristmill._wire.column_spec import specs_of, tensor_names
from gristmill.errors import (
    BatchFailedError,
    DeadlineExceededError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill.torch import Conversion, Shard
from gristmill.v1 import run_pb2, trainer_pb2

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("gristmill")
_WITHDRAWN_PAUSE_S = 0.1


class _Wanted(NamedTuple):
    """A shard, or its forward shard while its batch waits for columns."""

    position: Position
    forward: bool


class TrainerClient:
    """One data-parallel rank's way through a run: batches, their shards as torch tensors, acknowledgements, resuming.

    address, run: as for RolloutClient, also several replicas with commas between. The run exists before the first call.
    rank: this data-parallel rank, from 0.
    dp_size: when given, checked against the run's, so that a trainer of another size does not start unknowingly:
        `load_state_dict` is how it comes back with other ranks.
    model: `policy`, or `critic` where the run has one; each has an order of its own.
    device, dtypes: what tensors become when they are used, such as `device="cuda"` and
        `dtypes={"tokens": torch.int64, "masks": torch.int64, "loss_mask": torch.float32}`: by kind (also `floats`), and
        by name for a tensor or a declared column; left alone, they are as the mapped file has them.
    auto_commit: whether an acknowledgement also commits. Without checkpoints this is what you want; with them, pass
        False and call `commit` after each.
    acknowledges: False for all but one of the processes of a data-parallel rank (tensor, pipeline, context parallel):
        they read the same shards and call `ack` likewise, which then only moves themselves.
    prefetch: how many shards are opened in the background while one is trained, so that the next is there when it is
        asked for, also the next batch's first where that is published already. Each is held in memory, unless it is
        mapped. 0 opens each when it is asked for.
    columns: which of the columns that the run declares are wanted; None: all. No byte of the others is streamed, copied
        or converted.
    timeout_s: for how long a call is tried while the service is away. Waiting for a batch is not bounded.

    Worked example:

        trainer = TrainerClient("127.0.0.1:50051", run="my-run", rank=rank, dp_size=dp_size)
        for batch in trainer:                                    # waits; ends when the run is finished
            for shard in batch.mini_batches():                   # one optimizer step each
                for micro in shard.micro_batches():
                    log_probs = micro.response_logprobs(model(micro["sequences"], micro.position_ids()))
                    loss = -(log_probs * micro["advantages"] * micro["loss_mask"]).sum()
                    (loss * dp_size).backward()                  # DDP and FSDP average: see below
                optimizer.step()
                optimizer.zero_grad()
                shard.ack()

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

    def __init__(
        self,
        address: str,
        run: str,
        rank: int,
        *,
        dp_size: int | None = None,
        model: str = "policy",
        device: torch.device | str | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        auto_commit: bool = True,
        acknowledges: bool = True,
        prefetch: int = 1,
        columns: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if model not in MODELS:
            raise InvalidArgumentError(f"model is {model!r}; known are {', '.join(MODELS)}")
        if prefetch < 0:
            raise InvalidArgumentError(f"prefetch is {prefetch}; give how many shards to open ahead, 0 for none")
        if isinstance(columns, str):
            raise InvalidArgumentError(f"columns is {columns!r}; give a list of names, as [{columns!r}]")
        self.run, self.rank, self.model = check_run(run), rank, model
        self._expected_dp_size = dp_size
        self._convert = Conversion(device, dtypes)
        self._columns = ChosenColumns(run, columns)
        self._auto_commit = auto_commit
        self._acknowledges = acknowledges
        self._transport = Transport(address, timeout_s, "TrainerClient")
        self._prefetch: Prefetch[_Wanted, Opened] = Prefetch(self._open_ahead, prefetch)
        self._dp_size = 0
        self._epochs = 1
        self._position: Position | None = None
        # The batch whose failure the caller was told of last.
        self._failed: int | None = None
        # A place in the last failed batch that the rank went past, until the service is told.
        self._went_past: Position | None = None
        self._incarnation = 0
        self._run_id, self._generation = "", 0

    # Where the rank is.

    @property
    def position(self) -> Position:
        """The next mini-batch to train: the one after the last acknowledged. Asks the service when first used.

        Raises NotFoundError where there is no such run, and InvalidArgumentError where it has another `dp_size`, no
        such rank, or no such model.
        """
        if self._position is None:
            self._position = self._start()
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """The position in training and the identity of the run, for the trainer's checkpoint: plain values, to be saved
        together with the weights.

        `run_id` distinguishes the run from one that is created later under its name. `generation` counts how often the
        service found less of the run than it had acknowledged, as after a failover of Redis that lost the last writes.
        """
        return Checkpoint(self.position, self._run_id, self._generation).state(self.run, self.model)

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
        from gristmill._client.launch_id import make_launch_id

        if give_up_reason == "":
            raise InvalidArgumentError("give_up_reason is empty; name the reason under which the groups are counted")
        saved = checkpoint_of(state, self.run, self.model) if state else None
        self._read_run(self._expected_dp_size)
        self._check_rank()
        request = trainer_pb2.ResumeRequest(
            run=self.run,
            model=MODELS[self.model],
            position=None if saved is None else saved.position.message(),
            launch=launch or make_launch_id(self._dp_size),
            dp_size=self._dp_size,
            run_id="" if saved is None else saved.run_id,
            generation=0 if saved is None else saved.generation,
            give_up_reason=give_up_reason or "",
        )
        response = self._transport.call(self._transport.trainers.Resume, request)
        resumed = Position.of(response.position)
        if saved is not None and resumed != saved.position:
            raise FailedPreconditionError(
                f"run {self.run!r} rank {self.rank}: another rank of this launch resumed at {resumed} and this one's "
                f"state is {saved.position}; load the state of the same checkpoint on all ranks"
            )
        self._position, self._incarnation = resumed, response.incarnation
        self._failed = self._went_past = None
        self._run_id, self._generation = response.run_id, response.generation
        self._go_past_all(self._read_run(self._expected_dp_size).failed_batches)
        # Opened for another incarnation, perhaps cut for another dp_size.
        self.expect(())

    def _go_past_all(self, failed: Mapping[int, str]) -> None:
        """A batch that failed is told of by an error once. A trainer that ends by it and is started again would get
        the same error for ever. One that failed for another dp_size is not among these any more: it is built anew."""
        while (number := self.position.batch) in failed:
            _log.warning("run %r: batch %d failed, and is stepped over: %s", self.run, number, failed[number])
            self._go_past(number)

    def _go_past(self, batch: int) -> None:
        self._went_past, self._position = self.position, Position(batch + 1)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Says that a checkpoint holds all training before its position: batches before it are freed once every rank
        has acknowledged them. Idempotent; any rank may call it, one is enough.

        state: the checkpoint's `state_dict`, where training went on since; else the position now.
        """
        position = self.position if state is None else checkpoint_of(state, self.run, self.model).position
        request = trainer_pb2.CommitRequest(
            run=self.run, model=MODELS[self.model], position=position.message(), incarnation=self._incarnation
        )
        self._follow(self._transport.call(self._transport.trainers.Commit, request).generation)

    def _follow(self, generation: int) -> None:
        """The run took the rank's position in this generation, so that its next checkpoints are of that."""
        self._generation = max(self._generation, generation)

    def announce_policy_version(self, version: int) -> None:
        """Tells rollout workers which version to sample from, once its weights can be had. One rank calls it; versions
        never go back. Idempotent."""
        request = run_pb2.AnnouncePolicyVersionRequest(run=self.run, version=version)
        self._transport.call(self._transport.runs.AnnouncePolicyVersion, request)

    def _start(self) -> Position:
        """Checks the run against what this rank expects, and returns the rank's place."""
        status = self._read_run(None)
        if self._expected_dp_size not in (None, self._dp_size):
            raise InvalidArgumentError(
                f"run {self.run!r}: its dp_size is {self._dp_size} and this trainer's {self._expected_dp_size}; create "
                "the run with the trainer's, or call load_state_dict first, which has the run's batches cut anew"
            )
        self._check_rank()
        self._run_id, self._generation = status.run_id, status.generation
        number = MODELS[self.model]
        for progress in status.models:
            if progress.model == number:
                self._incarnation = progress.incarnation
        for place in status.ranks:
            if (place.model, place.rank) == (number, self.rank):
                found = Position.of(place.next)
                if found.batch - 1 in status.failed_batches:
                    self._went_past = Position(found.batch - 1, self._epochs)
                return found
        raise InvalidArgumentError(
            f"run {self.run!r}: it has no {self.model}; give critic_mini_batch_size when it is created"
        )

    def _read_run(self, dp_size: int | None) -> run_pb2.RunStatus:
        """The run's state. dp_size: what it is to have; None: what it has."""
        answer: run_pb2.GetRunResponse = self._transport.call(
            self._transport.runs.GetRun, run_pb2.GetRunRequest(run=self.run)
        )
        config = json.loads(answer.status.config_json)
        self._epochs, self._dp_size = config.get("update_epochs_per_batch", 1), dp_size or config.get("dp_size", 1)
        columns = specs_of(config.get("columns", ()))
        self._columns.declare(columns)
        self._convert.check(name for column in columns for name in tensor_names(column))
        return answer.status

    def _check_rank(self) -> None:
        if not 0 <= self.rank < self._dp_size:
            raise InvalidArgumentError(
                f"run {self.run!r}: rank is {self.rank}; with dp_size {self._dp_size} it is 0..{self._dp_size - 1}"
            )

    # Batches.

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the rank's place on, each waited for as long as it takes, until the run is finished.

        Raises BatchFailedError with the reason for a batch that could not be made; iterating again goes on behind it,
        and lets its rows go. One that could not be aligned may be for another `dp_size`: its rows are kept until then.
        (One that failed before this trainer started is stepped over; `load_state_dict` logs a warning.)
        Raises FailedPreconditionError when asked for the next batch before all of this one is acknowledged.
        """
        while (batch := self._next_batch()) is not None:
            yield batch
            if not len(batch):
                # Nothing of it is for this model.
                self._position = Position(batch.number + 1)
            elif self.position.batch == batch.number:
                raise FailedPreconditionError(
                    f"run {self.run!r} rank {self.rank}: batch {batch.number} was left at {self.position}; train its "
                    "mini_batches() to the end and ack() each"
                )

    def _next_batch(self) -> Batch | None:
        if self._failed == self.position.batch:
            self._go_past(self._failed)
        if self._went_past is not None:
            # The service keeps the rows of failed batches until all ranks go on without them.
            self._send_acknowledgement(self._went_past)
            self._went_past = None
        number = self.position.batch
        try:
            answer: trainer_pb2.GetBatchResponse = self._transport.wait(
                lambda wait_s: self._ask_batch(number, wait_s),
                lambda answer: bool(answer.state != trainer_pb2.BATCH_STATE_PENDING),
                inf,
            )
        except BatchFailedError:
            self._failed = number
            raise
        if answer.state == trainer_pb2.BATCH_STATE_END:
            return None
        awaits = frozenset(awaited.column for awaited in answer.awaits)
        return Batch(self, number, json.loads(answer.plan_json), self.model, self._epochs, awaits)

    def _ask_batch(self, number: int, wait_s: float) -> trainer_pb2.GetBatchResponse:
        request = trainer_pb2.GetBatchRequest(run=self.run, batch=number, wait_s=wait_s)
        response: trainer_pb2.GetBatchResponse = self._transport.call(
            self._transport.trainers.GetBatch, request, wait_s=wait_s
        )
        return response

    # Shards.

    def open_shard(
        self, position: Position, acknowledge: Callable[[], None] | None = None, *, forward: bool = False
    ) -> Shard:
        """One shard of this rank, wherever it stands in the training order: mapped where the service's shared memory is
        this machine's, else streamed. May be repeated until its batch is freed.

        A batch up to the rank's own is waited for: a service that comes back makes what it had published again.
        acknowledge: what the shard's `ack` does, if anything. forward: whether the forward shard is wanted, too, while
        the batch waits for columns. Raises NotFoundError for a batch that is freed, BatchFailedError for one that could
        not be made, and FailedPreconditionError for one ahead that is not published yet.
        """
        self._transport.check_usable()
        opened = self._prefetch.take(_Wanted(position._replace(epoch=0), forward)) or self._open(
            _Wanted(position, forward)
        )
        return Shard(
            opened.tensors,
            opened.metadata,
            self._convert,
            position,
            is_mapped=opened.is_mapped,
            acknowledge=acknowledge,
            copies=opened.copies,
            is_forward=opened.is_forward,
        )

    def expect(self, positions: Iterable[Position], *, forward: bool = False) -> None:
        """Names the shards that will be opened next, in this order: as many as `prefetch` says are opened in the
        background meanwhile, and those that were and are not among them are thrown away. Iterating a batch calls it.

        An error that is met so is raised when the shard is opened, unless it may be over by then.
        """
        if self._transport.fork_guard.is_here():
            # A mini-batch has the same shard in every epoch.
            self._prefetch.expect(_Wanted(position._replace(epoch=0), forward) for position in positions)

    def _open_ahead(self, wanted: _Wanted, is_wanted: Callable[[], bool]) -> Opened | None:
        is_next_batch = wanted.position.batch > self.position.batch
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
        return opened._replace(copies=self._convert.begin(opened.tensors))

    def _open(self, wanted: _Wanted, is_wanted: Callable[[], bool] = lambda: True) -> Opened:
        position = wanted.position
        while True:
            found = self._find_shard(wanted, is_wanted)
            is_forward = found.state == trainer_pb2.BATCH_STATE_FORWARD
            address = ShardAddress(self.run, self.model, self.rank, position.batch, position.mini_batch)
            mapped = map_published(address, found.shared_memory_path, found.size_bytes)
            try:
                columns = self._columns.of(is_forward)
                tensors, metadata = mapped or stream(self._transport, address, found.size_bytes, columns)
            except (NotFoundError, ReplacedError):
                # Withdrawn since it was found, or freed: the next answer says which.
                self._transport.pause(_WITHDRAWN_PAUSE_S)
                continue
            return Opened(self._columns.among(tensors), metadata, is_mapped=mapped is not None, is_forward=is_forward)

    def _find_shard(self, wanted: _Wanted, is_wanted: Callable[[], bool]) -> trainer_pb2.GetShardResponse:
        position = wanted.position
        found: trainer_pb2.GetShardResponse = self._transport.wait(
            lambda wait_s: self._ask_shard(wanted, wait_s),
            lambda answer: bool(answer.state != trainer_pb2.BATCH_STATE_PENDING) or not is_wanted(),
            inf if position.batch <= self.position.batch else 0.0,
        )
        if found.state not in (trainer_pb2.BATCH_STATE_PUBLISHED, trainer_pb2.BATCH_STATE_FORWARD):
            raise FailedPreconditionError(f"run {self.run!r}: {position} is not published; iterate the trainer to wait")
        return found

    def _ask_shard(self, wanted: _Wanted, wait_s: float) -> trainer_pb2.GetShardResponse:
        request = trainer_pb2.GetShardRequest(
            run=self.run,
            model=MODELS[self.model],
            rank=self.rank,
            position=wanted.position.message(),
            wait_s=wait_s,
            incarnation=self._incarnation,
            forward=wanted.forward,
        )
        response: trainer_pb2.GetShardResponse = self._transport.call(
            self._transport.trainers.GetShard, request, wait_s=wait_s
        )
        return response

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
        from gristmill._client.written_columns import requests

        self._transport.check_usable()
        for request in requests(shard, columns, self._columns.written, self.run, self._incarnation):
            self._transport.call(self._transport.trainers.WriteColumns, request)

    def acknowledge(self, position: Position, following: Position) -> None:
        """Called by a shard's `ack`. `following` is the position after it."""
        if position < self.position:
            return
        if not self._acknowledges and position > self.position:
            raise FailedPreconditionError(
                f"run {self.run!r} rank {self.rank}: {position} cannot be acknowledged, the next is {self.position}; "
                "acknowledge in order"
            )
        self._send_acknowledgement(position)
        # Not the next that the service answers, which steps over failed batches: iterating raises their errors.
        self._position = following

    def _send_acknowledgement(self, position: Position) -> None:
        if not self._acknowledges:
            return
        request = trainer_pb2.AcknowledgeRequest(
            run=self.run,
            model=MODELS[self.model],
            rank=self.rank,
            position=position.message(),
            incarnation=self._incarnation,
            commit=self._auto_commit,
        )
        self._follow(self._transport.call(self._transport.trainers.Acknowledge, request).generation)

    # The end.

    def close(self) -> None:
        """Closes the connection, and ends what is opened ahead. Shards that are there stay valid. Idempotent."""
        self._transport.close()
        if self._transport.fork_guard.is_here():
            self._prefetch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
