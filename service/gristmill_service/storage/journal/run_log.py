"""One run's log and tables of rows in a SQLite database, and their durability.

Nothing is removed before the event that allows it is on disk. A WAL preserves the order of transactions: after a power
loss it contains a prefix of them, and a table is deleted in a later transaction than its event. Checkpoints preserve
that order, too: with `synchronous` NORMAL or FULL, SQLite syncs the WAL before it copies pages from it to the database,
and syncs the database before it restarts the WAL. Therefore `fsync: never` uses NORMAL, not OFF: the kernel decides
when to write the last seconds, but checkpoints are synced.

A snapshot is written in pieces, each in a transaction of its own, so that appends in between wait for one piece. Only
the last transaction makes it the log's snapshot; the events and pieces that it replaces are removed after that. So at
any time the log has one whole snapshot, and all events after it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.database import (
    PAGE_BYTES,
    Connection,
    Description,
    Entry,
    Piece,
    Snapshot,
    explained,
    transaction,
)
from gristmill_service.storage.journal.disk_room import DiskRoom, full_error
from gristmill_service.storage.run_store import FullError, LogEnd, LogLostError, Replay, is_long_tail

_log = structlog.get_logger(__name__)

Fsync = Literal["always", "interval", "never"]

# The approximate number of pages that a transaction writes to the WAL in addition to its rows.
_PAGES_EACH = 3
# The WAL of an idle run is truncated if its file is longer.
_SHORT_WAL = 1 << 20
# Appends wait for the last pass of a checkpoint, which copies the pages added during the previous pass.
_LAST_PASS_BYTES, _MAX_PASSES = 8 << 20, 4
_DELETED_AT_ONCE = 16
# A transaction that removes what a snapshot replaced takes about this time, and a flush this share of its second.
_REMOVAL_S, _REMOVALS_S = 0.01, 0.25
_REMOVE_REPLACED = (
    "DELETE FROM events WHERE number IN (SELECT number FROM events WHERE number <= ? LIMIT 16)",
    "DELETE FROM pieces WHERE number IN (SELECT number FROM pieces WHERE number < ? LIMIT 1)",
    "DELETE FROM pieces WHERE number IN (SELECT number FROM pieces WHERE number > ? LIMIT 1)",
)
_NO_SNAPSHOT = Snapshot.of(0, 0, 1, 0, 0)


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
        # Acquire locks in this order. `_writing` and `_reading` guard the use and the closing of their connections,
        # `_compacting` the pieces that are in no snapshot.
        self._compacting, self._flushing = threading.Lock(), threading.Lock()
        self._writing, self._reading = _FairLock(), _FairLock()
        with explained(self._path), ExitStack() as opened:
            synchronous: Literal["FULL", "NORMAL"] = "FULL" if fsync == "always" else "NORMAL"
            self._writer = opened.enter_context(closing(Connection(self._path, synchronous)))
            # Damaged text may contain any bytes.
            self._reader = opened.enter_context(closing(Connection(self._path, synchronous, text_factory=bytes)))
            # Records of a killed process may be only in the kernel's cache.
            database.sync_file(self._wal)
            self._wal_bytes, self._least_bytes = self._wal.stat().st_size, 0
            self._measure()
            self._connections = opened.pop_all()
        self.is_lost = self.is_closed = False
        # first_number: the lowest number that no table had. end: the last event. _compacted: that of the snapshot.
        self.first_number, self.end, self._compacted = 0, LogEnd(), LogEnd()
        self._snapshot, self._has_replaced = _NO_SNAPSHOT, False
        # Transactions since the log was opened: all, those on disk, and those at the last `flush`.
        self._commits = self._synced = self._flushed = 0
        self._boot = None if fsync == "always" else database.this_boot()
        self._is_boot_noted = run.boot == self._boot
        self._removed: set[int] = set()

    @property
    def is_long(self) -> bool:
        return is_long_tail(self.end.nbytes - self._compacted.nbytes, self._snapshot.nbytes)

    @property
    def log_bytes(self) -> int:
        return self._snapshot.nbytes + self.end.nbytes - self._compacted.nbytes

    def check(self, has_rows: bool = True, row_bytes: int = 0) -> None:
        self._room.check_record()
        if has_rows:
            self._room.check(self.reusable)
        if row_bytes:
            self._room.check_for(row_bytes, self.reusable)

    def replay(self) -> Replay:
        with self._reading, explained(self._path):
            self._check_open()
            snapshots = [*map(Snapshot._make, self._reader.execute("SELECT * FROM snapshot"))]
            if not all(snapshot.is_whole for snapshot in snapshots):
                raise database.damaged(self._path, "the checksum of the snapshot does not match")
            self._snapshot = snapshot = snapshots[0] if snapshots else _NO_SNAPSHOT
            query, before = "SELECT * FROM events WHERE number > ? ORDER BY number", snapshot.number
            events = [*map(Entry._make, self._reader.execute(query, [before]))]
            query = (
                "SELECT EXISTS (SELECT 1 FROM events WHERE number <= ?) "
                "OR EXISTS (SELECT 1 FROM pieces WHERE number NOT BETWEEN ? AND ?)"
            )
            [[replaced]] = self._reader.execute(query, [before, snapshot.first, snapshot.last]).fetchall()
        if broken := [event.number for event in events if not event.is_whole]:
            raise database.damaged(self._path, f"the checksum of record {broken[0]} does not match")
        if [event.number for event in events] != [*range(before + 1, before + 1 + len(events))]:
            raise database.damaged(self._path, f"records after {before} are missing")
        self.first_number = max([snapshot.next_table, *(event.next_table for event in events)])
        self.end = LogEnd(before + len(events), sum(len(event.record) for event in events))
        self._compacted, self._has_replaced = LogEnd(before), bool(replaced)
        pieces = self._pieces(snapshot) if snapshots else None
        return Replay(pieces, [event.record for event in events], lambda: self._is_short)

    def _pieces(self, snapshot: Snapshot) -> Iterator[bytes]:
        for number in range(snapshot.first, snapshot.last + 1):
            with self._reading, explained(self._path):
                self._check_open()
                rows = self._reader.execute("SELECT * FROM pieces WHERE number = ?", [number]).fetchall()
            if not rows or not Piece(*rows[0]).is_whole:
                raise database.damaged(self._path, f"piece {number} of the snapshot is missing or damaged")
            yield rows[0][-1]

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
            event = Entry.of(self.end.number + 1, max(self.first_number, first_number), record)

            def write() -> None:
                for number, table in encoded.items():
                    self._writer.write_rows(number, table)
                self._writer.execute("INSERT INTO events VALUES (?, ?, ?, ?)", event)
                if not self._is_boot_noted:
                    self._writer.execute("UPDATE run SET boot = ?", [self._boot])

            self._commit(write, nbytes + len(record), has_rows=bool(tables))
            self.end, self.first_number = LogEnd(event.number, self.end.nbytes + len(record)), event.next_table
            if not self._is_boot_noted:
                # Synced before the first record is confirmed that may be lost.
                self._sync()
                self._is_boot_noted = True

    def compact(self, end: LogEnd, snapshot: Iterable[bytes]) -> None:
        with self._compacting:
            self._room.check_snapshot(self._snapshot.nbytes, self.reusable)
            with self._writing, explained(self._path):
                self._check_open()
                [[last]] = self._writer.execute("SELECT max(rowid) FROM pieces").fetchall()
            first, nbytes = (last or 0) + 1, 0
            # From now on, there are pieces to remove, of this snapshot or of the one before.
            self._has_replaced, number = True, first - 1
            for number, content in enumerate(snapshot, first):
                nbytes += len(content)
                self._write_piece(Piece.of(number, content))
            with self._writing:
                made = Snapshot.of(end.number, self.first_number, first, number, nbytes)

                def switch() -> None:
                    self._writer.execute("DELETE FROM snapshot")
                    self._writer.execute("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?, ?)", made)

                self._replace(switch, 0)
                self._snapshot, self._compacted = made, end

    def _write_piece(self, piece: Piece) -> None:
        self._room.check_snapshot(len(piece.content), self.reusable)
        with self._writing:
            insert = partial(self._writer.execute, "INSERT INTO pieces VALUES (?, ?, ?)", piece)
            self._replace(insert, len(piece.content))
        if self._wal_bytes > self._room.wal_limit:
            # No piece is written meanwhile, so that the WAL stays short, and appends wait for a short last pass.
            with self._flushing:
                if not (self.is_closed or self.is_lost):
                    self._checkpoint("RESTART")

    def _replace(self, write: Callable[[], object], nbytes: int) -> None:
        """Performs a transaction of a snapshot, which may fail: the log is as good as before."""
        self._check_open()
        try:
            self._transact(write)
        except (sqlite3.Error, OSError) as error:
            if database.is_full(error):
                raise full_error(self._directory) from None
            raise UnavailableError(f"a snapshot cannot be written: {self._path}: {error}") from None
        self._count(nbytes)

    def _remove_replaced(self) -> None:
        """Removes events and pieces that are not in the log any more, for a while."""
        if not self._has_replaced or not self._compacting.acquire(blocking=False):
            return
        try:
            until, now = time.monotonic() + _REMOVALS_S, self._snapshot
            for query, limit in zip(_REMOVE_REPLACED, (now.number, now.first, now.last), strict=True):
                while self._remove_some(query, limit):
                    if time.monotonic() > until:
                        return
            self._has_replaced = False
        finally:
            self._compacting.release()

    def _remove_some(self, query: str, limit: int) -> bool:
        """Removes rows in a short transaction. Returns whether more may be left."""
        is_left = True

        def remove() -> None:
            nonlocal is_left
            until = time.monotonic() + _REMOVAL_S
            while is_left := self._writer.execute(query, [limit]).rowcount > 0:
                if time.monotonic() >= until:
                    return

        with self._writing:
            self._replace(remove, 0)
        return is_left

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
            with suppress(UnavailableError):
                self._remove_replaced()
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
                if number not in self._removed:
                    self._reader.renew()
                    rows = self._reader.read_rows(number)
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
            # A damaged schema may have no numbers, but always has rowids, which are the same.
            stored = {number for [number] in self._reader.execute("SELECT rowid FROM tables")}
        self.first_number = max(self.first_number, max(stored, default=-1) + 1)
        self.remove(stored.difference(numbers))
        self._delete_removed()
        return {*numbers} - stored

    def close(self) -> None:
        """Syncs, so that a later power loss loses nothing. A second call does nothing."""
        with self._flushing, self._writing, self._reading:
            if self._is_boot_noted and self._boot is not None and not self.is_closed and not self.is_lost:
                try:
                    with transaction(self._writer.sqlite):
                        self._writer.execute("UPDATE run SET boot = NULL")
                except sqlite3.Error as error:
                    _log.warning("journal closed unsynced", directory=str(self._directory), reason=str(error))
            self.is_closed = True
            # SQLite syncs, checkpoints and deletes the WAL when the last connection closes.
            self._connections.close()
            self._room.forget(self._directory)

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
        self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        self._commits += 1
        self._wal_bytes += nbytes + _PAGES_EACH * PAGE_BYTES

    def _transact(self, write: Callable[[], object]) -> None:
        self._writer.renew()
        with transaction(self._writer.sqlite):
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
        self._writer.sqlite.executemany("DELETE FROM tables WHERE number = ?", ([number] for number in numbers))

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
