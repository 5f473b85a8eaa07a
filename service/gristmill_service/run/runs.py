"""The runs of this process: created, opened, taken over, deleted; and the threads that work for them.

Runs are stored in a run store: those that it has when the service starts go on where they stopped. A run that cannot be
read is set aside, and the others serve.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from itertools import chain
from typing import Any, TypeVar

import structlog

from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service.access.held import ANY, Held, Most
from gristmill_service.config import RunConfig, parse_config, warnings_of
from gristmill_service.pipeline import build_batch as build_with_pipeline
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.run.batch_builder import BuildBatch
from gristmill_service.run.run import MakeMonitor, Run, Shared
from gristmill_service.run.shard_room import ShardRoom
from gristmill_service.run.workers import Workers
from gristmill_service.run.writing.row_budget import RowBudget
from gristmill_service.storage.memory_runs import MemoryRunStore
from gristmill_service.storage.run_store import OwnedElsewhereError, RunLog, RunStore
from gristmill_service.storage.shard_store import ShardsLostError, ShardStore

_log = structlog.get_logger(__name__)

Pieces = TypeVar("Pieces", Iterator[bytes], Iterator[bytes] | None)

_LONGEST_NAME = 128
_TICK_S = 0.2
_FLUSH_S = 1.0
_MAX_ROW_BYTES = 8 << 30
_MAX_RUNS = 4096
# A large batch, or a store that hangs, takes one of them.
_BUILDERS = 8
_WORKERS = 16


class Runs:
    """Thread-safe. Owns its threads, neither the shard store nor the run store.

    make_monitor(clock, now): of each run; now is the run's own time.
    max_row_bytes: how many bytes the rows of all runs together may hold. max_runs: how many runs there may be.
    most_a_run: what any one of them may hold.
    """

    def __init__(
        self,
        shard_store: ShardStore,
        run_store: RunStore | None = None,
        *,
        make_monitor: MakeMonitor,
        clock: Callable[[], float] = time.monotonic,
        build_batch: BuildBatch = build_with_pipeline,
        max_row_bytes: int = _MAX_ROW_BYTES,
        max_runs: int = _MAX_RUNS,
        most_a_run: Most = ANY,
    ) -> None:
        self._shards, self._clock = shard_store, clock
        self._store = run_store or MemoryRunStore()
        self._budget, self._max_runs = RowBudget(max_row_bytes, most_a_run), max_runs
        self._builders, self._workers = Workers(_BUILDERS, "gristmill-build"), Workers(_WORKERS, "gristmill-worker")
        self._shared = Shared(
            shard_store, ShardRoom(), self._budget, build_batch, make_monitor, clock, self._builders, self._workers
        )
        # `_lock` guards `_runs`, `_unreadable` and `_names`; a name's own lock is held while its run is created, opened
        # or deleted, and is taken first.
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._unreadable: dict[str, Exception] = {}
        self._names: dict[str, _NameLock] = {}
        self._closing = False
        self._elsewhere = self._unclaimed = 0
        self._stopped = threading.Event()
        self._timer = threading.Thread(target=self._keep_time, name="gristmill-timer", daemon=True)
        for name in () if self._store.is_shared else self._store.names():
            with suppress(FailedPreconditionError, UnavailableError):
                self._open(name)
        self._timer.start()

    def create(self, name: str, config: Mapping[str, Any] | RunConfig) -> tuple[list[str], bool]:
        """Warnings about the configuration, and whether this call created the run."""
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise InvalidArgumentError(f"run is {name!r}; a name has 1 to {_LONGEST_NAME} printable characters")
        if "/" in name or name in (".", ".."):
            raise InvalidArgumentError(
                f"run is {name!r}; a name stands in the path of URLs, so it has no slash and is not '.' or '..'"
            )
        parsed = config if isinstance(config, RunConfig) else parse_config(config)
        self._check_serving()
        try:
            run = self.get(name)
        except NotFoundError:
            if (count := len(self.names())) >= self._max_runs:
                raise ResourceExhaustedError(
                    f"there are {count} runs and max_runs allows {self._max_runs}; delete one, or raise the setting"
                ) from None
            if self._create(name, parsed):
                return warnings_of(parsed), True
            run = self.get(name)
        if run.is_deleted:
            raise UnavailableError(f"run {name!r} is being deleted; create it again when that is done")
        if parsed not in (run.created_with, run.config):
            raise AlreadyExistsError(
                f"run {name!r} exists with another configuration: {_difference(run.created_with, parsed)}"
            )
        return warnings_of(parsed), False

    def get(self, name: str) -> Run:
        """Raises NotFoundError where there is no such run, OwnedElsewhereError where another process has it, and
        FailedPreconditionError where it cannot be read."""
        run = self._runs.get(name)
        if run is not None and (self._closing or run.is_deleted or not run.is_lost):
            return run
        if run is None and not self._store.is_shared and name not in self._unreadable:
            raise self._unknown(name)
        self._check_serving()
        return self._open(name)

    def read_shard(self, name: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """The shard's file in order, which any process that shares the store can read. Raises as `get` where it has to
        be built anew by the run's owner."""
        try:
            run = self.get(name)
        except OwnedElsewhereError as elsewhere:
            return _whole_or(elsewhere, lambda: self._shards.read(name, batch, address))
        return run.read_shard(batch, address)

    def read_shard_frames(self, name: str, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """The shard's compressed frames likewise, or None where the store has whole files."""
        try:
            run = self.get(name)
        except OwnedElsewhereError as elsewhere:
            return _whole_or(elsewhere, lambda: self._shards.read_frames(name, batch, address))
        return run.read_shard_frames(batch, address)

    def unhealthy_reason(self) -> str:
        """Why batches or calls have to wait for what stores them; empty when all is well."""
        return self._store.unhealthy_reason() or next(
            (run.blocked_reason for run in self.own() if run.blocked_reason), ""
        )

    def is_owner(self, name: str, grpc_address: str) -> bool:
        """Whether the process there has the run, as far as can be told."""
        try:
            self.get(name)
        except OwnedElsewhereError as elsewhere:
            return elsewhere.grpc_address == grpc_address
        except UnavailableError:
            return True
        except GristmillError:
            return False
        return False

    def names(self) -> list[str]:
        """The names of all runs, also of those that other processes have and those that cannot be read."""
        with self._lock:
            own = {*self._runs, *self._unreadable}
        return sorted(own.union(self._store.names()) if self._store.is_shared else own)

    def own(self) -> list[Run]:
        """The runs that this process decides for."""
        with self._lock:
            return [run for _, run in sorted(self._runs.items())]

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The runs that are set aside because they cannot be read, with the reasons."""
        with self._lock:
            return {name: str(error) for name, error in self._unreadable.items()}

    def held(self) -> Mapping[str, Held]:
        """What each run of this process holds."""
        return self._budget.by_run()

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
        """Returns when nothing of the run is left, so that its name can be another run's. A run that cannot be read may
        be deleted, too."""
        if self._delete_unreadable(name):
            return
        meant = self.get(name)
        with self._locked(name):
            # The same run may have been read anew meanwhile; another one of its name is not meant.
            run = self._runs.get(name)
            if run is None or run.run_id != meant.run_id:
                raise self._unknown(name)
            run.close(NotFoundError(f"run {name!r} was deleted"))
            # What it was about to write or remove must not meet a new run of the name.
            run.wait_for_publication()
            self._workers.wait_idle(("free", name))
            try:
                self._store.delete(name)
                self._shards.delete_run(name)
            except (GristmillError, OSError) as error:
                # It is opened anew when it is asked for, here or elsewhere.
                self._set_aside(name, error)
                raise
            finally:
                self._close_log(name, run)
                self._shared.room.removed()

    def tick(self) -> None:
        """Has every run close or drop what has waited too long, and go on with what could not be done before."""
        for run in self.own():
            if run.is_lost:
                run.wake_waiters()
            elif run.is_due and not self._workers.is_busy(key := ("tick", run.name)):
                self._workers.submit(key, lambda run=run: _quietly(run.tick))  # type: ignore[misc]

    def close(self, timeout_s: float) -> None:
        """Takes no more calls, finishes the batches that are sealed, and wakes callers that wait. The stores stay
        open."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            runs = list(self._runs.values())
        self._stopped.set()
        self._timer.join()
        for run in runs:
            run.close(UnavailableError("the service is shutting down; ask again when it is back"))
        self._builders.stop(timeout_s)
        self._workers.stop(timeout_s)
        for run in runs:
            run.close_log()

    # --- Opening and closing one run. A name's lock is held.

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One name at a time: a long replay or deletion is in nobody else's way."""
        with self._lock:
            entry = self._names.setdefault(name, _NameLock())
            entry.users += 1
        try:
            with entry.lock:
                yield
        finally:
            with self._lock:
                entry.users -= 1
                if not entry.users:
                    del self._names[name]

    def _create(self, name: str, config: RunConfig) -> bool:
        """Whether no other call, or process, was faster."""
        with self._locked(name):
            if name in self._runs:
                return False
            try:
                self._start(name, self._store.create(name, config.model_dump_json().encode()))
            except AlreadyExistsError:
                return False
            return True

    def _open(self, name: str) -> Run:
        """The run as its log describes it now. Raises as `get` does."""
        self._check_store()
        with self._locked(name):
            # A caller that waited behind an attempt that failed does not make it again.
            self._check_store()
            run = self._runs.get(name)
            if run is not None:
                if run.is_deleted or not run.is_lost:
                    return run
                # Its lease may come back, and must not find it deciding beside the new one.
                run.lose()
                run.close(UnavailableError(f"run {name!r} is read anew from where it is stored; ask again"))
                # It stays named until another takes its place: whoever asks meanwhile comes here, and waits.
                run.close_log()
            began = self._clock()
            try:
                run = self._start(name, self._store.open(name))
            except NotFoundError:
                self._forget(name)
                raise self._unknown(name) from None
            except UnavailableError as error:
                if not self._store.is_shared:
                    # Nobody else names it: it would be unknown from now on.
                    self._set_aside(name, error)
                self._forget(name)
                raise
            except (GristmillError, OSError) as error:
                self._set_aside(name, error)
                self._forget(name)
                raise FailedPreconditionError(
                    f"run {name!r} cannot be read: {error}; restore it where it is stored, or delete the run"
                ) from error
            _log.info("run restored", run=name, **_holding(run), seconds=round(self._clock() - began, 3))
            self._workers.submit(("sweep", name), lambda: _quietly(lambda: self._shards.sweep(name)))
            return run

    def _start(self, name: str, log: RunLog) -> Run:
        try:
            run = Run(name, parse_config(json.loads(log.config)), log, self._shared)
            run.start()
        except BaseException:
            log.close()
            self._budget.forget(name)
            raise
        with self._lock:
            self._runs[name] = run
            self._unreadable.pop(name, None)
        return run

    def _close_log(self, name: str, run: Run) -> None:
        run.close_log()
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._runs.pop(name, None)

    def _set_aside(self, name: str, error: Exception) -> None:
        with self._lock:
            is_new = name not in self._unreadable
            # Without the frames that it was raised through.
            self._unreadable[name] = copy(error)
        if is_new:
            _log.error("run cannot be read", run=name, reason=str(error))

    def _delete_unreadable(self, name: str) -> bool:
        """Whether the run was set aside, and is deleted now."""
        with self._locked(name):
            # It may have come back, or have been deleted and created anew: then calls are under way in it.
            if name not in self._unreadable:
                return False
            self._store.delete(name)
            self._shards.delete_run(name)
            with self._lock:
                del self._unreadable[name]
            return True

    # --- Time

    def _keep_time(self) -> None:
        flushed = self._clock()
        while not self._stopped.wait(_TICK_S):
            try:
                self.tick()
                if self._clock() - flushed >= _FLUSH_S:
                    flushed = self._clock()
                    self._flush()
                    self._adopt()
                    # Asking is also what finds that there is room again.
                    self._workers.submit("health", lambda: _quietly(self._store.unhealthy_reason))
            except Exception:  # noqa: BLE001
                _log.exception("tick failed")

    def _flush(self) -> None:
        for run in self.own():
            if not self._workers.is_busy(key := ("flush", run.name)):
                self._workers.submit(key, lambda run=run: _quietly(run.flush))  # type: ignore[misc]

    def _adopt(self) -> None:
        """Takes over what nobody has any more, and reads anew what is not certain."""
        if not self._workers.is_busy("adopt"):
            self._workers.submit("adopt", lambda: _quietly(self._adopt_all))

    def _adopt_all(self) -> None:
        elsewhere = unclaimed = 0
        for name in self.names():
            if not isinstance(self._unreadable.get(name), UnavailableError | None):
                # It is damaged, and read again when it is asked for: that may take long, and seldom helps.
                unclaimed += 1
                continue
            try:
                self.get(name)
            except OwnedElsewhereError:
                elsewhere += 1
            except NotFoundError:
                continue
            except GristmillError:
                unclaimed += 1
        self._elsewhere, self._unclaimed = elsewhere, unclaimed

    # --- Checks

    def _unknown(self, name: str) -> NotFoundError:
        known = ", ".join(self.names()[:10]) or "none"
        return NotFoundError(f"run {name!r} does not exist; create it first (there are: {known})")

    def _check_store(self) -> None:
        if reason := self._store.unreachable_reason():
            raise UnavailableError(reason)

    def _check_serving(self) -> None:
        if self._closing:
            raise UnavailableError("the service is shutting down; ask again when it is back")


class _NameLock:
    """users: how many hold the lock or wait for it."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0


def _whole_or(elsewhere: OwnedElsewhereError, read: Callable[[], Pieces]) -> Pieces:
    """The pieces that are read, or the error that names the owner where the first of them is not there: it builds them
    anew, or knows why."""
    try:
        pieces = read()
        if pieces is None:
            return pieces
        first = next(pieces, b"")
    except (ShardsLostError, NotFoundError):
        raise elsewhere from None
    return chain([first], pieces)


def _quietly(task: Callable[[], object]) -> None:
    """What stores it may take nothing now, which `unhealthy_reason` tells, and a run may be deleted meanwhile."""
    with suppress(UnavailableError, NotFoundError):
        task()


def _holding(run: Run) -> dict[str, int]:
    """How many batches, open groups and rows are held now."""
    return run.read(
        lambda state, room: {
            "batches": len(state.batches),
            "groups_open": len(state.open),
            "rows": sum(
                len(group.refs())
                for groups in (state.open.values(), *(batch.groups for batch in state.batches.values()))
                for group in groups
            ),
        }
    )


def _difference(one: RunConfig, other: RunConfig) -> str:
    before, after = json.loads(one.model_dump_json()), json.loads(other.model_dump_json())
    changed = [
        f"{name} was {before[name]!r} and is now {after[name]!r}" for name in before if before[name] != after[name]
    ]
    return ", ".join(changed)
