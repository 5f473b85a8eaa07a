"""A run's state as its book keeps it: every change is logged, then applied, then what follows from it, under one lock.

Who decides is elsewhere: `run` for calls from outside, `making` for batches. What may take a while (waking who waits,
removing batches, copying) is done after the lock is given back.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from gristmill.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_service import tracing
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.monitoring.run_monitor import Monitor
from gristmill_service.run import recovery
from gristmill_service.run.changes import Changes
from gristmill_service.run.machine import aborts, admission, progress, sealing
from gristmill_service.run.machine.admission import Room, RowBudget
from gristmill_service.run.machine.codec import encode_events, encode_state
from gristmill_service.run.machine.events import BatchFreed, BatchPublished, BatchSealed, BatchWithdrawn, Event, Resized
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.row_buffer import RowBuffer, compacted
from gristmill_service.storage.run_store import LogLostError, RunLog

_log = structlog.get_logger(__name__)

_COMPACT_AGAIN_S = 10.0

OnSealed = Callable[[Any, int], None]


class KeptRun:
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
        book: RunLog,
        on_sealed: OnSealed,
        clock: Callable[[], float],
        budget: RowBudget,
    ) -> None:
        self.name, self.config, self.created_with = name, config, config
        self.changes = Changes()
        self.trouble = ""
        self._store, self._book, self._on_sealed, self._clock = store, book, on_sealed, clock
        self._budget = budget
        self.monitor = Monitor(clock, self._now)
        self.run_id = book.run_id or uuid.uuid4().hex
        self._lock = threading.Lock()
        self._duplicates = 0
        self._closed: GristmillError | None = None
        self._is_lost = False
        # What follows from a change once the lock is given back: waking those who wait, removing and making batches.
        self._wakes = False
        self._removed: list[int] = []
        self._untold: list[BatchSealed] = []
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
            self.monitor.changed(state, self._room())
            missing = [number for number, batch in state.batches.items() if not batch.is_published]
            self._remade = sorted({*self._remade, *missing})

    @property
    def holding(self) -> dict[str, int]:
        """How many batches, open groups and rows are kept now, for a log."""
        with self._lock:
            groups = [group for batch in self._state.batches.values() for group in batch.groups]
            groups += self._state.open.values()
            rows = sum(len(group.refs()) for group in groups)
            return {"batches": len(self._state.batches), "groups_open": len(self._state.open), "rows": rows}

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
        except LogLostError:
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

    @contextmanager
    def _deciding(self) -> Iterator[State]:
        """For a call from outside: refused where the run is closed. What it says is safe when it returns."""
        with self._locked() as state:
            self._check_open()
            yield state
        try:
            self._book.sync()
        except LogLostError:
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
            sealed, self._untold = self._untold, []
            remade, self._remade = self._remade, []
            empty, sparse = self._rows.take_empty(), self._rows.take_sparse()
        if wakes:
            self.changes.notify()
        for event in sealed:
            _log.info("batch sealed", run=self.name, batch=event.batch, groups=[str(key) for key in event.groups])
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
        self.monitor.changed(self._state, self._room())

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
        except LogLostError:
            self._is_lost = self._wakes = True
            raise
        for event in events:
            self._apply(event)
        if self._book.is_long and self._clock() >= self._compact_after:
            self._compact()

    def _compact(self) -> None:
        try:
            self._book.compact(encode_state(self._state))
        except LogLostError:
            self._is_lost = self._wakes = True
        except UnavailableError as error:
            # The log stays as it is, only longer. Telling the whole state takes a while, with the lock held.
            self._compact_after = self._clock() + _COMPACT_AGAIN_S
            _log.warning("log not compacted", run=self.name, reason=str(error))

    def _apply(self, event: Event) -> None:
        released = apply(self._state, event)
        self.monitor.applied(event, self._state, len(released), lambda: self._rows.tokens(released))
        self._rows.release(released)
        self._wakes |= event.wakes
        match event:
            case BatchSealed(batch):
                self._untold.append(event)
                tracing.sealed(self.name, batch)
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
        self.config = with_dp_size(self.created_with, self._state.dp_size)
        self.config_json = self.config.model_dump_json(exclude_defaults=True)

    def _room(self) -> Room:
        return admission.room(self._state, self.config, self._budget.left_for(self.name))

    def _now(self) -> float:
        """The run's own time: seconds for which it has been served."""
        return self._clock() + self._clock_offset


def with_dp_size(config: RunConfig, dp_size: int) -> RunConfig:
    """Raises InvalidArgumentError where the other settings do not allow so many ranks."""
    if dp_size == config.dp_size:
        return config
    return parse_config(json.loads(config.model_dump_json(exclude_defaults=True)) | {"dp_size": dp_size})
