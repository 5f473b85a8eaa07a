"""Replace the records of a run's log by a snapshot of its state, while more are appended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

import structlog

from gristmill.errors import GristmillError, UnavailableError
from gristmill_service.storage.run_store import LogLostError, RunLog

_log = structlog.get_logger(__name__)

# The pause after a snapshot, which doubles with each that fails in a row.
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0


class Compaction:
    """The snapshots of one run, one at a time. Used on the event loop; `thread` writes them.

    snapshot: returns the pieces of a snapshot of the state as it is now; None if the state is unusable. on_lost: called
    if the log was lost meanwhile. failed: why the last snapshot was not written; empty if it was.
    """

    def __init__(
        self,
        log: RunLog,
        thread: Executor,
        clock: Callable[[], float],
        snapshot: Callable[[], Iterator[bytes] | None],
        on_lost: Callable[[], None],
    ) -> None:
        self.failed = ""
        self._log, self._thread, self._clock, self._snapshot, self._on_lost = log, thread, clock, snapshot, on_lost
        self._pieces: Iterator[bytes] | None = None
        self._job: Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_closed = False
        self._after, self._pause = 0.0, _PAUSE_S

    @property
    def is_due(self) -> bool:
        return self._log.is_long and self._writing is None and self._clock() >= self._after

    def take(self) -> None:
        """Takes a snapshot of the state, if one is due."""
        try:
            self._pieces = self._snapshot() if self.is_due else None
        except Exception as error:  # noqa: BLE001 - a defect, after which the log is as good as before
            self._failed(error)

    def write(self) -> None:
        """Starts to write the snapshot that was taken, if any. Call it when the events that it includes are in the log,
        before more are appended."""
        pieces, self._pieces = self._pieces, None
        if pieces is None or self._is_closed:
            return
        self._job = self._thread.submit(self._log.compact, self._log.end, self._until_closed(pieces))
        self._writing = asyncio.wrap_future(self._job)
        self._writing.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stops. Returns when nothing is being written."""
        self._is_closed = True
        if self._job is not None and self._writing is not None and not self._job.cancel():
            await asyncio.wait([self._writing])

    def _until_closed(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self._is_closed:
                raise UnavailableError("the run is being closed")
            yield piece

    def _ended(self, done: asyncio.Future[None]) -> None:
        self._writing = None
        if self._is_closed:
            if not done.cancelled():
                # Marks the exception as retrieved.
                done.exception()
        elif isinstance(error := done.exception(), Exception):
            self._failed(error)
        else:
            self.failed, self._pause = "", _PAUSE_S
            self._after = self._clock() + self._pause

    def _failed(self, error: Exception) -> None:
        """Notes a snapshot that was not written. The log is long, and otherwise as good as before."""
        if isinstance(error, LogLostError):
            self._on_lost()
            return
        is_defect = not isinstance(error, GristmillError)
        _log.warning("log not compacted", run_id=self._log.run_id, reason=str(error), exc_info=is_defect and error)
        self.failed = repr(error) if is_defect else str(error)
        self._after, self._pause = self._clock() + self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
