"""The runs of this process: creates, opens, takes over and deletes them, and runs their timers.

Runs are stored in a run store, and continue when the service starts again. A run that cannot be read is set aside, and
the others are served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import structlog

from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.access import caller
from gristmill_service.access.quotas import NO_LIMITS, Limits, Usage
from gristmill_service.config import RunConfig, difference, parse_config, stored_config, warnings_of
from gristmill_service.off_loop import each, every, finished, quietly
from gristmill_service.pipeline import build_batch as build_with_pipeline
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.process_tuning import started_pool
from gristmill_service.run.batch_builder import BuildBatch
from gristmill_service.run.capacity import RowBudget, ShardRoom, check_runs
from gristmill_service.run.dormant_runs import DORMANT_AFTER_S, DormantRuns
from gristmill_service.run.machine.status import stored_counts
from gristmill_service.run.name_locks import NameLocks
from gristmill_service.run.published_batches import whole_or
from gristmill_service.run.recent_tables import RecentTables
from gristmill_service.run.run import Run
from gristmill_service.run.shared import MakeMonitor, Shared
from gristmill_service.run.takeovers import Takeovers
from gristmill_service.storage.memory import MemoryRunStore
from gristmill_service.storage.run_store import CheckNames, OwnedElsewhereError, RunLog, RunStore, any_names
from gristmill_service.storage.shard_store import ShardStore

_log = structlog.get_logger(__name__)

_LONGEST_NAME = 128
_TICK_S = 0.2
_FLUSH_S = 1.0
_PATIENCE_S = 2.0
# The start of the service waits this long for replays.
_START_S = 10.0
_MAX_ROW_BYTES, _MAX_RUNS = 8 << 30, 4096
_BLOCKED = "batches of a run wait for the shard store; the health of that run reports why"
# A large batch, or a store that hangs, blocks one of these threads.
_BUILDERS = 8
# A log whose disk or server hangs blocks one of these threads.
_LOG_THREADS = 8


class Runs:
    """All runs, on the event loop. Owns its threads, but neither the shard store nor the run store.

    make_monitor(clock, now): creates a run's monitor; `now` returns the time on the run's clock.
    max_row_bytes: the limit of the bytes of rows, over all runs. max_runs: the limit of the number of runs.
    limits_of_each: the limits of each run. describe: returns what is reported of a run while it is dormant.
    dormant_after_s: the time without calls after which a run that has ended becomes dormant.
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
        limits_of_each: Limits = NO_LIMITS,
        describe: Callable[[Run], bytes] = lambda run: b"",
        dormant_after_s: float = DORMANT_AFTER_S,
    ) -> None:
        self._shards, self._clock = shard_store, clock
        self._store = run_store or MemoryRunStore()
        self._budget, self._max_runs = RowBudget(max_row_bytes, limits_of_each), max_runs
        self._builders = started_pool(_BUILDERS, "gristmill-build")
        self._log_threads = started_pool(_LOG_THREADS, "gristmill-log")
        self._snapshot_thread = started_pool(1, "gristmill-snapshot")
        self._shared = Shared(
            shard_store,
            ShardRoom(),
            self._budget,
            build_batch,
            make_monitor,
            clock,
            *(self._builders, self._log_threads, self._snapshot_thread),
            asyncio.Lock(),
            RecentTables(),
        )
        self._runs: dict[str, Run] = {}
        self._unreadable: dict[str, Exception] = {}
        # They count as runs, so that calls at the same time do not exceed the limits together.
        self._creating = set[str]()
        # A name's lock is held while its run is created, opened or deleted.
        self._names = NameLocks()
        self._is_closing = False
        self._dormant = DormantRuns(self._store, describe, clock, dormant_after_s)
        self._takeovers, self._damaged = Takeovers(self.get), 0
        self._unswept = set[str]()
        self._store_reason = ""
        self._looking: asyncio.Future[str] | None = None
        self._timers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the runs in the store, except dormant ones, and starts the timers. A run with a long replay is opened
        while the others are served; calls for it wait."""
        if not self._store.is_shared:
            await self._dormant.look()
            for name in {*await asyncio.to_thread(self._store.names)} - self._dormant.names:
                self._unreadable[name] = UnavailableError(f"run {name!r} is being recovered from its store; retry")
            await self._adopt(_START_S)
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.create_task(every(_TICK_S, self.tick)),
            loop.create_task(every(_FLUSH_S, lambda: self._work_on_logs(lambda log: log.sync()))),
            loop.create_task(every(_FLUSH_S, lambda: self._work_on_logs(lambda log: log.flush()))),
            loop.create_task(every(_FLUSH_S, self.look)),
            loop.create_task(every(_FLUSH_S, lambda: quietly(self._adopt))),
            loop.create_task(every(_FLUSH_S, lambda: quietly(self._sweep))),
            loop.create_task(every(_FLUSH_S, self._close_dormant)),
        ]

    async def create(
        self, name: str, config: Mapping[str, Any] | RunConfig, check: CheckNames = any_names
    ) -> tuple[list[str], bool]:
        """Returns warnings about the configuration, and whether this call created the run. check: refuses a new run if
        there are too many others, including those that other calls are creating."""
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise InvalidArgumentError(f"run name {name!r} is invalid; use 1 to {_LONGEST_NAME} printable characters")
        if "/" in name or name in (".", ".."):
            raise InvalidArgumentError(
                f"run name {name!r} cannot be part of a URL's path; use a name without a slash, other than '.' and '..'"
            )
        parsed = config if isinstance(config, RunConfig) else parse_config(config)
        self._check_serving()
        try:
            run = await self.get(name)
        except NotFoundError:
            if await finished(self._create(name, parsed, check)):
                return warnings_of(parsed), True
            run = await self.get(name)
        if run.is_deleted:
            raise UnavailableError(f"run {name!r} is being deleted; retry after it is deleted")
        if parsed not in (run.created_with, run.config):
            raise AlreadyExistsError(
                f"run {name!r} exists with another configuration: {difference(run.created_with, parsed)}; choose "
                "another name"
            )
        return warnings_of(parsed), False

    async def get(self, name: str, *, is_call: bool = True) -> Run:
        """Returns a run. Raises NotFoundError if there is none, OwnedElsewhereError if another process owns it, and
        FailedPreconditionError if it cannot be read.

        is_call: whether the run counts as called, which delays that it becomes dormant.
        """
        run = self._runs.get(name)
        if run is not None and (not run.is_lost or run.is_deleted or self._is_closing):
            if is_call:
                run.called_at = self._clock()
            return run
        if run is None and not self._store.is_shared and name not in self._known():
            raise await self._unknown(name)
        self._check_serving()
        return await finished(self._open(name))

    async def read_shard(self, name: str, batch: int, address: ShardAddress) -> AsyncIterator[bytes]:
        """Returns the shard's file in pieces. Any process that shares the store can read it. Raises like `get` if only
        the run's owner can provide the shard."""
        try:
            run = await self.get(name)
        except OwnedElsewhereError as elsewhere:
            return each(await asyncio.to_thread(whole_or, elsewhere, self._shards.read, name, batch, address))
        return await run.read_shard(batch, address)

    async def read_shard_frames(self, name: str, batch: int, address: ShardAddress) -> AsyncIterator[bytes] | None:
        """Returns the shard's compressed frames like `read_shard`; None if the store has uncompressed files."""
        try:
            run = await self.get(name)
        except OwnedElsewhereError as elsewhere:
            frames = await asyncio.to_thread(whole_or, elsewhere, self._shards.read_frames, name, batch, address)
            return None if frames is None else each(frames)
        return await run.read_shard_frames(batch, address)

    @property
    def store_reason(self) -> str:
        """Why the run store accepts no rows, as of the last `look`; empty if it does."""
        return self._store_reason

    def unhealthy_reason(self) -> str:
        """Returns why batches or calls have to wait for a store, as of the last `look`; empty if none does. Names no
        run, because callers that may not see the run read it, too."""
        return self._store_reason or (_BLOCKED if any(run.blocked_reason for run in self.own()) else "")

    async def is_owner(self, name: str, grpc_address: str) -> bool:
        """Returns whether the process at this address owns the run, as far as this process knows. While it shuts down,
        it takes no run over and cannot know, so it returns False: callers must then try another replica."""
        try:
            await self.get(name)
        except OwnedElsewhereError as elsewhere:
            return elsewhere.grpc_address == grpc_address
        except UnavailableError:
            return not self._is_closing
        except GristmillError:
            return False
        return False

    async def names(self) -> list[str]:
        """Returns the names of all runs, including unreadable and dormant runs, and those of other processes."""
        known = self._known()
        return sorted(known.union(await asyncio.to_thread(self._store.names)) if self._store.is_shared else known)

    def own(self) -> list[Run]:
        """Returns the runs that this process owns."""
        return [run for _, run in sorted(self._runs.items())]

    def dormant(self) -> Collection[str]:
        """Returns the names of the dormant runs; those that other processes closed may be a second old."""
        return self._dormant.names - self._runs.keys()

    async def descriptions(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Returns the descriptions of the dormant runs among these."""
        return await self._dormant.descriptions(name for name in names if name not in self._runs)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """The runs that are set aside because they cannot be read, with the reason."""
        return {name: str(error) for name, error in self._unreadable.items()}

    def usage(self) -> Mapping[str, Usage]:
        """Returns the usage of each run of this process."""
        return self._budget.usage()

    @property
    def row_room(self) -> tuple[int, int]:
        """Returns the bytes of rows that all runs store or have reserved, and the limit."""
        return self._budget.held, self._budget.max_bytes

    def leases(self) -> dict[str, int]:
        """Returns the number of runs that this process owns ("own"), may have lost ("lost"), that other processes own
        ("elsewhere"), that no process owns ("nobody"), and that are dormant. The last three may be a few seconds
        old."""
        owned = self.own()
        lost = sum(run.is_lost for run in owned)
        nobodys = len(self._takeovers.nobodys) + self._damaged
        elsewhere, dormant = len(self._takeovers.elsewhere), len(self.dormant())
        return {"own": len(owned) - lost, "lost": lost, "elsewhere": elsewhere, "nobody": nobodys, "dormant": dormant}

    async def delete(self, name: str) -> None:
        """Deletes a run, even an unreadable or dormant one. Returns when everything is removed and the name can be used
        again. Continues if the caller disconnects."""
        await finished(self._delete(name))

    async def _delete(self, name: str) -> None:
        if await self._delete_closed(name):
            return
        meant = await self.get(name)
        async with self._names.locked(name):
            # The run may have been reopened in the meantime; another run of the same name must not be deleted.
            run = self._runs.get(name)
            if run is None or run.run_id != meant.run_id:
                raise await self._unknown(name)
            await run.close(NotFoundError(f"run {name!r} was deleted"))
            # Pending writes and removals of this run must not affect a new run of the name.
            run.abandon_build()
            await run.wait_idle()
            try:
                await asyncio.to_thread(self._store.delete, name)
                await asyncio.to_thread(self._shards.delete_run, name)
            except (GristmillError, OSError) as error:
                # The next call for the run opens it again, in this process or another.
                self._set_aside(name, error, "run not deleted")
                raise
            finally:
                await run.close_log()
                self._runs.pop(name, None)
                self._shared.tables.forget(run.run_id)
                self._shared.room.removed()

    async def close(self, timeout_s: float) -> None:
        """Refuses new calls, finishes sealed batches, and wakes waiting callers. The stores stay open."""
        if self._is_closing:
            return
        self._is_closing = True
        for timer in self._timers:
            timer.cancel()
        await asyncio.gather(*self._timers, self._takeovers.close(), return_exceptions=True)
        runs = list(self._runs.values())
        for run in runs:
            await run.close(_shutting_down())
        idle = [asyncio.ensure_future(run.wait_idle()) for run in runs]
        if idle:
            await asyncio.wait(idle, timeout=timeout_s)
        for waiting in idle:
            waiting.cancel()
        for run in runs:
            run.abandon_build()
            # Waits until the last batches are recorded.
            await run.close(_shutting_down())
            await run.close_log()
        self._builders.shutdown(wait=False, cancel_futures=True)
        self._log_threads.shutdown(wait=False)
        self._snapshot_thread.shutdown(wait=False)

    # --- Opening and closing one run. A name's lock is held.

    async def _create(self, name: str, config: RunConfig, check: CheckNames) -> bool:
        """Creates the run. Returns False if another call or process has created it first."""
        check_names = partial(check_runs, self._max_runs, check)
        async with self._names.locked(name):
            if name in self._runs:
                return False
            check_names({*self._known(), *self._creating})
            self._creating.add(name)
            try:
                stored = config.model_dump_json().encode()
                log = await asyncio.to_thread(self._store.create, name, stored, check_names)
                await self._start(name, log)
            except AlreadyExistsError:
                return False
            finally:
                self._creating.remove(name)
            return True

    async def _open(self, name: str) -> Run:
        """Opens the run from its log. Raises like `get`."""
        self._check_store()
        async with self._names.locked(name):
            # Callers that waited for a failed attempt get its error instead of repeating it.
            self._check_store()
            run = self._runs.get(name)
            if run is not None:
                if run.is_deleted or not run.is_lost:
                    return run
                await self._close_lost(name, run)
                # Another process may have owned it meanwhile, and published its batches again.
                self._shared.tables.forget(run.run_id)
            began = self._clock()
            try:
                run = await self._start(name, await asyncio.to_thread(self._store.open, name))
            except NotFoundError:
                self._runs.pop(name, None)
                self._unreadable.pop(name, None)
                raise await self._unknown(name) from None
            except UnavailableError as error:
                if not self._store.is_shared:
                    # Without this entry, the run would be reported as unknown.
                    self._set_aside(name, error, "run not recovered")
                self._runs.pop(name, None)
                raise
            except (GristmillError, OSError) as error:
                self._set_aside(name, error, "run cannot be read")
                self._runs.pop(name, None)
                raise FailedPreconditionError(
                    f"run {name!r} cannot be read: {error}; restore its data in the store, or delete the run"
                ) from error
            finally:
                # Only now, so that it is known to other calls and counts as a run meanwhile.
                self._dormant.names.discard(name)
            stored = run.read(lambda state, _: stored_counts(state))
            _log.info("run restored", run=name, **stored, seconds=round(self._clock() - began, 3))
            self._unswept.add(name)
            return run

    async def _close_lost(self, name: str, run: Run) -> None:
        """Closes a run whose lease was lost. It could regain the lease, and must not act alongside the instance that is
        opened now."""
        run.lose()
        await run.close(UnavailableError(f"run {name!r} is being recovered from its store; retry"))
        run.abandon_build()
        await run.wait_idle()
        # The run stays registered until it is replaced, so that calls for it wait for the lock.
        await run.close_log()

    async def _close_dormant(self) -> None:
        """Closes the runs that have ended and were not called for a while."""
        for run in filter(self._dormant.is_due, self.own()):
            async with self._names.locked(run.name):
                if self._runs.get(run.name) is not run or not self._dormant.is_due(run) or self._is_closing:
                    continue
                # Calls wait for the lock from now on, and then open the run again.
                run.lose()
                try:
                    await self._dormant.mark(run)
                except (GristmillError, OSError) as error:
                    _log.warning("run not closed; it is opened again", run=run.name, reason=str(error))
                    continue
                await self._close_lost(run.name, run)
                del self._runs[run.name]
                _log.info("dormant run closed", run=run.name)

    async def _start(self, name: str, log: RunLog) -> Run:
        try:
            run = await Run.open(name, stored_config(log.config), log, self._shared)
            # A shutdown that began in the meantime would not close this run.
            self._check_serving()
        except BaseException:
            await asyncio.to_thread(log.close)
            self._budget.forget(name)
            raise
        self._runs[name] = run
        self._unreadable.pop(name, None)
        return run

    def _set_aside(self, name: str, error: Exception, event: str) -> None:
        before = self._unreadable.get(name)
        # A copy has no traceback, which would keep stack frames alive.
        self._unreadable[name] = copy(error)
        if str(before) != str(error):
            # The service retries by itself if the store is unavailable.
            (_log.warning if isinstance(error, UnavailableError) else _log.error)(event, run=name, reason=str(error))

    async def _delete_closed(self, name: str) -> bool:
        """Deletes the run if it is set aside or dormant. Returns whether it was."""
        async with self._names.locked(name):
            # If the run is readable again, was opened, or was created again, it may be in use.
            if name not in self._unreadable and not await self.descriptions([name]):
                return False
            await asyncio.to_thread(self._store.delete, name)
            await asyncio.to_thread(self._shards.delete_run, name)
            self._unreadable.pop(name, None)
            self._dormant.names.discard(name)
            return True

    # --- Time

    async def tick(self) -> None:
        for run in self.own():
            with suppress(UnavailableError, NotFoundError):
                run.tick()

    async def _work_on_logs(self, work: Callable[[RunLog], None]) -> None:
        await asyncio.gather(*(quietly(partial(run.work_on_log, work)) for run in self.own()))

    async def look(self) -> None:
        """Checks the run store's health, which also shows whether there is capacity again. Concurrent callers share the
        result; without a result within 2 s, the store counts as unhealthy."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._store.unhealthy_reason))
        # Another caller may start a new check before this one continues.
        looking = self._looking
        await asyncio.wait([looking], timeout=_PATIENCE_S)
        silent = f"the run store has not answered for {_PATIENCE_S:g} s"
        self._store_reason = looking.result() if looking.done() else silent

    async def _adopt(self, timeout_s: float = _FLUSH_S) -> None:
        """Takes over runs that no process owns any more, and reopens lost ones."""
        wanted, self._damaged = list[str](), 0
        if self._store.is_shared:
            await self._dormant.look()
        for name in await self.names():
            run = self._runs.get(name)
            if not isinstance(self._unreadable.get(name), UnavailableError | None):
                # An unreadable run is opened only when a call needs it, because opening may take long and rarely helps.
                self._damaged += 1
            elif name not in self._dormant.names if run is None else run.is_lost and not self._names.is_locked(name):
                wanted.append(name)
        await self._takeovers.look(wanted, timeout_s)

    async def _sweep(self) -> None:
        """Removes the leftovers of the runs that were opened since the last time, of all at once."""
        names, self._unswept = self._unswept, set()
        if names:
            await asyncio.to_thread(self._shards.sweep, names)

    # --- Checks

    def _known(self) -> set[str]:
        """Returns the names of the runs that this process knows without reading the store."""
        return {*self._runs, *self._unreadable, *self._dormant.names}

    async def _unknown(self, name: str) -> NotFoundError:
        known = ", ".join([one for one in await self.names() if caller.current().sees(one)][:10]) or "none"
        return NotFoundError(f"run {name!r} does not exist; create it first, or use an existing run: {known}")

    def _check_store(self) -> None:
        if reason := self._store.unreachable_reason():
            raise UnavailableError(reason)

    def _check_serving(self) -> None:
        if self._is_closing:
            raise _shutting_down()


def _shutting_down() -> UnavailableError:
    return UnavailableError("the service is shutting down; retry after it has restarted")
