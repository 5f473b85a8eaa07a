"""Tracks the position of a client's ranks in the run's training order: resumes, acknowledges and commits."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import distributed

from gristmill._client.connection.failures import with_message
from gristmill._client.connection.transport import Transport
from gristmill._client.run_status import RunStatus, status_of
from gristmill._wire.addresses import MODELS, Position
from gristmill._wire.column_spec import ColumnSpec, specs_of
from gristmill.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gristmill.v1 import run_pb2, trainer_pb2

_log = logging.getLogger("gristmill")

_STATE_VERSION = 2
_KNOWN_STATE_VERSIONS = (1, 2)
"""Version 1 does not contain the run's identity, which is then not checked."""
_LAUNCH_BYTES = 16
# A run that does not exist yet: the pause between two looks, and between two log messages.
_PAUSE_S, _NOTICE_S = 0.5, 30.0


class Ranks(NamedTuple):
    """The ranks that a client trains: one rank, a range, or all."""

    chosen: int | range | Literal["all"]

    @classmethod
    def of(cls, rank: int | None, ranks: range | Literal["all"] | None) -> Ranks:
        """Check the constructor's arguments. Raises InvalidArgumentError unless exactly one of them is set."""
        if (rank is None) == (ranks is None):
            raise InvalidArgumentError(
                f"rank is {rank} and ranks is {ranks}; set rank=N for one data-parallel rank, ranks=range(...) for "
                "several, or ranks='all'"
            )
        chosen = rank if ranks is None else ranks
        if chosen != "all" and not isinstance(chosen, (int, range)):
            raise InvalidArgumentError(f"ranks is {chosen!r}; set a range, or 'all'")
        if isinstance(chosen, range) and (chosen.step != 1 or not chosen):
            raise InvalidArgumentError(f"ranks is {chosen}; set a range with step 1 that is not empty")
        return cls(chosen)

    @property
    def is_one(self) -> bool:
        """Return whether the client has one rank and therefore yields shards instead of mini-batches."""
        return isinstance(self.chosen, int)

    def of_run(self, run: str, dp_size: int) -> range:
        """Return the ranks as a range. Raises InvalidArgumentError if the run does not have these ranks."""
        if isinstance(self.chosen, int):
            if not 0 <= self.chosen < dp_size:
                raise InvalidArgumentError(
                    f"run {run!r}: rank is {self.chosen} and dp_size is {dp_size}; expected 0..{dp_size - 1}"
                )
            return range(self.chosen, self.chosen + 1)
        if self.chosen == "all":
            return range(dp_size)
        if not 0 <= self.chosen.start < self.chosen.stop <= dp_size:
            raise InvalidArgumentError(f"run {run!r}: ranks is {self.chosen}; expected ranks below dp_size={dp_size}")
        return self.chosen

    def __str__(self) -> str:
        """The ranks in the form that follows the run's name in error messages."""
        if isinstance(self.chosen, int):
            return f" rank {self.chosen}"
        return "" if self.chosen == "all" else f" ranks {self.chosen.start}..{self.chosen.stop - 1}"


class Checkpoint(NamedTuple):
    """A position and the identity of its run, as stored in a trainer's checkpoint.

    run_id, generation: as in `RunStatus`; empty and 0 if unknown.
    """

    position: Position
    run_id: str = ""
    generation: int = 0

    def state(self, run: str, model: str) -> dict[str, Any]:
        """Return the checkpoint as plain values."""
        identity = {"run_id": self.run_id, "generation": self.generation}
        return {"version": _STATE_VERSION, "run": run, "model": model, **self.position._asdict(), **identity}

    @classmethod
    def of(cls, state: Mapping[str, Any], run: str, model: str) -> Checkpoint:
        """Read a state. Raises InvalidArgumentError if it is damaged, or is of another run, model or version."""
        if state.get("version") not in _KNOWN_STATE_VERSIONS:
            known = ", ".join(map(str, _KNOWN_STATE_VERSIONS))
            raise InvalidArgumentError(f"state: version is {state.get('version')!r}; expected one of {known}")
        for name, value in {"run": run, "model": model}.items():
            if state.get(name) != value:
                raise InvalidArgumentError(
                    f"state: {name} is {state.get(name)!r}, but {value!r} in this trainer; load the state that this "
                    "trainer saved"
                )
        run_id, generation = state.get("run_id", ""), state.get("generation", 0)
        if not isinstance(run_id, str) or not isinstance(generation, int):
            raise InvalidArgumentError(
                f"state: run_id is {run_id!r} and generation is {generation!r}; pass the value of state_dict()"
            )
        try:
            position = Position(*(int(state[name]) for name in Position._fields))
        except (KeyError, TypeError, ValueError):
            raise InvalidArgumentError(
                f"state: {dict(state)!r} has no position; pass the value of state_dict()"
            ) from None
        return cls(position, run_id, generation)


class TrainingOrder:
    """Tracks the service's position for some ranks of one model.

    dp_size: the number of ranks that the trainer expects, None for any. on_read: called with the declared columns each
    time the run was read. on_resume: called after the ranks have resumed, because shards that were opened before are of
    another incarnation, and may be planned for another dp_size.
    """

    def __init__(
        self,
        transport: Transport,
        run: str,
        model: str,
        ranks: Ranks,
        *,
        dp_size: int | None,
        auto_commit: bool,
        acks: bool,
        on_read: Callable[[Sequence[ColumnSpec]], None],
        on_resume: Callable[[], None],
    ) -> None:
        self.run, self.model, self.acks = run, model, acks
        self.name = f"run {run!r}{ranks}"
        self.ranks = range(0)
        self.dp_size = self.incarnation = 0
        self.epochs = 1
        self._transport, self._chosen_ranks = transport, ranks
        self._expected_dp_size, self._auto_commit = dp_size, auto_commit
        self._on_read, self._on_resume = on_read, on_resume
        self._position: Position | None = None
        # The batch of the last BatchFailedError.
        self._failed: int | None = None
        # The position in a failed batch that the ranks skipped and must still acknowledge.
        self._stepped_over: Position | None = None
        self._run_id, self._generation = "", 0
        self._has_seen_run = False

    def __str__(self) -> str:
        return "position not read yet" if self._position is None else f"next is {self._position}"

    @property
    def position(self) -> Position:
        """Return the next position to train. The first use requests it from the service."""
        if self._position is None:
            self._position = self._start()
        return self._position

    def _start(self) -> Position:
        """Check that the run fits these ranks, and return the position of the rank that is furthest behind."""
        status = self._read_run(None)
        if self._expected_dp_size not in (None, self.dp_size):
            raise InvalidArgumentError(
                f"run {self.run!r}: dp_size is {self.dp_size}, but {self._expected_dp_size} in this trainer; create "
                "the run with this dp_size, or call load_state_dict to build the run's batches for it"
            )
        self.ranks = self._chosen_ranks.of_run(self.run, self.dp_size)
        self._run_id, self._generation = status.run_id, status.generation
        progress = status.models.get(self.model)
        if progress is None:
            raise InvalidArgumentError(f"run {self.run!r} has no {self.model}; create it with critic_mini_batch_size")
        self.incarnation = progress.incarnation
        furthest_behind = self._begin() if self.acks else min(progress.next[rank] for rank in self.ranks)
        if furthest_behind.batch - 1 in status.failed_batches:
            self._stepped_over = Position(furthest_behind.batch - 1, self.epochs)
        return furthest_behind

    def _begin(self) -> Position:
        """Begin the ranks' training. Trainers that began to train them earlier now get StaleIncarnationError."""
        request = trainer_pb2.ResumeRequest(run=self.run, model=MODELS[self.model], ranks=self.ranks)
        response = self._transport.call(self._transport.trainers.Resume, request)
        self.incarnation, self._generation = response.incarnation, response.generation
        return Position.of(response.position)

    def _read_run(self, dp_size: int | None) -> RunStatus:
        """Read the run's state. dp_size: the number of ranks that the run will have; None: its current number."""
        status = status_of(self._get_run().status)
        self.epochs, self.dp_size = status.config["update_epochs_per_batch"], dp_size or status.config["dp_size"]
        self._on_read(specs_of(status.config["columns"]))
        return status

    def wait_for_run(self) -> None:
        """Wait until the run exists, unless the trainer has seen it before. Raises NotFoundError after the transport's
        `timeout_s`."""
        if not self._has_seen_run:
            self._get_run()

    def _get_run(self) -> run_pb2.GetRunResponse:
        began = logged = time.monotonic()
        while True:
            try:
                answer: run_pb2.GetRunResponse = self._transport.call(
                    self._transport.runs.GetRun, run_pb2.GetRunRequest(run=self.run)
                )
                self._has_seen_run = True
                return answer
            except NotFoundError as error:
                # A run that the trainer has seen was deleted.
                timeout_s = 0.0 if self._has_seen_run else self._transport.timeout_s
                now = time.monotonic()
                if now - began >= timeout_s:
                    waited = (
                        f" (waited {now - began:.0f} s for it; raise timeout_s to wait longer)" if timeout_s else ""
                    )
                    raise with_message(error, f"{error}{waited}") from None
            if logged == began or now - logged >= _NOTICE_S:
                logged = now
                _log.warning(
                    "run %r does not exist yet; the trainer waits up to %.0f s until it is created (create_run)",
                    self.run,
                    began + timeout_s - now,
                )
            self._transport.pause(min(_PAUSE_S, began + timeout_s - now))

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return Checkpoint(self.position, self._run_id, self._generation).state(self.run, self.model)

    def resume(self, state: Mapping[str, Any], launch: str | None, give_up_reason: str | None) -> None:
        """Move the model's ranks to the state's position, as a new incarnation. launch: None generates a name."""
        if give_up_reason == "":
            raise InvalidArgumentError("give_up_reason is empty; set the reason under which dropped groups are counted")
        saved = Checkpoint.of(state, self.run, self.model) if state else None
        self._read_run(self._expected_dp_size)
        self.ranks = self._chosen_ranks.of_run(self.run, self.dp_size)
        request = trainer_pb2.ResumeRequest(
            run=self.run,
            model=MODELS[self.model],
            position=None if saved is None else saved.position.message(),
            launch=launch or self._make_launch_id(),
            dp_size=self.dp_size,
            run_id="" if saved is None else saved.run_id,
            generation=0 if saved is None else saved.generation,
            give_up_reason=give_up_reason or "",
        )
        response = self._transport.call(self._transport.trainers.Resume, request)
        resumed = Position.of(response.position)
        if saved is not None and resumed != saved.position:
            raise FailedPreconditionError(
                f"{self.name}: the state's position is {saved.position}, but another rank of this launch resumed at "
                f"{resumed}; load the state of the same checkpoint on all ranks"
            )
        self._position, self.incarnation = resumed, response.incarnation
        self._failed = self._stepped_over = None
        self._run_id, self._generation = response.run_id, response.generation
        self._step_over_all(self._read_run(self._expected_dp_size).failed_batches)
        self._on_resume()

    def _make_launch_id(self) -> str:
        is_whole = not self._chosen_ranks.is_one and len(self.ranks) == self.dp_size
        return secrets.token_hex(_LAUNCH_BYTES) if is_whole else make_launch_id(self.dp_size)

    def commit(self, state: Mapping[str, Any] | None) -> None:
        position = self.position if state is None else Checkpoint.of(state, self.run, self.model).position
        request = trainer_pb2.CommitRequest(
            run=self.run, model=MODELS[self.model], position=position.message(), incarnation=self.incarnation
        )
        self._follow(self._transport.call(self._transport.trainers.Commit, request).generation)

    def _follow(self, generation: int) -> None:
        """Record the generation in which the run stored the ranks' position, for the next checkpoints."""
        self._generation = max(self._generation, generation)

    # Progress.

    def ack(self, position: Position, following: Position) -> None:
        """Acknowledge a mini-batch. following: the position after it. Does nothing if it is acknowledged already."""
        if position < self.position:
            return
        if not self.acks and position > self.position:
            raise FailedPreconditionError(
                f"{self.name}: {position} cannot be acknowledged, because the next is {self.position}; acknowledge in "
                "order"
            )
        self._send_acks(position)
        # Do not use the service's next position. It skips failed batches, but iterating must raise their errors.
        self._position = following

    def _send_acks(self, position: Position) -> None:
        for rank in self.ranks if self.acks else ():
            request = trainer_pb2.AcknowledgeRequest(
                run=self.run,
                model=MODELS[self.model],
                rank=rank,
                position=position.message(),
                incarnation=self.incarnation,
                commit=self._auto_commit,
            )
            self._follow(self._transport.call(self._transport.trainers.Acknowledge, request).generation)

    def skip_to(self, batch: int) -> None:
        """Continue with this batch, because the batches before it have no mini-batch of this model."""
        self._position = Position(batch)

    def failed(self, batch: int) -> None:
        """Record that the batch's failure is being raised. The next `step_over_failed` continues after the batch."""
        self._failed = batch

    def step_over_failed(self) -> None:
        """Continue after a failed batch if its error was raised. Acknowledge the batch, because the service stores the
        rows of a failed batch until all ranks have acknowledged it."""
        if self._failed == self.position.batch:
            self._step_over(self._failed)
        if self._stepped_over is not None:
            self._send_acks(self._stepped_over)
            self._stepped_over = None

    def _step_over_all(self, failed: Mapping[int, str]) -> None:
        """Skip failed batches at the position, so that a restarted trainer does not get the same error again. A batch
        that failed for another dp_size is not in `failed`, because the service builds it again."""
        while (number := self.position.batch) in failed:
            _log.warning("run %r: batch %d failed, and the trainer skips it: %s", self.run, number, failed[number])
            self._step_over(number)

    def _step_over(self, batch: int) -> None:
        self._stepped_over, self._position = self.position, Position(batch + 1)


def make_launch_id(dp_size: int) -> str:
    """Return a random name for one start of a trainer, equal on all ranks. If torch.distributed is initialized, rank 0
    broadcasts the name in a collective call of every process.

    Raises InvalidArgumentError if there are several ranks without torch.distributed.
    """
    if distributed.is_available() and distributed.is_initialized():
        return _broadcast_id()
    if dp_size == 1:
        return secrets.token_hex(_LAUNCH_BYTES)
    raise InvalidArgumentError(
        f"launch is not set, and dp_size is {dp_size} without torch.distributed; set launch to a name that is equal on "
        "all ranks and new at each start (for example the job's id and restart count), or initialize torch.distributed "
        "first"
    )


def _broadcast_id() -> str:
    """Broadcast rank 0's name as bytes, because broadcast_object_list would unpickle data."""
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    name = torch.tensor(list(secrets.token_bytes(_LAUNCH_BYTES)), dtype=torch.uint8, device=device)
    distributed.broadcast(name, src=0)
    return bytes(name.tolist()).hex()
