"""One run's log and tables of rows in a SQLite database, and their durability.

Nothing is removed before the event that allows it is on disk. A WAL preserves the order of transactions: after a power
loss it contains a prefix of them, and a table is deleted in a later transaction than its event. Checkpoints preserve
that order, too: with `synchronous` NORMAL or FULL, SQLite syncs the WAL before it copies pages from it to the database,
and syncs the database before it restarts the WAL. Therefore `fsync: never` uses NORMAL, not OFF: the kernel decides
when to write the last seconds, but checkpoints are synced.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.database import PAGE_BYTES, Description, Entry, explained, transaction
from gristmill_service.storage.journal.disk_room import DiskRoom, full_error
from gristmill_service.storage.run_store import FullError, LogLostError, Replay

_log = structlog.get_logger(__name__)

Fsync = Literal["always", "interval", "never"]

# A shorter log is not replaced by a snapshot.
_LEAST_LENGTH = 16 << 20
# The approximate number of pages that a transaction writes to the WAL in addition to its rows.
_PAGES_EACH = 3
# The WAL of an idle run is truncated if its file is longer.
_SHORT_WAL = 1 << 20
# Appends wait for the last pass of a checkpoint, which copies the pages added during the previous pass.
_LAST_PASS_BYTES, _MAX_PASSES = 8 << 20, 4
_DELETED_AT_ONCE = 16


class JournalRunLog:
    """Implements `gristmill_service.storage.run_store.RunLog`. Any thread may call any method: `flush` syncs, and
    copies the WAL to the database, while other threads append and read."""

    reads_rows, is_remote = True, False
    lease: float | None = None

    def __init__(self, directory: Path, run: Description, fsync: Fsync, room: DiskRoom) -> None:
        """Raises InvalidArgumentError or UnavailableError if the database cannot be opened."""
        self.config, self.run_id = run.config, run.run_id
        self._directory, self._path = directory, directory / database.FILE_NAME
        self._wal = directory / database.WAL_NAME
        self._is_short, self._fsync, self._room = run.is_short, fsync, room
        # Acquire locks in this order. `_writing` and `_reading` guard the use and the closing of their connections.
        self._flushing, self._writing, self._reading = threading.Lock(), _FairLock(), _FairLock()
        with explained(self._path), ExitStack() as opened:
            synchronous: Literal["FULL", "NORMAL"] = "FULL" if fsync == "always" else "NORMAL"
            self._writer = opened.enter_context(closing(database.connect(self._path, synchronous)))
            self._reader = opened.enter_context(closing(database.connect(self._path, synchronous)))
            # Records of a killed process may be only in the kernel's cache.
            database.sync_file(self._wal)
            self._wal_bytes, self._least_bytes = self._wal.stat().st_size, 0
            self._measure()
            # Damaged text may contain any bytes.
            self._reader.text_factory = bytes
            self._connections = opened.pop_all()
        self.is_lost = self.is_closed = False
        # first_number: the lowest number that no table had. _number: the number of the last event.
        self._number = self.first_number = self._snapshot_bytes = self.log_bytes = 0
        # Transactions since the log was opened: all, those on disk, and those at the last `flush`.
        self._commits = self._synced = self._flushed = 0
        self._boot = None if fsync == "always" else database.this_boot()
        self._is_boot_noted = run.boot == self._boot
        self._removed: set[int] = set()

    @property
    def is_long(self) -> bool:
        return self.log_bytes - self._snapshot_bytes > max(_LEAST_LENGTH, 2 * self._snapshot_bytes)

    def check(self, has_rows: bool = True, row_bytes: int = 0) -> None:
        self._room.check_record()
        if has_rows:
            self._room.check(self.reusable)
        if row_bytes:
            self._room.check_for(row_bytes, self.reusable)

    def replay(self) -> Replay:
        with self._reading, explained(self._path):
            self._check_open()
            snapshots = self._entries("SELECT number, next_table, checksum, state FROM snapshot")
            events = self._entries("SELECT number, next_table, checksum, record FROM events ORDER BY number")
        entries = [*snapshots, *events]
        if broken := [entry.number for entry in entries if not entry.is_whole]:
            raise database.damaged(self._path, f"the checksum of record {broken[0]} does not match")
        before = snapshots[-1].number if snapshots else 0
        self._number = before + len(events)
        if [event.number for event in events] != [*range(before + 1, self._number + 1)]:
            raise database.damaged(self._path, f"records after {before} are missing")
        self.first_number = max((entry.next_table for entry in entries), default=0)
        self._snapshot_bytes = sum(len(snapshot.record) for snapshot in snapshots)
        self.log_bytes = sum(len(entry.record) for entry in entries)
        snapshot = snapshots[-1].record if snapshots else None
        return Replay(snapshot, [event.record for event in events], lambda: self._is_short)

    def note_generation(self, generation: int) -> None:
        """Does nothing, because confirmations are only in the log."""

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        encoded = {number: row_tables.encode(table) for number, table in tables.items()}
        nbytes, first_number = sum(table.size for table in encoded.values()), max(encoded, default=-1) + 1
        with self._writing:
            self._check_open()
            if tables:
                self._room.measure()
                self._room.check_for(nbytes, self.reusable)
            event = Entry.of(self._number + 1, max(self.first_number, first_number), record)

            def write() -> None:
                for number, table in encoded.items():
                    self._insert(number, table.buffers, table.size)
                self._writer.execute("INSERT INTO events VALUES (?, ?, ?, ?)", event)
                if not self._is_boot_noted:
                    self._writer.execute("UPDATE run SET boot = ?", [self._boot])

            self._commit(write, nbytes + len(record), has_rows=bool(tables))
            self._number, self.first_number = event.number, event.next_table
            self.log_bytes += len(record)
            if not self._is_boot_noted:
                # Synced before the first record is confirmed that may be lost.
                self._sync()
                self._is_boot_noted = True

    def compact(self, snapshot: bytes) -> None:
        with self._writing:
            self._check_open()
            entry = Entry.of(self._number, self.first_number, snapshot)

            def write() -> None:
                self._writer.execute("DELETE FROM snapshot")
                self._writer.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?)", entry)
                self._writer.execute("DELETE FROM events")

            self._commit(write, len(snapshot))
            self._snapshot_bytes = self.log_bytes = len(snapshot)

    def sync(self) -> None:
        """Syncs appends with `fsync: interval`. Takes no lock, so that a long checkpoint does not delay it: pages that
        leave the WAL are synced in the database."""
        if self._fsync == "interval" and self._synced < self._commits and not (self.is_closed or self.is_lost):
            self._sync()

    def flush(self) -> None:
        """Syncs appends with `fsync: interval`, deletes removed tables, and checkpoints the WAL if it is long, or if
        the run is idle."""
        with self._flushing:
            if self.is_closed or self.is_lost:
                return
            self.sync()
            self._delete_removed()
            is_at_rest, self._flushed = self._flushed == self._commits, self._commits
            with explained(self._path):
                size = self._wal.stat().st_size
            if size > (_SHORT_WAL if is_at_rest else max(_SHORT_WAL, self._room.wal_file_limit)):
                self._checkpoint("TRUNCATE")
            elif self._wal_bytes > self._room.wal_limit:
                # Reusing the file is faster than freeing its pages and allocating new ones.
                self._checkpoint("RESTART")

    def get(self, number: int) -> bytes:
        with self._reading:
            self._check_open()
            try:
                if number not in self._removed and self._is_stored(number):
                    rows = self._read(number)
                    self._checked_size()
                    if rows is not None:
                        return rows
            except (sqlite3.Error, OSError) as error:
                raise self._lost(error) from None
        raise NotFoundError(
            f"table {number} of rows is missing or damaged in {self._directory}; restore it, or delete the run"
        )

    def get_all(self, numbers: Collection[int]) -> dict[int, bytes]:
        return {number: self.get(number) for number in numbers}

    def remove(self, numbers: Collection[int]) -> None:
        """Marks tables as removed. The next `flush` deletes them."""
        self._removed.update(numbers)

    def retain(self, numbers: Collection[int]) -> set[int]:
        with self._reading, explained(self._path):
            self._check_open()
            stored = {number for [number] in self._reader.execute("SELECT number FROM tables")}
        self.first_number = max(self.first_number, max(stored, default=-1) + 1)
        self.remove(stored.difference(numbers))
        self._delete_removed()
        return {*numbers} - stored

    def close(self) -> None:
        """Syncs, so that a later power loss loses nothing. A second call does nothing."""
        with self._flushing, self._writing, self._reading:
            if self._is_boot_noted and self._boot is not None and not self.is_closed and not self.is_lost:
                try:
                    with transaction(self._writer):
                        self._writer.execute("UPDATE run SET boot = NULL")
                except sqlite3.Error as error:
                    _log.warning("journal closed unsynced", directory=str(self._directory), reason=str(error))
            self.is_closed = True
            # SQLite syncs, checkpoints and deletes the WAL when the last connection closes.
            self._connections.close()
            self._room.forget(self._directory)

    def _entries(self, query: str) -> list[Entry]:
        return [*map(Entry._make, self._reader.execute(query))]

    def _insert(self, number: int, buffers: Collection[bytes | memoryview], size: int) -> None:
        # Written in place without the GIL; a parameter would be copied twice while holding the GIL.
        self._writer.execute("INSERT INTO tables VALUES (?, zeroblob(?))", (number, size))
        with self._writer.blobopen("tables", "rows", number) as blob:
            for buffer in buffers:
                blob.write(buffer)

    def _commit(self, write: Callable[[], None], nbytes: int, *, has_rows: bool = False) -> None:
        """Performs a transaction. Raises FullError if nothing was written, LogLostError if the outcome is unknown."""
        try:
            try:
                self._transact(write)
            except sqlite3.Error as error:
                if not database.is_full(error):
                    raise
                self._room.give_up_reserve()
                self._transact(write)
        except (sqlite3.Error, OSError) as error:
            if not database.is_full(error):
                raise self._lost(error) from None
            self._room.failed(has_rows=has_rows)
            raise full_error(self._directory) from None
        self._commits += 1
        self._wal_bytes += nbytes + _PAGES_EACH * PAGE_BYTES

    def _transact(self, write: Callable[[], None]) -> None:
        with transaction(self._writer):
            write()
            # Within the transaction, this takes no additional locks.
            self._measure()

    def _sync(self) -> None:
        commits = self._commits
        try:
            database.sync_file(self._wal)
        except OSError as error:
            if self.is_closed:
                # Closing syncs, and removes the WAL.
                return
            # The kernel may have dropped data that it could not write, and reports this only once.
            raise self._lost(error) from None
        self._synced = commits

    def _delete_removed(self) -> None:
        # The list is a copy: other threads add to the set.
        numbers = sorted(list(self._removed))  # noqa: C414
        for first in range(0, len(numbers), _DELETED_AT_ONCE):
            some = numbers[first : first + _DELETED_AT_ONCE]
            with self._writing:
                if self.is_closed or self.is_lost:
                    return
                with suppress(FullError):
                    self._commit(partial(self._delete, some), 0)
                    self._removed.difference_update(some)

    def _delete(self, numbers: Collection[int]) -> None:
        self._writer.executemany("DELETE FROM tables WHERE number = ?", ([number] for number in numbers))

    def _measure(self) -> None:
        """Measures the free space inside the database, which new rows use first, and the pending growth."""
        [[pages]] = self._writer.execute("PRAGMA page_count").fetchall()
        [[free_pages]] = self._writer.execute("PRAGMA freelist_count").fetchall()
        self.reusable = int(free_pages) * PAGE_BYTES
        size = self._checked_size()
        self._least_bytes = min(size, pages * PAGE_BYTES)
        self._room.note_growth(self._directory, pages * PAGE_BYTES - size)

    def _checked_size(self) -> int:
        """Returns the size of the database's file. Raises OSError if another program truncated it, because SQLite reads
        the missing part as zeros."""
        # Read before the size, because another thread may increase both in between.
        least = self._least_bytes
        size = self._path.stat().st_size
        if size < least:
            raise OSError(f"it shrank from at least {least} bytes to {size}")
        return size

    def _checkpoint(self, mode: Literal["RESTART", "TRUNCATE"]) -> None:
        """Copies the WAL to the database, and restarts the WAL. Called with `_flushing`. Appends wait only for the last
        pass. If another program prevents the checkpoint, the next flush retries."""
        try:
            with closing(database.connect(self._path, "NORMAL", timeout_s=0)) as connection:
                copied = 0
                for _ in range(_MAX_PASSES):
                    before, [[_, _, copied]] = copied, connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    if (copied - before) * PAGE_BYTES <= _LAST_PASS_BYTES:
                        break
                with self._writing, self._reading:
                    [[is_busy, _, _]] = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
                    if not is_busy:
                        self._wal_bytes = 0
                        self._measure()
        except (sqlite3.Error, OSError) as error:
            if database.is_full(error):
                self._room.failed(has_rows=True)
            elif not database.is_passing(error):
                raise self._lost(error) from None

    def _is_stored(self, number: int) -> bool:
        return bool(self._reader.execute("SELECT 1 FROM tables WHERE number = ?", [number]).fetchall())

    def _read(self, number: int) -> bytes | None:
        """Returns a table; None if it is damaged, and others may be whole."""
        try:
            with self._reader.blobopen("tables", "rows", number, readonly=True) as blob:
                return blob.read()
        except sqlite3.Error as error:
            if not database.is_of_value(error):
                raise
            return None

    def _check_open(self) -> None:
        if self.is_closed:
            raise UnavailableError(
                f"the journal {self._directory} is closed: the run is being deleted or reopened; retry"
            )
        if self.is_lost:
            raise LogLostError(f"the journal {self._directory} is being recovered; retry")

    def _lost(self, error: sqlite3.Error | OSError) -> LogLostError:
        self.is_lost = True
        return LogLostError(f"the journal cannot be used: {self._path}: {error}; it is being recovered, so retry")


class _FairLock:
    """A lock that a thread cannot acquire repeatedly while another thread waits for it."""

    def __init__(self) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
