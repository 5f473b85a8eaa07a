"""One run's directory in the journal: its log of events, its rows, and how safe they are."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import UnavailableError
from gristmill_service.call_threads import waiting
from gristmill_service.storage.errors import FullError, LogLostError
from gristmill_service.storage.journal.boot_mark import BootMark
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.event_log import EventLog
from gristmill_service.storage.journal.open_file import closed_error
from gristmill_service.storage.journal.row_segments import RowSegments, Segment
from gristmill_service.storage.journal.run_description import RunDescription
from gristmill_service.storage.journal.spare_segments import SpareSegments
from gristmill_service.storage.row_tables import Stored
from gristmill_service.storage.run_store import CheckTable, Replay

_log = structlog.get_logger(__name__)

Fsync = Literal["always", "interval", "never"]


class JournalRunLog:
    """See `gristmill_service.storage.run_store.RunLog`."""

    maps_rows = reads_rows = True
    lease: float | None = None

    def __init__(
        self, directory: Path, description: RunDescription, fsync: Fsync, room: DiskRoom, spares: SpareSegments
    ) -> None:
        """Raises InvalidArgumentError and UnavailableError where it cannot be opened."""
        self.config, self.run_id = description.config, description.run_id
        self._directory, self._fsync, self._room, self._spares = directory, fsync, room, spares
        self._mark, self._rows = BootMark(directory), RowSegments(directory, spares)
        self._events = EventLog(directory)
        # Held while the log is synced, compacted or closed.
        self._syncing = threading.Lock()
        # Records since the log was opened: `_appended` is written by the thread that appends. Those that were found may
        # not be on the disk: the process before may have been killed before it synced them.
        self._appended, self._synced = 0, -1
        self._is_broken = self._is_closed = False

    @property
    def is_lost(self) -> bool:
        return self._is_broken

    def replay(self) -> Replay:
        found = self._events.replay()
        is_short = found.is_short() or self._mark.is_of_another_boot
        return found._replace(is_short=lambda: is_short)

    def note_generation(self, generation: int) -> None:
        """What was promised is not known outside of the log."""

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        self._check()
        try:
            self._append_in_any_room(record)
        except FullError as error:
            self._room.set_full(str(error))
            raise
        self._appended += 1

    def _append_in_any_room(self, record: bytes) -> None:
        for make_room in (self._spares.give_back, self._room.give_up_reserve):
            try:
                self._append(record)
                return
            except FullError:
                make_room()
        self._append(record)

    def _append(self, record: bytes) -> None:
        if self._fsync != "always" and not self._is_mark_needed:
            self._mark.set()
        self._events.append(record)

    def sync(self) -> None:
        """Several callers share one sync: whoever comes while one is under way waits for the next."""
        if self._fsync == "always":
            self._sync_up_to(self._appended)

    def flush(self) -> None:
        if self._is_closed:
            return
        if self._fsync == "interval":
            self._sync_up_to(self._appended)
        self._rows.give_back_former()

    def _sync_up_to(self, wanted: int) -> None:
        if self._synced >= wanted:
            return
        with waiting(), self._syncing:
            if self._synced >= wanted:
                return
            appended = self._appended
            try:
                self._rows.sync()
                self._events.sync()
            except UnavailableError:
                raise
            except OSError as error:
                # The kernel may have dropped what it could not write, and will not say so again.
                self._is_broken = True
                raise LogLostError(f"the journal cannot be synced: {self._directory}: {error.strerror}") from None
            self._synced = appended
            if self._fsync == "always":
                self._clear_mark()

    @property
    def log_bytes(self) -> int:
        return self._events.size

    @property
    def is_long(self) -> bool:
        return self._events.is_long

    def compact(self, snapshot: bytes) -> None:
        self._check()
        with self._syncing:
            try:
                self._events.compact(snapshot)
            except LogLostError:
                self._is_broken = True
                raise

    def put(self, table: Steps) -> tuple[int, Stored]:
        self._check()
        self._room.check()
        try:
            return self._put(table)
        except FullError as error:
            self._room.set_full(str(error))
            raise

    def _put(self, table: Steps) -> tuple[int, Stored]:
        try:
            return self._rows.put(table)
        except FullError:
            self._spares.give_back()
            return self._rows.put(table)

    def get(self, number: int) -> Stored:
        return self._rows.get(number)

    def get_all(self, numbers: Collection[int]) -> dict[int, Stored]:
        return {number: self._rows.get(number) for number in numbers}

    def remove(self, numbers: Collection[int]) -> None:
        self._rows.remove(numbers)

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        return self._rows.retain(numbers, check)

    def close(self) -> None:
        """Syncs, so that a machine that goes down later leaves no doubt. A second call does nothing."""
        with self._syncing:
            if self._is_closed:
                return
            try:
                self._sync_at_close()
            except OSError as error:
                _log.warning("journal closed unsynced", directory=str(self._directory), reason=str(error))
            self._close_files()

    def abandon(self) -> list[Segment]:
        """Closes the files of a run that is deleted: nothing of it has to be safe. Returns those with its rows."""
        with self._syncing:
            return self._close_files()

    def _sync_at_close(self) -> None:
        if self._is_broken:
            return
        if self._fsync != "never":
            self._rows.sync()
        self._events.sync()
        self._clear_mark()

    @property
    def _is_mark_needed(self) -> bool:
        """The mark of another boot stays until a record after it has noted that the log may be short."""
        return not self._appended and self._mark.is_of_another_boot

    def _clear_mark(self) -> None:
        if not self._is_mark_needed:
            self._mark.clear()

    def _close_files(self) -> list[Segment]:
        self._is_closed = True
        self._events.close()
        return self._rows.close()

    def _check(self) -> None:
        if self._is_closed:
            raise closed_error(self._directory)
        if self._is_broken:
            raise LogLostError(f"the journal {self._directory} is being read again; ask again")
