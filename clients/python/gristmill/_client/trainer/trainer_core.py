"""A trainer's way through a run, whatever ranks one client stands for: its place in the training order, batches,
acknowledgements, resuming. What shards there are is the service's.

`TrainerClient` says what each call means; `AllRanksClient` makes the same ones for every rank.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.transport import Transport
from gristmill._client.rollout.requests import check_run
from gristmill._client.trainer.batch_metrics import PREFIX, batch_metrics
from gristmill._client.trainer.checkpoint import Checkpoint, checkpoint_of
from gristmill._client.trainer.chosen_columns import ChosenColumns
from gristmill._client.trainer.pull import Opened
from gristmill._client.trainer.shard_reader import ShardReader, Wanted
from gristmill._wire.addresses import MODELS, Position
from gristmill._wire.column_spec import ColumnSpec, specs_of, tensor_names
from gristmill._wire.row_codec import decode
from gristmill._wire.rows import to_rows
from gristmill.errors import BatchFailedError, FailedPreconditionError, InvalidArgumentError
from gristmill.torch import Conversion, Shard
from gristmill.v1 import run_pb2, trainer_pb2

if TYPE_CHECKING:
    import torch

    from gristmill._client.trainer.trainer_batch import BatchCore

_log = logging.getLogger("gristmill")

B = TypeVar("B", bound="BatchCore[Any]")


class TrainerCore(ABC, Generic[B]):
    """B: what a batch is to this client."""

    def __init__(
        self,
        address: str,
        run: str,
        *,
        dp_size: int | None,
        model: str,
        device: torch.device | str | None,
        dtypes: Mapping[str, torch.dtype] | None,
        auto_commit: bool,
        acknowledges: bool,
        prefetch: int,
        columns: Sequence[str] | None,
        timeout_s: float,
        credentials: Credentials | None,
    ) -> None:
        if model not in MODELS:
            raise InvalidArgumentError(f"model is {model!r}; known are {', '.join(MODELS)}")
        if prefetch < 0:
            raise InvalidArgumentError(f"prefetch is {prefetch}; give how many shards to open ahead, 0 for none")
        if isinstance(columns, str):
            raise InvalidArgumentError(f"columns is {columns!r}; give a list of names, as [{columns!r}]")
        self.run, self.model = check_run(run), model
        self._expected_dp_size = dp_size
        self._convert = Conversion(device, dtypes)
        self._columns = ChosenColumns(run, columns)
        self._auto_commit = auto_commit
        self._acknowledges = acknowledges
        self._transport = Transport(address, timeout_s, type(self).__name__, credentials)
        self._reader = ShardReader(
            self._transport,
            run,
            model,
            convert=self._convert,
            columns=self._columns,
            ahead=prefetch,
            place=lambda: self.position,
        )
        self._declared: Sequence[ColumnSpec] = ()
        self._dp_size = 0
        self._ranks = range(0)
        self._epochs = 1
        self._position: Position | None = None
        # The batch whose failure the caller was told of last.
        self._failed: int | None = None
        # A place in the last failed batch that the ranks went past, until the service is told.
        self._went_past: Position | None = None
        # The plan of the batch that was given last, and the seconds that it was waited for.
        self._given: tuple[dict[str, Any], float] | None = None
        self._incarnation = 0
        self._run_id, self._generation = "", 0

    def __repr__(self) -> str:
        place = "not asked yet where it is" if self._position is None else f"next is {self._position}"
        return f"<{type(self).__name__} of {self._name} {self._transport.state}: {self.model}, {place}>"

    # Which ranks.

    @abstractmethod
    def _own_ranks(self, dp_size: int) -> range:
        """The ranks that the client stands for. Raises InvalidArgumentError where the run has no such."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """The run, and the rank where it is one, as errors name them."""

    @abstractmethod
    def _batch(self, number: int, plan: dict[str, Any], awaits: frozenset[str]) -> B:
        """A batch as this client gives it."""

    # Where the ranks are.

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

    def _resume(self, state: Mapping[str, Any], launch: str | None, give_up_reason: str | None) -> None:
        """Puts the model's ranks to the state's position, as a new incarnation. launch: None: made up."""
        if give_up_reason == "":
            raise InvalidArgumentError("give_up_reason is empty; name the reason under which the groups are counted")
        saved = checkpoint_of(state, self.run, self.model) if state else None
        self._read_run(self._expected_dp_size)
        self._ranks = self._own_ranks(self._dp_size)
        request = trainer_pb2.ResumeRequest(
            run=self.run,
            model=MODELS[self.model],
            position=None if saved is None else saved.position.message(),
            launch=launch or self._make_launch_id(),
            dp_size=self._dp_size,
            run_id="" if saved is None else saved.run_id,
            generation=0 if saved is None else saved.generation,
            give_up_reason=give_up_reason or "",
        )
        response = self._transport.call(self._transport.trainers.Resume, request)
        resumed = Position.of(response.position)
        if saved is not None and resumed != saved.position:
            raise FailedPreconditionError(
                f"{self._name}: another rank of this launch resumed at {resumed} and this one's "
                f"state is {saved.position}; load the state of the same checkpoint on all ranks"
            )
        self._position, self._incarnation = resumed, response.incarnation
        self._failed = self._went_past = None
        self._reader.kept.forget()
        self._run_id, self._generation = response.run_id, response.generation
        self._go_past_all(self._read_run(self._expected_dp_size).failed_batches)
        # Opened for another incarnation, perhaps cut for another dp_size.
        self.expect(())

    @abstractmethod
    def _make_launch_id(self) -> str:
        """A name for this start of the trainer, the same for all its ranks."""

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
        """The run took the ranks' position in this generation, so that its next checkpoints are of that."""
        self._generation = max(self._generation, generation)

    def announce_policy_version(self, version: int) -> None:
        """Tells rollout workers which version to sample from, once its weights can be had. One rank calls it; versions
        never go back. Idempotent."""
        request = run_pb2.AnnouncePolicyVersionRequest(run=self.run, version=version)
        self._transport.call(self._transport.runs.AnnouncePolicyVersion, request)

    def _start(self) -> Position:
        """Checks the run against what these ranks expect, and returns their place: that of the one furthest behind."""
        status = self._read_run(None)
        if self._expected_dp_size not in (None, self._dp_size):
            raise InvalidArgumentError(
                f"run {self.run!r}: its dp_size is {self._dp_size} and this trainer's {self._expected_dp_size}; create "
                "the run with the trainer's, or call load_state_dict first, which has the run's batches cut anew"
            )
        self._ranks = self._own_ranks(self._dp_size)
        self._run_id, self._generation = status.run_id, status.generation
        number = MODELS[self.model]
        for progress in status.models:
            if progress.model == number:
                self._incarnation = progress.incarnation
        places = [
            Position.of(place.next) for place in status.ranks if place.model == number and place.rank in self._ranks
        ]
        if not places:
            raise InvalidArgumentError(
                f"run {self.run!r}: it has no {self.model}; give critic_mini_batch_size when it is created"
            )
        found = min(places)
        if found.batch - 1 in status.failed_batches:
            self._went_past = Position(found.batch - 1, self._epochs)
        return found

    def _read_run(self, dp_size: int | None) -> run_pb2.RunStatus:
        """The run's state. dp_size: what it is to have; None: what it has."""
        answer: run_pb2.GetRunResponse = self._transport.call(
            self._transport.runs.GetRun, run_pb2.GetRunRequest(run=self.run)
        )
        config = json.loads(answer.status.config_json)
        self._epochs, self._dp_size = config.get("update_epochs_per_batch", 1), dp_size or config.get("dp_size", 1)
        columns = self._declared = specs_of(config.get("columns", ()))
        self._columns.declare(columns)
        self._convert.check(name for column in columns for name in tensor_names(column))
        return answer.status

    # Batches.

    def __iter__(self) -> Iterator[B]:
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
                self._position = Position(batch.number + 1)
            elif self.position.batch == batch.number:
                raise FailedPreconditionError(
                    f"{self._name}: batch {batch.number} was left at {self.position}; train its "
                    "mini_batches() to the end and ack() each"
                )

    def metrics(self, prefix: str = PREFIX) -> dict[str, float]:
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
                f"{self._name}: it gave no batch yet; ask for metrics() within `for batch in trainer`"
            )
        return batch_metrics(*self._given, prefix)

    def _next_batch(self) -> B | None:
        if self._failed == self.position.batch:
            self._go_past(self._failed)
        if self._went_past is not None:
            # The service keeps the rows of failed batches until all ranks go on without them.
            self._send_acknowledgements(self._went_past)
            self._went_past = None
        number, asked = self.position.batch, time.monotonic()
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
        plan = json.loads(answer.plan_json)
        self._given = plan, time.monotonic() - asked
        return self._batch(number, plan, awaits)

    def _ask_batch(self, number: int, wait_s: float) -> trainer_pb2.GetBatchResponse:
        # A critic waits for what the policy's ranks are awaited for, all of them.
        ranks = self._ranks if self.model == "policy" else ()
        request = trainer_pb2.GetBatchRequest(
            run=self.run,
            batch=number,
            wait_s=wait_s,
            ranks=ranks,
            trains=MODELS[self.model] if self._acknowledges else run_pb2.MODEL_UNSPECIFIED,
        )
        response: trainer_pb2.GetBatchResponse = self._transport.call(
            self._transport.trainers.GetBatch, request, wait_s=wait_s
        )
        return response

    # Shards.

    def _open(self, position: Position, forward: bool) -> list[Opened]:
        """The tensors of each rank's shard."""
        return self._reader.open(self._wanted(position, forward))

    def _shard(self, opened: Opened, position: Position, acknowledge: Callable[[], None] | None = None) -> Shard:
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

    def _wanted(self, position: Position, forward: bool) -> Wanted:
        # Asking for the place is what reads the run, and with it the ranks.
        _ = self.position
        return Wanted(position, self._ranks, forward, self._incarnation)

    def expect(self, positions: Iterable[Position], *, forward: bool = False) -> None:
        """Names the shards that will be opened next, in this order: as many as `prefetch` says are opened in the
        background meanwhile, and those that were and are not among them are thrown away. Iterating a batch calls it.

        An error that is met so is raised when the shard is opened, unless it may be over by then.
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
        from gristmill._client.trainer.written_columns import requests

        self._transport.check_usable()
        written = self._columns.written
        for name, request in requests(shard, columns, written, self.run, self._incarnation, self._dp_size):
            self._transport.call(self._transport.trainers.WriteColumns, request)
            self._reader.kept.wrote(request, name)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """The rows of a sealed batch as they were submitted, in the batch's order, each as `submit_rows` takes it: what
        a trainer that comes back need not sample again. Raises NotFoundError for a batch that is freed, and
        FailedPreconditionError for one that is not sealed yet.
        """
        request = trainer_pb2.ExportBatchRequest(run=self.run, batch=batch)
        pages = self._transport.call(
            lambda request, timeout: list(self._transport.trainers.ExportBatch(request, timeout=timeout)), request
        )
        return [row for page in pages for row in to_rows(decode(page.rows), self._declared)]

    def acknowledge(self, position: Position, following: Position) -> None:
        """Called by `ack`. `following` is the position after it."""
        if position < self.position:
            return
        if not self._acknowledges and position > self.position:
            raise FailedPreconditionError(
                f"{self._name}: {position} cannot be acknowledged, the next is {self.position}; acknowledge in order"
            )
        self._send_acknowledgements(position)
        # Not the next that the service answers, which steps over failed batches: iterating raises their errors.
        self._position = following

    def _send_acknowledgements(self, position: Position) -> None:
        for rank in self._ranks if self._acknowledges else ():
            request = trainer_pb2.AcknowledgeRequest(
                run=self.run,
                model=MODELS[self.model],
                rank=rank,
                position=position.message(),
                incarnation=self._incarnation,
                commit=self._auto_commit,
            )
            self._follow(self._transport.call(self._transport.trainers.Acknowledge, request).generation)

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
