"""Where a trainer's ranks are in a run's training order, as the service has it: resuming, acknowledging, committing."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill._client.connection.transport import Transport
from gristmill._client.run_status import RunStatus, status_of
from gristmill._client.trainer.checkpoint import Checkpoint, checkpoint_of
from gristmill._wire.addresses import MODELS, Position
from gristmill._wire.column_spec import ColumnSpec, specs_of
from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill.v1 import run_pb2, trainer_pb2

_log = logging.getLogger("gristmill")


class TrainingPlace(ABC):
    """The place of the ranks that one client stands for."""

    def __init__(
        self, transport: Transport, run: str, model: str, dp_size: int | None, *, auto_commit: bool, acks: bool
    ) -> None:
        self.run, self.model = run, model
        self._transport = transport
        self._expected_dp_size = dp_size
        self._auto_commit = auto_commit
        self._acks = acks
        self._dp_size = 0
        self._ranks = range(0)
        self._epochs = 1
        self._position: Position | None = None
        # The batch whose failure the caller was told of last.
        self._failed: int | None = None
        # A place in the last failed batch that the ranks went past, until the service is told.
        self._went_past: Position | None = None
        self._incarnation = 0
        self._run_id, self._generation = "", 0

    @abstractmethod
    def _own_ranks(self, dp_size: int) -> range:
        """The ranks that the client stands for. Raises InvalidArgumentError where the run has no such."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """The run, and the rank where it is one, as errors name them."""

    @abstractmethod
    def _make_launch_id(self) -> str:
        """A name for this start of the trainer, the same for all its ranks."""

    @abstractmethod
    def _declare(self, columns: Sequence[ColumnSpec]) -> None:
        """Called with the run's declared columns when it was read."""

    @abstractmethod
    def _forget_opened(self) -> None:
        """Called when the ranks resumed: what was opened ahead is of another incarnation, perhaps cut for another
        dp_size."""

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
        self._run_id, self._generation = response.run_id, response.generation
        self._go_past_all(self._read_run(self._expected_dp_size).failed_batches)
        self._forget_opened()

    def _go_past_all(self, failed: Mapping[int, str]) -> None:
        """A batch that failed is told of by an error once. A trainer that ends by it and is started again would get
        the same error for ever. One that failed for another dp_size is not among these any more: it is built anew."""
        while (number := self.position.batch) in failed:
            _log.warning("run %r: batch %d failed, and the trainer skips it: %s", self.run, number, failed[number])
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

    def _start(self) -> Position:
        """Checks the run against what these ranks expect, and returns their place: that of the one furthest behind."""
        status = self._read_run(None)
        if self._expected_dp_size not in (None, self._dp_size):
            raise InvalidArgumentError(
                f"run {self.run!r} has dp_size {self._dp_size} and this trainer {self._expected_dp_size}; create the "
                "run with the trainer's dp_size, or call load_state_dict first: the service then builds the run's "
                "batches for so many ranks"
            )
        self._ranks = self._own_ranks(self._dp_size)
        self._run_id, self._generation = status.run_id, status.generation
        progress = status.models.get(self.model)
        if progress is None:
            raise InvalidArgumentError(f"run {self.run!r} has no {self.model}; create it with critic_mini_batch_size")
        self._incarnation = progress.incarnation
        furthest_behind = min(progress.next[rank] for rank in self._ranks)
        if furthest_behind.batch - 1 in status.failed_batches:
            self._went_past = Position(furthest_behind.batch - 1, self._epochs)
        return furthest_behind

    def _read_run(self, dp_size: int | None) -> RunStatus:
        """The run's state. dp_size: what it is to have; None: what it has."""
        answer: run_pb2.GetRunResponse = self._transport.call(
            self._transport.runs.GetRun, run_pb2.GetRunRequest(run=self.run)
        )
        status = status_of(answer.status)
        self._epochs, self._dp_size = status.config["update_epochs_per_batch"], dp_size or status.config["dp_size"]
        self._declare(specs_of(status.config["columns"]))
        return status

    def ack(self, position: Position, following: Position) -> None:
        """Called by `ack`. `following` is the position after it."""
        if position < self.position:
            return
        if not self._acks and position > self.position:
            raise FailedPreconditionError(
                f"{self._name}: {position} cannot be acknowledged, the next is {self.position}; acknowledge in order"
            )
        self._send_acknowledgements(position)
        # Not the next that the service answers, which steps over failed batches: iterating raises their errors.
        self._position = following

    def _send_acknowledgements(self, position: Position) -> None:
        for rank in self._ranks if self._acks else ():
            request = trainer_pb2.AcknowledgeRequest(
                run=self.run,
                model=MODELS[self.model],
                rank=rank,
                position=position.message(),
                incarnation=self._incarnation,
                commit=self._auto_commit,
            )
            self._follow(self._transport.call(self._transport.trainers.Acknowledge, request).generation)
