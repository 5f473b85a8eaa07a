"""Append the events of one run to its log, in order. Events added during an append share the next append."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from gristmill._wire.steps import Steps
from gristmill.errors import UnavailableError
from gristmill_service.run.compaction import Compaction
from gristmill_service.run.machine.codec import EncodedEvent, record_of
from gristmill_service.storage.row_tables import nbytes
from gristmill_service.storage.run_store import RunLog


class Commits:
    """The appends of one run. Used on the event loop; `threads` call the log, one call at a time.

    on_lost: called once, if an append failed. The state is then ahead of the log, and the run has to be reopened.
    """

    def __init__(self, log: RunLog, threads: Executor, on_lost: Callable[[], None]) -> None:
        self._log, self._threads, self._on_lost = log, threads, on_lost
        self._events: list[EncodedEvent] = []
        self._tables: dict[int, Steps] = {}
        self._compaction: Compaction | None = None
        self._added = self._safe = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_appending = False
        self._error: Exception | None = None
        self._appending: Mapping[int, Steps] = {}

    @property
    def row_bytes(self) -> int:
        """About how many bytes the tables take that are queued or being appended."""
        return sum(map(nbytes, self._tables.values())) + sum(map(nbytes, self._appending.values()))

    def add(self, events: Sequence[EncodedEvent], tables: Mapping[int, Steps]) -> None:
        """Queues events, with the tables of rows that they refer to, for the next append."""
        if not self._log.reads_rows:
            # A run in memory has no log to append to.
            return
        self._events += events
        self._tables |= tables
        self._added += 1
        if not self._is_appending and self._error is None:
            self._is_appending = True
            # Deferred, so that commands of the same loop iteration share the append.
            asyncio.get_running_loop().call_soon(self._begin)

    def compact(self, compaction: Compaction) -> None:
        """Starts a compaction with the next append."""
        self._compaction = compaction
        self.add((), {})

    async def safe(self) -> None:
        """Returns when everything added so far is as durable as the settings require. Raises UnavailableError if that
        failed; the run is then reopened, with or without those events."""
        if self._error is not None:
            raise _lost(self._error)
        if self._safe == self._added:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((self._added, future))
        await future

    async def close(self) -> None:
        """Returns when no append is running."""
        while self._is_appending:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((self._added, future))
            await asyncio.wait([future])

    def _begin(self) -> None:
        events, tables, compaction, number = self._events, self._tables, self._compaction, self._added
        self._events, self._tables, self._compaction, self._appending = [], {}, None, tables
        if compaction is not None:
            # The snapshot must contain exactly these events, so take it before more are added.
            compaction.take()
        loop = asyncio.get_running_loop()
        try:
            appending = loop.run_in_executor(self._threads, self._append, events, tables)
        except Exception as error:  # noqa: BLE001 - a defect, and nobody may wait for ever
            self._end(number, error, None)
            return
        appending.add_done_callback(lambda done: self._end(number, done.exception(), compaction))

    def _append(self, events: Sequence[EncodedEvent], tables: Mapping[int, Steps]) -> None:
        if events:
            self._log.append(record_of(events), tables)

    def _end(self, number: int, error: BaseException | None, compaction: Compaction | None) -> None:
        self._is_appending, self._appending = False, {}
        if error is not None:
            self._error = error if isinstance(error, Exception) else UnavailableError(repr(error))
            while self._waiting:
                future = self._waiting.popleft()[1]
                if not future.done():
                    future.set_exception(_lost(self._error))
                    # Marks the exception as retrieved, because asyncio logs it otherwise if the caller is gone.
                    future.exception()
            self._on_lost()
            return
        self._safe = number
        if compaction is not None:
            compaction.write()
        while self._waiting and self._waiting[0][0] <= number:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_result(None)
        if number < self._added:
            self._is_appending = True
            self._begin()


def _lost(error: Exception) -> UnavailableError:
    # A new error for each caller: a shared one would collect the stack frames of all of them.
    return UnavailableError(f"{error}; the run is being recovered from its store, so retry")
