"""Background tasks of one run: building batches, and removing shards and rows that are no longer needed.

They read the state, and never delay the call that caused them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import structlog

from gristmill.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_service import tracing
from gristmill_service.run.batch_builder import BatchBuilder
from gristmill_service.run.capacity import ShardRoom
from gristmill_service.run.machine.status import explained
from gristmill_service.run.recovery import losses
from gristmill_service.run.rows.checked_tables import CHECKED_AT_ONCE
from gristmill_service.run.rows.row_buffer import compacted
from gristmill_service.run.writer import Effects, SparseTable, Writer
from gristmill_service.storage.row_tables import steps_of, to_stored
from gristmill_service.storage.run_store import RunLog
from gristmill_service.storage.shard_store import ShardStore

_log = structlog.get_logger(__name__)

_RETRY_S = 1.0
_logs = logging.getLogger(__name__).isEnabledFor
# A line with the groups of a large batch has many kilobytes; lines of submissions, at debug, are matched with it.
_NAMED_GROUPS = 8


class Background:
    """The background tasks of one run."""

    def __init__(
        self,
        name: str,
        writer: Writer,
        builder: BatchBuilder,
        log: RunLog,
        store: ShardStore,
        room: ShardRoom,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._writer, self._builder, self._log, self._store = name, writer, builder, log, store
        self._room, self._clock = room, clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._building: asyncio.Task[None] | None = None
        # Tables that the next batch waits for.
        self._unsealed: Sequence[int] = ()
        self._checking: asyncio.Task[None] | None = None
        self._builds_again = False
        # Freed batches whose shards remain to be removed, one after the other.
        self._freed: list[int] = []
        self._freeing: asyncio.Task[None] | None = None
        self._merging: asyncio.Task[None] | None = None
        self._free_after = 0.0

    def perform(self, effects: Effects) -> None:
        """Starts the tasks that these effects require."""
        for sealed in effects.sealed:
            tracing.sealed(self._name, sealed.batch)
            groups = [str(key) for key in sealed.groups[: None if _logs(logging.DEBUG) else _NAMED_GROUPS]]
            _log.info("batch sealed", run=self._name, batch=sealed.batch, prompts=len(sealed.groups), groups=groups)
        for failed in effects.failed:
            why, remedy = explained(failed.reason, is_kept=failed.keeps_rows)
            _log.error("batch failed", run=self._name, batch=failed.batch, reason=why, remedy=remedy)
        if effects.unchecked:
            self._unsealed = effects.unchecked
            self._check_unsealed()
        if effects.builds:
            self._build()
        if effects.freed:
            self._freed += effects.freed
            self._free_after = 0.0
            self._free()
        if effects.empty:
            self._start(self._remove(effects.empty))
        for table in effects.sparse:
            self._start(self._compact(table))

    def try_again(self) -> None:
        """Retries tasks that failed before."""
        if self._builder.blocked_reason and self._clock() >= self._builder.retry_at:
            self._build()
        self._free()
        self._check_unsealed()
        self._merge_archive()

    @property
    def is_idle(self) -> bool:
        """Whether no task is running, or remains to be done again."""
        return not (self._tasks or self._freed or self._unsealed)

    async def idle(self) -> None:
        """Returns when no task is running. Call it after the run is closed, when no new task can start."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            # Nothing is removed or built before the event that caused it is durable.
            with suppress(UnavailableError):
                await self._writer.commits.safe()
                await work
        except Exception as error:  # noqa: BLE001 - a defect of one task is no reason to end the others
            # Whatever a task asks of a run that was deleted in the meantime raises NotFoundError.
            if not (self._writer.is_deleted and isinstance(error, NotFoundError)):
                _log.exception("task failed", run=self._name)
        finally:
            work.close()

    # --- Checking tables from before the run was opened

    def look_through(self, looking: asyncio.Lock) -> None:
        """Checks the tables of open groups in the background, and of failed batches whose rows are kept; those of other
        batches are checked when they are built. looking: shared by the runs of a process, so that they use at most half
        of one thread's time together."""
        state = self._writer.state
        kept = (group for number in state.batches_kept for group in state.batches[number].groups)
        if numbers := self._writer.tables.unchecked((*state.open.values(), *kept)):
            self._start(self._look_through(numbers, looking))

    async def check_complete(self) -> None:
        """Checks the tables of complete groups, so that they can be sealed. Raises UnavailableError."""
        state = self._writer.state
        while numbers := self._writer.tables.unchecked(state.open[key] for key in state.complete):
            await self._check(numbers)

    async def _look_through(self, numbers: Sequence[int], looking: asyncio.Lock) -> None:
        checked = 0
        while checked < len(numbers):
            async with looking:
                self._writer.check_open()
                began = self._clock()
                with suppress(UnavailableError):
                    await self._check(numbers[checked : checked + CHECKED_AT_ONCE])
                    checked += CHECKED_AT_ONCE
                    await asyncio.sleep(self._clock() - began)
                    continue
            await asyncio.sleep(_RETRY_S)

    def _check_unsealed(self) -> None:
        if self._unsealed and (self._checking is None or self._checking.done()):
            self._checking = self._start(self._check_all_unsealed())

    async def _check_all_unsealed(self) -> None:
        while self._unsealed:
            await self._check(self._unsealed)

    async def _check(self, numbers: Sequence[int]) -> None:
        """Checks these tables, drops groups whose rows are lost, and seals what waited for the check."""
        lost = await asyncio.to_thread(self._writer.tables.lost, numbers)
        if not lost and not self._unsealed:
            return
        unsealed, self._unsealed = self._unsealed, ()
        try:
            self._writer.go_on(losses(self._writer.state, lost))
        except UnavailableError:
            # `try_again` checks them again, and those that are lost.
            self._unsealed = [*unsealed, *lost]
            raise

    # --- Building

    def _build(self) -> None:
        if self._building is not None and not self._building.done():
            self._builds_again = True
            return
        self._building = self._start(self._build_all())

    async def _build_all(self) -> None:
        self._builds_again = True
        while self._builds_again:
            self._builds_again = False
            # Batches of other runs may wait for a builder thread before this one.
            if await self._builder.build(self._build):
                self._builds_again = True

    # --- Removing

    def _free(self) -> None:
        if not self._freed or self._clock() < self._free_after:
            return
        if self._freeing is None or self._freeing.done():
            self._freeing = self._start(self._free_all())

    async def _free_all(self) -> None:
        failed: list[int] = []
        while self._freed and not self._writer.is_deleted:
            batch = self._freed.pop(0)
            # This batch may have been freed by a later event than the one that started the task.
            await self._writer.commits.safe()
            try:
                await asyncio.to_thread(self._store.free, self._name, batch)
            except (GristmillError, OSError) as error:
                # The call that freed the batch has succeeded, so the error is only logged.
                failed.append(batch)
                _log.warning("shards not removed; retrying later", run=self._name, batch=batch, reason=str(error))
        self._freed += failed
        self._free_after = self._clock() + 1.0 if failed else 0.0
        self._room.removed()

    async def _remove(self, tables: Sequence[int]) -> None:
        if not self._writer.is_lost:
            self._writer.tables.forget(tables)
            await asyncio.to_thread(self._log.remove, tables)

    async def _compact(self, table: SparseTable) -> None:
        """Copies the needed rows of a table most of whose rows are not needed, so that the table can be released."""

        def copy() -> tuple[Any, dict[int, int]]:
            steps, index = compacted(steps_of(table.stored), table.live)
            return to_stored(steps), index

        stored, index = await asyncio.to_thread(copy)
        self._writer.rows.replace(table.number, table.stored, stored, index)

    # --- Merging what is known of archived groups

    def _merge_archive(self) -> None:
        if self._writer.state.closed.archive.large_pair() and (self._merging is None or self._merging.done()):
            self._merging = self._start(self._merge_segments())

    async def _merge_segments(self) -> None:
        archive = self._writer.state.closed.archive
        while (pair := archive.large_pair()) is not None and not self._writer.is_lost:
            archive.replace(pair, await asyncio.to_thread(pair[0].merged, pair[1]))
