"""Sees to what a run's writer leaves to others: waking callers, building batches, removing what is not needed any
more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from gristmill.errors import GristmillError, UnavailableError
from gristmill_service import tracing
from gristmill_service.run.batch_builder import BatchBuilder
from gristmill_service.run.machine.decisions.failures import remedy
from gristmill_service.run.rows.row_buffer import compacted
from gristmill_service.run.shard_room import ShardRoom
from gristmill_service.run.workers import TaskQueue
from gristmill_service.run.writing.effects import Effects, SparseTable
from gristmill_service.run.writing.writer import Writer
from gristmill_service.storage.row_tables import held, steps_of
from gristmill_service.storage.run_store import RunLog
from gristmill_service.storage.shard_store import ShardStore

_log = structlog.get_logger(__name__)


class Housekeeping:
    """One run's. Thread-safe.

    builders, workers: threads for building batches, and for what is short. Tasks are queued under the run's name, so
    that those of a deleted run are over before those of a new run of its name begin.
    """

    def __init__(
        self,
        name: str,
        writer: Writer,
        builder: BatchBuilder,
        log: RunLog,
        store: ShardStore,
        room: ShardRoom,
        builders: TaskQueue,
        workers: TaskQueue,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._writer, self._builder, self._log, self._store = name, writer, builder, log, store
        self._room, self._builders, self._workers, self._clock = room, builders, workers, clock
        self._lock = threading.Lock()
        self._free_again: set[int] = set()
        self._is_build_queued = False

    def perform(self, effects: Effects) -> None:
        for wake in effects.wakes:
            wake()
        for sealed in effects.sealed:
            tracing.sealed(self._name, sealed.batch)
            groups = [str(key) for key in sealed.groups]
            _log.info("batch sealed", run=self._name, batch=sealed.batch, groups=groups)
        for failed in effects.failed:
            what_now = remedy(failed.reason, is_kept=failed.keeps_rows)
            _log.error("batch failed", run=self._name, batch=failed.batch, reason=failed.reason, remedy=what_now)
        if effects.builds:
            self._start_building()
        if effects.freed:
            self._workers.submit(("free", self._name), lambda: self._free(effects.freed))
        if effects.empty or effects.sparse:
            self._workers.submit(("tables", self._name), lambda: self._clean_tables(effects.empty, effects.sparse))

    @property
    def is_due(self) -> bool:
        """Whether `try_again` has something to do."""
        return bool(self._free_again) or self._is_blocked_batch_due or self._writer.waits_for_room

    def try_again(self) -> None:
        """Goes on with what could not be done before."""
        with self._lock:
            freed, self._free_again = sorted(self._free_again), set()
        # Another run may have given back room, of which this one hears nothing.
        wakes = self._writer.take_who_wait_for_room()
        self.perform(Effects(builds=self._is_blocked_batch_due, freed=freed, wakes=wakes))

    @property
    def _is_blocked_batch_due(self) -> bool:
        return bool(self._builder.blocked_reason) and self._clock() >= self._builder.retry_at

    def _start_building(self) -> None:
        with self._lock:
            if self._is_build_queued:
                return
            self._is_build_queued = True
        self._builders.submit(("build", self._name), self._build)

    def _build(self) -> None:
        with self._lock:
            self._is_build_queued = False
        self._builder.build(self.perform, self._start_building)

    def _free(self, batches: Sequence[int]) -> None:
        for batch in batches:
            if self._writer.closed is not None:
                return
            try:
                self._store.free(self._name, batch)
            except (GristmillError, OSError) as error:
                # Whoever acknowledged is not to blame.
                _log.warning(
                    "shards could not be removed; trying again later", run=self._name, batch=batch, reason=str(error)
                )
                with self._lock:
                    self._free_again.add(batch)
        self._room.removed()

    def _clean_tables(self, empty: Sequence[int], sparse: Sequence[SparseTable]) -> None:
        with suppress(UnavailableError):
            if empty and not self._writer.is_lost:
                # Rows go when the event after which nobody needs them cannot be lost any more.
                self._log.sync()
                self._log.remove(empty)
        for table in sparse:
            copy, index = compacted(steps_of(table.stored), table.live)
            self._writer.replace_rows(table, held(copy), index)
