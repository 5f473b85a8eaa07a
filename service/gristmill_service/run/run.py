"""One run, thread-safe: decide, log, apply, tell. Every call of the API ends here.

A call reads the state and gets events from the modules that know the rules, appends them to the run's book, and applies
them, all under one lock. Work per token (writing rows down, digests, gathering, the pipeline) happens outside it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
import structlog

from gristmill.errors import (
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill.steps import Steps, TrajectoryKey, check_text
from gristmill_service.config import Model, RunConfig, parse_config
from gristmill_service.run import aborts, admission, intake, progress, recovery, sealing
from gristmill_service.run.admission import Room, RowBudget
from gristmill_service.run.buffer import PickedRow, RowBuffer, compacted, gather, values_digest
from gristmill_service.run.changes import Changes
from gristmill_service.run.codec import encode_events, encode_state
from gristmill_service.run.events import (
    BatchFailed,
    BatchFreed,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    Event,
    GroupDropped,
    GroupKey,
    GroupsAdmitted,
    PolicyVersionAnnounced,
    Resized,
    RunFinished,
)
from gristmill_service.run.form import check_form
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.rewards import take_rewards
from gristmill_service.run.state import Batch, State, apply
from gristmill_service.run.status import status
from gristmill_service.run.views import (
    Admission,
    Admissions,
    BatchState,
    BatchView,
    GroupView,
    Outcome,
    Position,
    Resumed,
    RewardUpdate,
    RunStatus,
    Sealed,
    ShardView,
)
from gristmill_service.store.base import ShardAddress, ShardSource
from gristmill_service.store.ledger import Book, LostBookError

_log = structlog.get_logger(__name__)

# A batch that could not be stored is tried again after this.
_RETRY_S = 1.0
_COMPACT_AGAIN_S = 10.0
_EXPORTED_ROWS = 64


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
    """The run that the book tells of, from its beginning or from where it stopped.

    config: as the run was created; `self.config` is what holds now, for a trainer may come back with another dp_size.
    on_sealed(run, batch) is called for every batch that is to be made; it must see to it that `make_batch` is called,
    in order, outside the calling thread.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        store: PatientStore,
        book: Book,
        mill: Mill,
        on_sealed: Callable[[Run, int], None],
        clock: Callable[[], float],
        budget: RowBudget,
    ) -> None:
        self.name, self.config, self.created_with = name, config, config
        self.changes = Changes()
        self.trouble = ""
        self._store, self._book, self._mill, self._on_sealed, self._clock = store, book, mill, on_sealed, clock
        self._budget = budget
        self._lock = threading.Lock()
        self._duplicates = 0
        self._closed: GristmillError | None = None
        self._is_lost = False
        # What follows from a change once the lock is given back: waking those who wait, removing and making batches.
        self._wakes = False
        self._removed: list[int] = []
        self._remove_later: list[int] = []
        self._remade: list[int] = []
        self._removing = threading.RLock()
        self._compact_after = 0.0
        # Batches that could not be stored, and when each is tried again; and whether events are due that the book
        # could not take when they became so.
        self._postponed: dict[int, float] = {}
        self._owes = False
        self._state = recovery.replayed(book, config)
        self._rows = RowBuffer(compacts=not book.maps_rows)
        # Only time in which workers could have come counts for stragglers.
        self._clock_offset = self._state.now - clock()
        self._use_dp_size()

    def start(self) -> None:
        """Goes on where the book stops: drops what was lost, and has batches made whose shards are not there.

        Raises UnavailableError where the book cannot be written; the run is of no use then.
        """
        needed = recovery.Needed(self._state)
        lost = self._book.keep(needed.tables, needed.is_whole)
        for number, rows in needed.tables.items():
            whole = self._book.get(number) if self._book.maps_rows and number not in lost else None
            self._rows.add(number, whole, rows)
        published = [number for number, batch in self._state.batches.items() if batch.is_published]
        kept = [number for number in published if self._store.holds(self.name, number)]
        with self._locked() as state:
            # Whoever had the run before may have died between saying that a batch is freed and removing it.
            self._removed += range(max(0, state.freed - self.config.max_buffered_batches), state.freed)
            self._append([*recovery.losses(state, lost), *recovery.withdrawn(state, kept)])
            self._owes = True
            self._settle(None)
            missing = [number for number, batch in state.batches.items() if not batch.is_published]
            self._remade = sorted({*self._remade, *missing})

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
                self._commit([GroupsAdmitted(tuple(admitted), self._now())])
        if Admission.NO_ROOM in found:
            return Admissions(found, admission.RETRY_AFTER_S, room.reason)
        return Admissions(found)

    def submit(self, steps: Steps) -> list[Outcome]:
        if not len(steps):
            return []
        self._check_open()
        number, steps = self._book.put(steps)
        is_kept = False
        try:
            rows = intake.describe_rows(steps, number)
            with self._deciding() as state:
                form = check_form(steps, state.form, self.config)
                outcomes, events = intake.take_rows(state, self.config, rows, form, self._room, self._now())
                self._duplicates += outcomes.count(Outcome.DUPLICATE)
                if accepted := [row for row, outcome in enumerate(outcomes) if outcome is Outcome.ACCEPTED]:
                    self._rows.add(number, steps, accepted)
                    # Where it is not known whether they were logged, they may have been.
                    is_kept = True
                    try:
                        self._commit(events)
                    except UnavailableError as error:
                        self._rows.drop(number)
                        is_kept = isinstance(error, LostBookError)
                        raise
        finally:
            if not is_kept:
                self._book.remove([number])
        return outcomes

    def set_rewards(self, rewards: Sequence[RewardUpdate]) -> int:
        digests = [b"" if update.token_values is None else values_digest(update.token_values) for update in rewards]
        with self._deciding() as state:
            changed, events = take_rewards(state, rewards, digests)
            self._commit(events)
        return changed

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
        try:
            return BatchView(found, self._store.plan(self.name, number))
        except NotFoundError:
            self._check_published(number)
            return BatchView(BatchState.PENDING)

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
        try:
            location = self._store.locate(self.name, position.batch, address)
        except NotFoundError:
            self._check_published(position.batch)
            return ShardView(BatchState.PENDING, position, incarnation=current)
        return ShardView(found, position, address, location, current)

    def _check_published(self, number: int) -> None:
        """For a batch that was published a moment ago and is not in the store: returns where it was withdrawn, to come
        again. Raises NotFoundError where it was freed."""
        with self._deciding() as state:
            if progress.batch_state(state, number) is BatchState.PUBLISHED:
                raise UnavailableError(f"batch {number} is not to be found at this moment; ask again")

    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]:
        self._check_open()
        return self._store.read(self.name, batch, address)

    def read_compact_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """Its compact form, or None where the store has whole files only."""
        self._check_open()
        return self._store.read_compact(self.name, batch, address)

    def export(self, number: int) -> Iterator[Steps]:
        """The rows of a sealed batch in their order, some at a time. Raises as `batch` does."""
        with self._deciding() as state:
            progress.batch_state(state, number)
            if number not in state.batches:
                raise FailedPreconditionError(f"batch {number} is not sealed yet; its rows are not decided")
            picked = self._pick(state.batches[number])
            token_rewards = bool(state.form.token_rewards)
        for start in range(0, len(picked), _EXPORTED_ROWS):
            yield gather(picked[start : start + _EXPORTED_ROWS], token_rewards, self._book.get)

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

    def resume(self, model: Model, position: Position | None, launch: str, dp_size: int = 0) -> Resumed:
        """dp_size: 0 for as many ranks as before."""
        with self._deciding() as state:
            dp_size = dp_size or state.dp_size
            _resized(self.created_with, dp_size)
            self._commit(progress.resume(state, model, position, launch, dp_size))
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

    def groups(self) -> list[GroupView]:
        """Every group that was ever admitted; the decided ones first."""
        with self._deciding() as state:
            closed, failed = list(state.closed.items()), dict(state.failed)
            waiting = [GroupView(*key, "complete" if key in state.complete else "open") for key in state.open]
        return [_decided(key, found, failed) for key, found in closed] + waiting

    # --- Its surroundings: `Runs` calls these

    @property
    def is_lost(self) -> bool:
        """Whether the book has to be opened anew, here or elsewhere."""
        return self._is_lost or self._book.is_lost

    def tick(self) -> None:
        """Closes or drops the groups whose time is over, and goes on with what could not be done before.

        Raises UnavailableError where the book cannot be written.
        """
        with self._locked() as state:
            if self._closed is not None or self.is_lost:
                return
            now = self._clock()
            later, self._remove_later = self._remove_later, []
            self._removed += later
            self._remade += [number for number, retry_at in self._postponed.items() if retry_at <= now]
            for number in self._remade:
                self._postponed.pop(number, None)
            self._commit(aborts.timeouts(state, self.config, self._now()))
            if self._owes:
                self._settle(None)

    def flush(self) -> None:
        """Makes safe what the book was not told to make safe at once."""
        try:
            self._book.flush()
        except LostBookError:
            self._is_lost = True
            raise

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

    def close_book(self) -> None:
        """After `close`, when no batch is being made any more."""
        with self._lock:
            self._is_lost = True
            self._book.close()

    def make_batch(self, number: int) -> None:
        """Computes and publishes a sealed batch. Blocks as long as that takes; never raises for the batch's sake."""
        with self._locked() as state:
            batch = state.batches.get(number)
            if self.is_deleted or self.is_lost or batch is None or batch.is_published:
                return
            config, picked = self.config, self._pick(batch)
            token_rewards = bool(state.form.token_rewards)
        started = time.monotonic()
        try:
            milled = self._mill(
                gather(picked, token_rewards, self._book.get),
                config,
                run=self.name,
                batch=number,
                policy_version=batch.policy_version,
            )
            mini_batches: dict[Model, int] = dict.fromkeys(config.models, 0)
            for part in milled.plan["mini_batches"]:
                mini_batches[part["model"]] += 1
            nbytes = self._store.publish(
                self.name, number, orjson.dumps(milled.plan), milled.shards, lambda: self._closed is None
            )
            self._settle_batch(BatchPublished(number, mini_batches, nbytes), config)
        except (UnavailableError, ResourceExhaustedError) as error:
            # Nothing is wrong with the batch: what keeps it has no room for it, or does not answer.
            self._postpone(number, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the batch's reason, not the thread's end
            if not isinstance(error, GristmillError):
                _log.exception("batch failed", run=self.name, batch=number)
            self._fail(BatchFailed(number, str(error) or type(error).__name__), config)
            return
        if not self._postponed:
            self.trouble = ""
        seconds = round(time.monotonic() - started, 3)
        _log.info("batch published", run=self.name, batch=number, rows=len(picked), bytes=nbytes, seconds=seconds)

    def _pick(self, batch: Batch) -> list[PickedRow]:
        return self._rows.pick(row for group in batch.groups for row in group.ordered_rows())

    def _fail(self, event: BatchFailed, config: RunConfig) -> None:
        try:
            self._settle_batch(event, config)
        except UnavailableError as error:
            self._postpone(event.batch, error)

    def _postpone(self, number: int, error: GristmillError) -> None:
        with self._lock:
            if self._closed is not None or self.is_lost:
                return
            self._postponed[number] = self._clock() + _RETRY_S
            first, self.trouble = not self.trouble, f"run {self.name!r}: batch {number} waits: {error}"
        if first:
            _log.warning("batch waits", run=self.name, batch=number, reason=str(error))

    def _settle_batch(self, event: BatchPublished | BatchFailed, config: RunConfig) -> None:
        """Says what became of a batch. Raises UnavailableError where the book does not take it; its shards are gone
        then, as they are where nobody wants them any more."""
        is_told = is_wanted = False
        # Who opens the run anew, or deletes it, waits until what nobody wants is gone.
        with self._removing:
            try:
                with self._locked() as state:
                    is_wanted = not self.is_lost and not self.is_deleted and event.batch in state.batches
                    if is_wanted and config.dp_size == state.dp_size:
                        self._commit([event])
                        is_told = True
            finally:
                if self.is_deleted:
                    # Published after the run's other batches were removed.
                    self._store.delete_run(self.name)
                elif not is_told:
                    self._store.free(self.name, event.batch)
        if is_wanted and not is_told:
            # The trainer came back with other ranks meanwhile.
            self._on_sealed(self, event.batch)

    # --- Deciding

    @contextmanager
    def _deciding(self) -> Iterator[State]:
        """For a call from outside: refused where the run is closed. What it says is safe when it returns."""
        with self._locked() as state:
            self._check_open()
            yield state
        try:
            self._book.sync()
        except LostBookError:
            self._is_lost = True
            raise

    @contextmanager
    def _locked(self) -> Iterator[State]:
        """The run's lock, and after it what may take a while: waking who waits, removing, copying."""
        try:
            with self._lock:
                yield self._state
        finally:
            self._tidy()

    def _tidy(self) -> None:
        with self._lock:
            wakes, self._wakes = self._wakes, False
            removed, self._removed = self._removed, []
            remade, self._remade = self._remade, []
            empty, sparse = self._rows.take_empty(), self._rows.take_sparse()
        if wakes:
            self.changes.notify()
        if removed:
            self._remove(removed)
        for batch in remade:
            self._on_sealed(self, batch)
        if empty and not self.is_lost:
            self._book.remove(empty)
        for number, steps, live in sparse:
            copy, index = compacted(steps, live)
            with self._lock:
                self._rows.replace(number, steps, copy, index)

    def _remove(self, batches: list[int]) -> None:
        with self._removing:
            for batch in batches if self._closed is None else ():
                try:
                    self._store.free(self.name, batch)
                except (OSError, UnavailableError) as error:
                    # Whoever acknowledged is not to blame.
                    _log.warning("a batch is removed later", run=self.name, batch=batch, reason=str(error))
                    self._remove_later.append(batch)

    @property
    def is_deleted(self) -> bool:
        return isinstance(self._closed, NotFoundError)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(*self._closed.args)
        if self.is_lost:
            raise UnavailableError(f"run {self.name!r} is being read anew from where it is kept; ask again")

    def _commit(self, events: Sequence[Event]) -> None:
        """Logs and applies the events, and what follows from them as far as the log takes it. With the lock held.

        Raises UnavailableError where the events themselves cannot be logged; then nothing has happened.
        """
        self._append(events)
        self._settle(events)

    def _settle(self, events: Sequence[Event] | None) -> None:
        """Logs and applies what follows from these events; None: from whatever happened before.

        What the log does not take now becomes due again at the next tick: it follows from the state alone.
        """
        happened = events
        try:
            while following := sealing.due(self._state, self.config, happened) or progress.freed(self._state):
                self._append(following)
                happened = following
            self._owes &= events is not None
        except UnavailableError:
            self._owes = True
        self._budget.hold(self.name, admission.row_bytes_promised(self._state))

    def _append(self, events: Sequence[Event]) -> None:
        """All of the events, or none: raises UnavailableError then."""
        if not events:
            return
        try:
            self._book.append(encode_events(events))
        except LostBookError:
            self._is_lost = self._wakes = True
            raise
        for event in events:
            self._apply(event)
        if self._book.is_long and self._clock() >= self._compact_after:
            self._compact()

    def _compact(self) -> None:
        try:
            self._book.compact(encode_state(self._state))
        except LostBookError:
            self._is_lost = self._wakes = True
        except UnavailableError as error:
            # The log stays as it is, only longer. Telling the whole state takes a while, with the lock held.
            self._compact_after = self._clock() + _COMPACT_AGAIN_S
            _log.warning("log not compacted", run=self.name, reason=str(error))

    def _apply(self, event: Event) -> None:
        self._rows.release(apply(self._state, event))
        self._wakes |= event.wakes
        match event:
            case BatchSealed(batch):
                self._on_sealed(self, batch)
            case BatchPublished(batch) if self._book.reads_rows and not self._book.maps_rows:
                rows = (row.ref for group in self._state.batches[batch].groups for row in group.ordered_rows())
                self._rows.unload(rows)
            case BatchFreed(batch):
                self._removed.append(batch)
            case BatchWithdrawn(batch):
                self._removed.append(batch)
                self._remade.append(batch)
            case Resized():
                self._use_dp_size()

    def _use_dp_size(self) -> None:
        self.config = _resized(self.created_with, self._state.dp_size)
        self.config_json = self.config.model_dump_json(exclude_defaults=True)

    def _room(self) -> Room:
        return admission.room(self._state, self.config, self._budget.left_for(self.name))

    def _now(self) -> float:
        """The run's own time: seconds for which it has been served."""
        return self._clock() + self._clock_offset


def _decided(key: GroupKey, found: int | str, failed: Mapping[int, str]) -> GroupView:
    if isinstance(found, str):
        return GroupView(*key, "dropped", reason=found)
    if found in failed:
        return GroupView(*key, "dropped", found, "batch_failed")
    return GroupView(*key, "sealed", found)


def _resized(config: RunConfig, dp_size: int) -> RunConfig:
    """Raises InvalidArgumentError where the other settings do not allow so many ranks."""
    if dp_size == config.dp_size:
        return config
    return parse_config(json.loads(config.model_dump_json(exclude_defaults=True)) | {"dp_size": dp_size})
