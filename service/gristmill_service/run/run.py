"""One run, thread-safe: decide, log, apply, tell. Every call of the API ends here.

A call reads the state and gets events from the modules that know the rules, appends them to the log, and applies them,
all under one lock. Work per token (digests, gathering, the pipeline) happens outside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
import structlog

from gristmill.errors import (
    BatchFailedError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from gristmill.steps import Steps, TrajectoryKey
from gristmill_service.config import Model, RunConfig
from gristmill_service.run import admission, intake, progress, sealing
from gristmill_service.run.admission import Room
from gristmill_service.run.buffer import RowBuffer, digests, gather
from gristmill_service.run.changes import Changes
from gristmill_service.run.events import (
    BatchFailed,
    BatchFreed,
    BatchPublished,
    BatchSealed,
    Event,
    GroupDropped,
    GroupKey,
    GroupsAdmitted,
    PolicyVersionAnnounced,
    RunFinished,
    TrajectoryAborted,
)
from gristmill_service.run.log import Log
from gristmill_service.run.state import State, apply
from gristmill_service.run.views import (
    Admission,
    Admissions,
    BatchState,
    BatchView,
    ModelProgress,
    Outcome,
    Position,
    Resumed,
    RewardUpdate,
    RunStatus,
    Sealed,
    ShardView,
)
from gristmill_service.store.base import ShardAddress, ShardSource, Store

_log = structlog.get_logger(__name__)


class MilledBatch(Protocol):
    """What the pipeline makes of a batch."""

    @property
    def plan(self) -> dict[str, Any]: ...

    @property
    def shards(self) -> Sequence[ShardSource]: ...


class Mill(Protocol):
    """The pipeline, `gristmill_service.pipeline.mill`."""

    def __call__(
        self, steps: Steps, config: RunConfig, *, run: str, batch: int, policy_version: int | None
    ) -> MilledBatch: ...


class Run:
    """on_sealed(run, batch) is called for every sealed batch; it must see to it that `make_batch` is called, in order,
    outside the calling thread."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        store: Store,
        log: Log,
        mill: Mill,
        on_sealed: Callable[[Run, int], None],
        clock: Callable[[], float],
    ) -> None:
        self.name, self.config = name, config
        self.changes = Changes()
        self.config_json = config.model_dump_json(exclude_defaults=True)
        self._store, self._log, self._mill, self._on_sealed, self._clock = store, log, mill, on_sealed, clock
        self._lock = threading.Lock()
        self._state = State.initial(config)
        self._rows = RowBuffer()
        self._duplicates = 0
        self._freed: list[int] = []
        self._closed: GristmillError | None = None

    # --- Rollout workers

    def begin_groups(self, round_: int, uids: Sequence[str]) -> Admissions:
        if round_ < 0 or "" in uids:
            raise InvalidArgumentError(
                f"round is {round_} and uids are {list(uids)!r}; round is at least 0, no uid is empty"
            )
        with self._deciding() as state:
            found: list[Admission] = []
            admitted: list[GroupKey] = []
            room = self._room()
            for uid in uids:
                key = GroupKey(round_, uid)
                closed = state.closed.get(key)
                if closed is not None:
                    found.append(Admission.SEALED if isinstance(closed, int) else Admission.DROPPED)
                elif key in state.open or key in admitted:
                    found.append(Admission.ADMITTED)
                elif state.finished:
                    raise self._finished()
                elif len(admitted) < room.groups:
                    admitted.append(key)
                    found.append(Admission.ADMITTED)
                else:
                    found.append(Admission.NO_ROOM)
            if admitted:
                self._commit([GroupsAdmitted(tuple(admitted), self._clock())])
        if Admission.NO_ROOM in found:
            return Admissions(found, admission.RETRY_AFTER_S, room.reason)
        return Admissions(found)

    def submit(self, steps: Steps) -> list[Outcome]:
        if not len(steps):
            return []
        described = digests(steps)
        with self._deciding() as state:
            form = intake.check_form(steps, state.form, self.config)
            rows = intake.describe_rows(steps, described, self._rows.next_chunk)
            outcomes, events = intake.take_rows(state, self.config, rows, form, self._room, self._clock())
            if events and state.finished:
                raise self._finished()
            accepted = outcomes.count(Outcome.ACCEPTED)
            if accepted:
                self._rows.add(steps, accepted)
            self._duplicates += outcomes.count(Outcome.DUPLICATE)
            self._commit(events)
        return outcomes

    def set_rewards(self, rewards: Sequence[RewardUpdate]) -> int:
        with self._deciding() as state:
            changed, values, events = intake.take_rewards(state, rewards)
            for ref, update in values:
                if update.token_values is not None:
                    self._rows.set_token_rewards(ref, update.token_values)
            self._commit(events)
        return len(changed)

    def abort_trajectories(self, trajectories: Sequence[TrajectoryKey], reason: str) -> int:
        with self._deciding() as state:
            changed = 0
            for trajectory in dict.fromkeys(trajectories):
                key = GroupKey(trajectory.round, trajectory.uid)
                if not 0 <= trajectory.sample < self.config.n_samples_per_prompt:
                    raise InvalidArgumentError(
                        f"{trajectory}: sample is {trajectory.sample}, and n_samples_per_prompt: "
                        f"{self.config.n_samples_per_prompt} allows 0..{self.config.n_samples_per_prompt - 1}"
                    )
                group = state.open.get(key)
                if group is None and key not in state.closed:
                    raise NotFoundError(f"{trajectory}: its prompt group was not begun; nothing to abort")
                if group is None or trajectory.sample in group.aborted:
                    continue
                changed += 1
                self._apply([TrajectoryAborted(trajectory, reason or "aborted")])
                if group.is_empty:
                    self._apply([GroupDropped(key, "aborted")])
            self._commit([])
        return changed

    def abort_groups(self, round_: int, uids: Sequence[str], reason: str) -> int:
        with self._deciding() as state:
            keys = [GroupKey(round_, uid) for uid in dict.fromkeys(uids)]
            unknown = [key for key in keys if key not in state.open and key not in state.closed]
            if unknown:
                raise NotFoundError(f"{unknown[0]}: this prompt group was not begun; nothing to abort")
            dropped = [GroupDropped(key, reason or "aborted") for key in keys if key in state.open]
            self._commit(dropped)
        return len(dropped)

    def seal(self, batch: int | None) -> Sealed:
        with self._deciding() as state:
            if batch is not None and 0 <= batch < state.batches_sealed:
                return Sealed(batch, state.prompts[batch])
            number = state.batches_sealed
            if batch is not None and batch != number:
                raise FailedPreconditionError(f"batch {batch} cannot be sealed, the next is {number}; seal that")
            self._commit([sealing.seal_now(state, self.config)])
            return Sealed(number, state.prompts[number])

    def finish(self) -> int:
        with self._deciding() as state:
            if not state.finished:
                incomplete = [key for key in state.open if key not in state.complete]
                self._commit([RunFinished(), *(GroupDropped(key, "finished") for key in incomplete)])
            return state.batches_sealed + sealing.remaining_batches(state, self.config)

    # --- Trainer ranks

    @property
    def policy_version(self) -> int:
        self._check_open()
        return self._state.policy_version

    def announce(self, version: int) -> None:
        with self._deciding() as state:
            if version < state.policy_version:
                raise FailedPreconditionError(
                    f"policy version {version} is lower than the current {state.policy_version}; versions never go back"
                )
            if version > state.policy_version:
                self._commit([PolicyVersionAnnounced(version)])

    def batch(self, number: int) -> BatchView:
        with self._deciding():
            found = self._batch_state(number)
        if found is not BatchState.PUBLISHED:
            return BatchView(found)
        return BatchView(found, self._store.plan(self.name, number))

    def shard(self, model: Model, rank: int, position: Position | None, incarnation: int) -> ShardView:
        with self._deciding() as state:
            progress.check_rank(state, model, rank)
            progress.check_incarnation(state, model, incarnation)
            current = state.models[model].incarnation
            position = progress.next_of(state, model, rank) if position is None else position
            found = self._batch_state(position.batch)
            if found is not BatchState.PUBLISHED:
                return ShardView(found, position, incarnation=current)
            count = (state.batches[position.batch].mini_batches or {}).get(model, 0)
            if not 0 <= position.mini_batch < count or not 0 <= position.epoch < state.epochs:
                raise InvalidArgumentError(
                    f"batch {position.batch} has {count} {model} mini-batches and {state.epochs} epochs; there is no "
                    f"epoch {position.epoch} mini-batch {position.mini_batch}"
                )
        address = ShardAddress(model, position.mini_batch, rank)
        location = self._store.locate(self.name, position.batch, address)
        return ShardView(found, position, address, location, current)

    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]:
        self._check_open()
        return self._store.read(self.name, batch, address)

    def acknowledge(self, model: Model, rank: int, position: Position, incarnation: int, commit: bool) -> Position:
        with self._deciding() as state:
            progress.check_rank(state, model, rank)
            progress.check_incarnation(state, model, incarnation)
            self._apply(progress.acknowledge(state, model, rank, position))
            self._commit(progress.commit_acknowledged(state, model) if commit else [])
            return progress.next_of(state, model, rank)

    def commit(self, model: Model, position: Position, incarnation: int) -> Position:
        with self._deciding() as state:
            progress.check_incarnation(state, model, incarnation)
            self._commit(progress.commit(state, model, position))
            return state.models[model].committed

    def resume(self, model: Model, position: Position | None, launch: str) -> Resumed:
        with self._deciding() as state:
            self._commit(progress.resume(state, model, position, launch))
            current = state.models[model]
            return Resumed(current.incarnation, current.resumed_at)

    # --- Everyone

    def status(self) -> RunStatus:
        with self._deciding() as state:
            models = [
                ModelProgress(
                    model, own.committed, own.incarnation, [progress.settle(state, model, p) for p in own.next]
                )
                for model, own in state.models.items()
            ]
            return RunStatus(
                run=self.name,
                config_json=self.config_json,
                policy_version=state.policy_version,
                finished=state.finished,
                groups_open=len(state.open) - len(state.complete),
                groups_complete=len(state.complete),
                groups_room=0 if state.finished else self._room().groups,
                batches_sealed=state.batches_sealed,
                batches_published=state.settled,
                batches_freed=state.freed,
                row_bytes=state.row_bytes,
                shard_bytes=state.shard_bytes,
                rows_accepted=state.rows_accepted,
                rows_duplicate=self._duplicates,
                groups_dropped=dict(state.groups_dropped),
                models=models,
                failed_batches=dict(state.failed),
            )

    # --- Its surroundings: `Runs` calls these

    def tick(self) -> None:
        """Closes or drops the groups whose time is over."""
        with self._locked() as state:
            if self._closed is None:
                self._commit(sealing.timeouts(state, self.config, self._clock()))

    def close(self, error: GristmillError) -> None:
        """From now on every call raises this error; who waits is woken to see it."""
        with self._locked():
            self._closed = error
        self.changes.notify()

    def make_batch(self, number: int) -> None:
        """Computes and publishes a sealed batch. Blocks as long as that takes; never raises for the batch's sake."""
        with self._locked() as state:
            batch = state.batches[number]
            rows = self._rows.pick([row for group in batch.groups for row in group.ordered_rows()])
            token_rewards = bool(state.form.token_rewards)
        started = time.monotonic()
        try:
            milled = self._mill(
                gather(rows, token_rewards),
                self.config,
                run=self.name,
                batch=number,
                policy_version=batch.policy_version,
            )
            nbytes = self._publish(number, milled)
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the batch's reason, not the thread's end
            if not isinstance(error, GristmillError):
                _log.exception("batch failed", run=self.name, batch=number)
            self._settle_batch(BatchFailed(number, str(error) or type(error).__name__))
            return
        mini_batches: dict[Model, int] = dict.fromkeys(self.config.models, 0)
        for part in milled.plan["mini_batches"]:
            mini_batches[part["model"]] += 1
        self._settle_batch(BatchPublished(number, mini_batches, nbytes))
        seconds = round(time.monotonic() - started, 3)
        _log.info("batch published", run=self.name, batch=number, rows=len(rows), bytes=nbytes, seconds=seconds)

    def _publish(self, number: int, milled: MilledBatch) -> int:
        """Waits for room where there is none while another batch is held that will be freed."""
        plan = orjson.dumps(milled.plan)
        freed = threading.Event()
        self.changes.subscribe(freed.set)
        try:
            while True:
                freed.clear()
                try:
                    return self._store.publish(self.name, number, plan, milled.shards)
                except ResourceExhaustedError:
                    if self._closed is not None or not self._holds_a_published_batch():
                        raise
                    freed.wait()
        finally:
            self.changes.unsubscribe(freed.set)

    def _holds_a_published_batch(self) -> bool:
        with self._locked() as state:
            return any(batch.is_published for batch in state.batches.values())

    def _settle_batch(self, event: BatchPublished | BatchFailed) -> None:
        with self._locked():
            deleted = isinstance(self._closed, NotFoundError)
            if not deleted:
                self._commit([event])
        if deleted:
            self._store.delete_run(self.name)

    # --- Deciding

    @contextmanager
    def _locked(self) -> Iterator[State]:
        """The run's lock. What was freed under it is removed from the store after it: that may take a while."""
        with self._lock:
            try:
                yield self._state
            finally:
                freed, self._freed = self._freed, []
        for batch in freed:
            self._store.free(self.name, batch)

    @contextmanager
    def _deciding(self) -> Iterator[State]:
        """For a call from outside: refused where the run is closed."""
        with self._locked() as state:
            self._check_open()
            yield state

    def _check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(*self._closed.args)

    def _commit(self, events: Iterable[Event]) -> None:
        """Logs and applies the events and all that follows from them. With the lock held."""
        self._apply(events)
        while following := sealing.due(self._state, self.config) or progress.freed(self._state):
            self._apply(following)

    def _apply(self, events: Iterable[Event]) -> None:
        wakes = False
        for event in events:
            self._log.append(event)
            self._rows.release(apply(self._state, event))
            wakes |= event.wakes
            if isinstance(event, BatchSealed):
                self._on_sealed(self, event.batch)
            elif isinstance(event, BatchFreed):
                self._freed.append(event.batch)
        if wakes:
            self.changes.notify()

    def _room(self) -> Room:
        return admission.room(self._state, self.config, self.config.max_buffered_bytes)

    def _batch_state(self, number: int) -> BatchState:
        state = self._state
        if number < 0:
            raise InvalidArgumentError(f"batch is {number}; batches are numbered from 0")
        if number in state.failed:
            raise BatchFailedError(f"batch {number} failed: {state.failed[number]}", number)
        if number in state.batches:
            return BatchState.PUBLISHED if state.batches[number].is_published else BatchState.PENDING
        if number < state.batches_sealed:
            raise NotFoundError(f"run {self.name!r}: batch {number} is freed; it was committed by every model")
        return BatchState.END if state.finished and not state.complete else BatchState.PENDING

    def _finished(self) -> FailedPreconditionError:
        return FailedPreconditionError(f"run {self.name!r} is finished and takes no more rollouts; create another run")
