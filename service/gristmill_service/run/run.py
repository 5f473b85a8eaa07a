"""One run, thread-safe: decide, log, apply, tell. Every call of the API ends here.

A call reads the state and gets events from the modules that know the rules, appends them to the log, and applies them,
all under one lock. Work per token (digests, gathering, the pipeline) happens outside it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
import structlog

from gristmill.errors import (
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
)
from gristmill.steps import Steps, TrajectoryKey, check_text
from gristmill_service.config import Model, RunConfig
from gristmill_service.run import aborts, admission, intake, progress, sealing
from gristmill_service.run.admission import Room, RowBudget
from gristmill_service.run.buffer import RowBuffer, compacted, gather, values_digest
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
)
from gristmill_service.run.form import check_form
from gristmill_service.run.log import Log
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.rewards import take_rewards
from gristmill_service.run.state import State, apply
from gristmill_service.run.status import status
from gristmill_service.run.views import (
    Admission,
    Admissions,
    BatchState,
    BatchView,
    Outcome,
    Position,
    Resumed,
    RewardUpdate,
    RunStatus,
    Sealed,
    ShardView,
)
from gristmill_service.store.base import ShardAddress, ShardSource

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
    outside the calling thread. chunks: numbers that no request of this run had before."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        store: PatientStore,
        log: Log,
        mill: Mill,
        on_sealed: Callable[[Run, int], None],
        clock: Callable[[], float],
        budget: RowBudget,
    ) -> None:
        self.name, self.config = name, config
        self.changes = Changes()
        self.config_json = config.model_dump_json(exclude_defaults=True)
        self._store, self._log, self._mill, self._on_sealed, self._clock = store, log, mill, on_sealed, clock
        self._budget = budget
        self._lock = threading.Lock()
        self._state = State.initial(config)
        self._rows = RowBuffer()
        self._chunks = itertools.count()
        self._duplicates = 0
        self._closed: GristmillError | None = None
        # What follows from a change once the lock is given back: waking those who wait, removing freed batches.
        self._wakes = False
        self._freed: list[int] = []
        self._removing = threading.Lock()

    # --- Rollout workers

    def begin_groups(self, round_: int, uids: Sequence[str]) -> Admissions:
        if round_ < 0 or "" in uids:
            raise InvalidArgumentError(
                f"round is {round_} and uids are {list(uids)!r}; round is at least 0, no uid is empty"
            )
        for uid in uids:
            check_text(uid, "uid")
        keys = [GroupKey(round_, uid) for uid in uids]
        with self._deciding() as state:
            room = self._room()
            found, admitted = admission.begin(state, keys, len(keys) if state.finished else room.groups)
            if admitted and state.finished:
                raise intake.finished()
            if admitted:
                self._commit([GroupsAdmitted(tuple(admitted), self._clock())])
        if Admission.NO_ROOM in found:
            return Admissions(found, admission.RETRY_AFTER_S, room.reason)
        return Admissions(found)

    def submit(self, steps: Steps) -> list[Outcome]:
        if not len(steps):
            return []
        chunk = next(self._chunks)
        rows = intake.describe_rows(steps, chunk)
        with self._deciding() as state:
            form = check_form(steps, state.form, self.config)
            outcomes, events = intake.take_rows(state, self.config, rows, form, self._room, self._clock())
            accepted = [row for row, outcome in enumerate(outcomes) if outcome is Outcome.ACCEPTED]
            if accepted:
                self._rows.add(chunk, steps, accepted)
            self._duplicates += outcomes.count(Outcome.DUPLICATE)
            self._commit(events)
        return outcomes

    def set_rewards(self, rewards: Sequence[RewardUpdate]) -> int:
        digests = [b"" if update.token_values is None else values_digest(update.token_values) for update in rewards]
        with self._deciding() as state:
            changed, events = take_rewards(state, rewards, digests)
            for ref, update in changed.items():
                if update.token_values is not None:
                    self._rows.set_token_rewards(ref, update.token_values)
            self._commit(events)
        return len(changed)

    def abort_trajectories(self, trajectories: Sequence[TrajectoryKey], reason: str) -> int:
        with self._deciding() as state:
            aborted, dropped = aborts.abort_trajectories(state, trajectories, reason)
            self._commit([*aborted, *dropped])
        return len(aborted)

    def abort_groups(self, round_: int, uids: Sequence[str], reason: str) -> int:
        with self._deciding() as state:
            dropped = aborts.abort_groups(state, [GroupKey(round_, uid) for uid in uids], reason)
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
        with self._deciding() as state:
            found = progress.batch_state(state, number)
        if found is not BatchState.PUBLISHED:
            return BatchView(found)
        return BatchView(found, self._store.plan(self.name, number))

    def shard(self, model: Model, rank: int, position: Position | None, incarnation: int) -> ShardView:
        with self._deciding() as state:
            progress.check_rank(state, model, rank)
            progress.check_incarnation(state, model, incarnation)
            current = state.models[model].incarnation
            position = progress.next_of(state, model, rank) if position is None else position
            found = progress.batch_state(state, position.batch)
            if found is not BatchState.PUBLISHED:
                return ShardView(found, position, incarnation=current)
            progress.check_mini_batch(state, model, position)
        address = ShardAddress(model, position.mini_batch, rank)
        location = self._store.locate(self.name, position.batch, address)
        return ShardView(found, position, address, location, current)

    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]:
        self._check_open()
        return self._store.read(self.name, batch, address)

    def read_compact_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """Its compact form, or None where the store has whole files only."""
        self._check_open()
        return self._store.read_compact(self.name, batch, address)

    def acknowledge(self, model: Model, rank: int, position: Position, incarnation: int, commit: bool) -> Position:
        with self._deciding() as state:
            progress.check_rank(state, model, rank)
            progress.check_incarnation(state, model, incarnation)
            self._commit(progress.acknowledge(state, model, rank, position))
            if commit:
                self._commit(progress.commit_acknowledged(state, model))
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
            return status(
                state,
                run=self.name,
                config_json=self.config_json,
                room=self._room().groups,
                duplicates=self._duplicates,
            )

    # --- Its surroundings: `Runs` calls these

    def tick(self) -> None:
        """Closes or drops the groups whose time is over."""
        with self._locked() as state:
            if self._closed is None:
                self._commit(aborts.timeouts(state, self.config, self._clock()))

    def close(self, error: GristmillError) -> None:
        """From now on every call raises this error; who waits is woken to see it.

        Returns when this run removes nothing from the store any more: the name may then be another run's.
        """
        with self._locked():
            # A deleted run stays deleted when the service shuts down meanwhile.
            if not self.is_deleted:
                self._closed = error
            self._wakes = True
            self._budget.hold(self.name, 0)
        self._store.wake()
        with self._removing:
            pass

    def make_batch(self, number: int) -> None:
        """Computes and publishes a sealed batch. Blocks as long as that takes; never raises for the batch's sake."""
        with self._locked() as state:
            if self.is_deleted:
                return
            batch = state.batches[number]
            rows = self._rows.pick(row for group in batch.groups for row in group.ordered_rows())
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
            mini_batches: dict[Model, int] = dict.fromkeys(self.config.models, 0)
            for part in milled.plan["mini_batches"]:
                mini_batches[part["model"]] += 1
            nbytes = self._store.publish(
                self.name, number, orjson.dumps(milled.plan), milled.shards, lambda: self._closed is None
            )
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the batch's reason, not the thread's end
            if not isinstance(error, GristmillError):
                _log.exception("batch failed", run=self.name, batch=number)
            self._settle_batch(BatchFailed(number, str(error) or type(error).__name__))
            return
        self._settle_batch(BatchPublished(number, mini_batches, nbytes))
        seconds = round(time.monotonic() - started, 3)
        _log.info("batch published", run=self.name, batch=number, rows=len(rows), bytes=nbytes, seconds=seconds)

    def _settle_batch(self, event: BatchPublished | BatchFailed) -> None:
        with self._locked():
            if not self.is_deleted:
                self._commit([event])
                return
        # Published after the run's other batches were removed.
        self._store.delete_run(self.name)

    # --- Deciding

    @contextmanager
    def _deciding(self) -> Iterator[State]:
        """For a call from outside: refused where the run is closed."""
        with self._locked() as state:
            self._check_open()
            yield state

    @contextmanager
    def _locked(self) -> Iterator[State]:
        """The run's lock, and after it what may take a while: waking who waits, removing, copying."""
        with self._lock:
            yield self._state
            wakes, self._wakes = self._wakes, False
            freed, self._freed = self._freed, []
            sparse = self._rows.take_sparse()
        if wakes:
            self.changes.notify()
        if freed:
            self._remove(freed)
        for chunk, steps, live in sparse:
            copy, index = compacted(steps, live)
            with self._lock:
                self._rows.replace(chunk, steps, copy, index)

    def _remove(self, freed: list[int]) -> None:
        with self._removing:
            for batch in freed if self._closed is None else ():
                try:
                    self._store.free(self.name, batch)
                except OSError:
                    # Whoever acknowledged is not to blame; what is left goes with the run.
                    _log.exception("a freed batch could not be removed", run=self.name, batch=batch)

    @property
    def is_deleted(self) -> bool:
        return isinstance(self._closed, NotFoundError)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(*self._closed.args)

    def _commit(self, events: Sequence[Event]) -> None:
        """Logs and applies the events and all that follows from them. With the lock held."""
        while events:
            for event in events:
                self._apply(event)
            events = sealing.due(self._state, self.config, events) or progress.freed(self._state)
        self._budget.hold(self.name, admission.row_bytes_promised(self._state))

    def _apply(self, event: Event) -> None:
        self._log.append(event)
        self._rows.release(apply(self._state, event))
        self._wakes |= event.wakes
        if isinstance(event, BatchSealed):
            self._on_sealed(self, event.batch)
        elif isinstance(event, BatchFreed):
            self._freed.append(event.batch)

    def _room(self) -> Room:
        return admission.room(self._state, self.config, self._budget.left_for(self.name))
