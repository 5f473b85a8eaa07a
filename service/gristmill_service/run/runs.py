"""The runs of this process, and the threads that work for them: one that makes sealed batches, one that keeps time.

Runs are kept in a ledger: those that it has when the service starts go on where they stopped.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from gristmill.errors import AlreadyExistsError, GristmillError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service import tracing
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import mill as pipeline_mill
from gristmill_service.run.machine.admission import RowBudget
from gristmill_service.run.making import BuildBatch
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.run import Run
from gristmill_service.run.shards import Shards, StoredShards
from gristmill_service.storage.memory_runs import MemoryRunStore
from gristmill_service.storage.run_store import OwnedElsewhereError, RunLog, RunStore
from gristmill_service.storage.shard_store import ShardStore

_log = structlog.get_logger(__name__)

_LONGEST_NAME = 128
_TICK_S = 0.2
_FLUSH_S = 1.0
_MAX_ROW_BYTES = 8 << 30


class Runs:
    """Thread-safe. Owns its threads, neither the store nor the ledger.

    max_row_bytes: what rows of all runs together may hold.

    Raises InvalidArgumentError where a run of the ledger cannot be read, and UnavailableError where it cannot go on.
    """

    def __init__(
        self,
        store: ShardStore,
        ledger: RunStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        mill: BuildBatch = pipeline_mill,
        max_row_bytes: int = _MAX_ROW_BYTES,
    ) -> None:
        self._store, self._clock, self._mill = PatientStore(store), clock, mill
        self._ledger = ledger or MemoryRunStore()
        self._budget = RowBudget(max_row_bytes)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._deleting = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._closing = False
        self._unreadable: set[str] = set()
        self._elsewhere = self._unclaimed = 0
        self._sealed: queue.SimpleQueue[tuple[Run, int] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._sealer = threading.Thread(target=self._make_batches, name="gristmill-sealer", daemon=True)
        self._timer = threading.Thread(target=self._keep_time, name="gristmill-timer", daemon=True)
        for name in () if self._ledger.is_shared else self._ledger.names():
            self._open(name)
        self._sealer.start()
        self._timer.start()

    def create(self, name: str, config: Mapping[str, Any] | RunConfig) -> tuple[list[str], bool]:
        """Warnings about the configuration, and whether this call created the run."""
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise InvalidArgumentError(f"run is {name!r}; a name has 1 to {_LONGEST_NAME} printable characters")
        parsed = config if isinstance(config, RunConfig) else parse_config(config)
        self._check_serving()
        try:
            run = self.get(name)
        except NotFoundError:
            if self._create(name, parsed):
                return parsed.warnings(), True
            run = self.get(name)
        if run.is_deleted:
            raise UnavailableError(f"run {name!r} is being deleted; create it again when that is done")
        if parsed not in (run.created_with, run.config):
            raise AlreadyExistsError(
                f"run {name!r} exists with another configuration: {_difference(run.created_with, parsed)}"
            )
        return parsed.warnings(), False

    def get(self, name: str) -> Run:
        """Raises NotFoundError where there is no such run, and OwnedElsewhereError where another process has it."""
        run = self._runs.get(name)
        if run is not None and (self._closing or not run.is_lost):
            return run
        if run is None and not self._ledger.is_shared:
            raise self._unknown(name)
        self._check_serving()
        return self._open(name)

    def shards(self, name: str) -> Shards:
        """The run's shards, which any process that shares their store can read."""
        try:
            return self.get(name)
        except OwnedElsewhereError:
            return StoredShards(name, self._store)

    def trouble(self) -> str:
        """Why batches or calls have to wait for what keeps them; empty when all is well."""
        with self._lock:
            runs = list(self._runs.values())
        return self._ledger.unhealthy_reason() or next((run.trouble for run in runs if run.trouble), "")

    def is_owner(self, name: str, grpc_address: str) -> bool:
        """Whether the process there has the run, as far as can be told."""
        try:
            self.get(name)
        except OwnedElsewhereError as elsewhere:
            return elsewhere.grpc_address == grpc_address
        except UnavailableError:
            return True
        except NotFoundError:
            return False
        return False

    def names(self) -> list[str]:
        """Of all runs, also those that other processes have."""
        with self._lock:
            own = set(self._runs)
        return sorted(own.union(self._ledger.names()) if self._ledger.is_shared else own)

    def own(self) -> list[Run]:
        """The runs that this process decides for."""
        with self._lock:
            return [run for _, run in sorted(self._runs.items())]

    @property
    def row_room(self) -> tuple[int, int]:
        """Bytes of rows that all runs hold or have promised room for, and how many they may."""
        return self._budget.held, self._budget.max_bytes

    def leases(self) -> dict[str, int]:
        """Runs that this process decides for, that it is not sure of, that others decide for, and that nobody does: the
        last two as they were found within the last seconds."""
        own = self.own()
        lost = sum(run.is_lost for run in own)
        return {"own": len(own) - lost, "lost": lost, "elsewhere": self._elsewhere, "nobody": self._unclaimed}

    def delete(self, name: str) -> None:
        """Returns when nothing of the run is left, so that its name can be another run's."""
        with self._deleting:
            run = self.get(name)
            run.close(NotFoundError(f"run {name!r} was deleted"))
            try:
                self._ledger.delete(name)
                self._store.delete_run(name)
            finally:
                # Where it could not be deleted it is opened anew, here or elsewhere.
                run.close_book()
                with self._lock:
                    self._runs.pop(name, None)

    def tick(self) -> None:
        """Closes or drops what has waited too long, in every run."""
        for run in self.own():
            # What keeps it may take nothing now, which `trouble` tells.
            with suppress(UnavailableError):
                run.tick()

    def close(self, timeout_s: float) -> None:
        """Takes no more calls, finishes the batches that are sealed, and wakes who waits. The store stays open."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            runs = list(self._runs.values())
        self._stopped.set()
        for run in runs:
            run.close(UnavailableError("the service is shutting down; ask again when it is back"))
        self._sealed.put(None)
        self._sealer.join(timeout_s)
        self._timer.join()
        for run in runs:
            run.close_book()

    def _started(self, name: str, book: RunLog) -> Run:
        try:
            config = parse_config(json.loads(book.config))
            run = Run(name, config, self._store, book, self._mill, self._enqueue, self._clock, self._budget)
            run.start()
        except BaseException:
            book.close()
            raise
        return run

    def _create(self, name: str, config: RunConfig) -> bool:
        """Whether no other call, or process, was faster."""
        with self._opening:
            if name in self._runs:
                return False
            try:
                self._keep(name, self._ledger.create(name, config.model_dump_json().encode()))
            except AlreadyExistsError:
                return False
            return True

    def _open(self, name: str) -> Run:
        """The run as its book tells it now. Raises as `get` does."""
        self._check_ledger()
        with self._opening:
            # Who waited behind an attempt that failed does not make it again.
            self._check_ledger()
            run = self._runs.get(name)
            if run is not None:
                if not run.is_lost:
                    return run
                run.close(UnavailableError(f"run {name!r} is read anew from where it is kept; ask again"))
                run.close_book()
                with self._lock:
                    del self._runs[name]
            began = self._clock()
            try:
                run = self._keep(name, self._ledger.open(name))
            except NotFoundError:
                raise self._unknown(name) from None
            _log.info("run restored", run=name, **run.holding, seconds=round(self._clock() - began, 3))
            return run

    def _keep(self, name: str, book: RunLog) -> Run:
        run = self._started(name, book)
        with self._lock:
            self._runs[name] = run
        return run

    def _unknown(self, name: str) -> NotFoundError:
        known = ", ".join(self.names()[:10]) or "none"
        return NotFoundError(f"run {name!r} does not exist; create it first (there are: {known})")

    def _enqueue(self, run: Run, batch: int) -> None:
        self._sealed.put((run, batch))

    def _make_batches(self) -> None:
        while (item := self._sealed.get()) is not None:
            run, batch = item
            try:
                with tracing.making_span(run.name, batch):
                    run.make_batch(batch)
            except Exception:  # noqa: BLE001
                # One batch must not end the making of all others.
                _log.exception("batch could not be made", run=run.name, batch=batch)

    def _keep_time(self) -> None:
        flushed = self._clock()
        while not self._stopped.wait(_TICK_S):
            try:
                self.tick()
                if self._clock() - flushed >= _FLUSH_S:
                    flushed = self._clock()
                    self._flush()
                    self._adopt()
                    # Looking is also what finds that there is room again.
                    self._ledger.unhealthy_reason()
            except Exception:  # noqa: BLE001
                _log.exception("tick failed")

    def _flush(self) -> None:
        for run in self.own():
            with suppress(UnavailableError):
                run.flush()

    def _adopt(self) -> None:
        """Takes over what nobody has any more, and reads anew what is not certain."""
        with suppress(UnavailableError):
            elsewhere = unclaimed = 0
            for name in self.names():
                try:
                    self.get(name)
                    self._unreadable.discard(name)
                except OwnedElsewhereError:
                    elsewhere += 1
                except UnavailableError:
                    unclaimed += 1
                except NotFoundError:
                    continue
                except GristmillError as error:
                    unclaimed += 1
                    if name not in self._unreadable:
                        self._unreadable.add(name)
                        _log.error("run cannot be read", run=name, reason=str(error))
            self._elsewhere, self._unclaimed = elsewhere, unclaimed

    def _check_ledger(self) -> None:
        if reason := self._ledger.unreachable_reason():
            raise UnavailableError(reason)

    def _check_serving(self) -> None:
        if self._closing:
            raise UnavailableError("the service is shutting down; ask again when it is back")


def _difference(one: RunConfig, other: RunConfig) -> str:
    before, after = json.loads(one.model_dump_json()), json.loads(other.model_dump_json())
    changed = [
        f"{name} was {before[name]!r} and is now {after[name]!r}" for name in before if before[name] != after[name]
    ]
    return ", ".join(changed)
