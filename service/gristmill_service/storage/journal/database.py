"""One run's SQLite database: its tables; creating, checking and opening it; and the meaning of SQLite's errors.

run        one row: the format, the run's name, id and configuration; `boot`, the machine's boot in which records were
           appended that may not be on the disk, NULL when all are
snapshot   none or one row: which pieces are the state after event `number`
pieces     the snapshot in pieces, and pieces of an earlier or later one, which are removed
events     the events since then, numbered without gaps, and earlier ones, which are removed
tables     tables of rows, as `row_tables` encodes them

next_table is a number that no table had when the event was appended, so that no number is used twice. SQLite has no
checksums of contents, so events and pieces contain one; tables are checked with the digests in the events.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import structlog

from gristmill.errors import GristmillError, InvalidArgumentError, UnavailableError
from gristmill_service.storage.journal.disk_room import full_error
from gristmill_service.storage.row_tables import TableBytes

_log = structlog.get_logger(__name__)

FILE_NAME = "journal.sqlite"
WAL_NAME = f"{FILE_NAME}-wal"
FORMAT = 3
"""The format that this version writes and reads."""

# A small table needs two pages in the WAL, a large table two system calls per page.
PAGE_BYTES = 8 << 10
_PATIENCE_S = 1.0
# Rows up to this size are copied with the interpreter's lock, for at most 0.1 ms.
_SMALL_BYTES = 256 << 10
# Each leaves 88 bytes.
_MOST_BLOBS = 10_000
_TABLES = (
    "CREATE TABLE run (format INTEGER, name TEXT, id TEXT, config TEXT, checksum INTEGER, boot TEXT)",
    "CREATE TABLE snapshot "
    "(number INTEGER, next_table INTEGER, first INTEGER, last INTEGER, bytes INTEGER, checksum INTEGER)",
    "CREATE TABLE pieces (number INTEGER PRIMARY KEY, checksum INTEGER, content BLOB)",
    "CREATE TABLE events (number INTEGER PRIMARY KEY, next_table INTEGER, checksum INTEGER, record BLOB)",
    "CREATE TABLE tables (number INTEGER PRIMARY KEY, rows BLOB)",
)


class Description(NamedTuple):
    """The description of a run in its database. is_short: whether records may be missing at the end of the log, because
    the machine failed before they were on disk."""

    run_id: str
    config: bytes
    boot: str | None = None
    is_short: bool = False


class Entry(NamedTuple):
    """A row of `events`."""

    number: int
    next_table: int
    checksum: int
    record: bytes

    @staticmethod
    def of(number: int, next_table: int, record: bytes) -> Entry:
        return Entry(number, next_table, _checksum(record, number, next_table), record)

    @property
    def is_whole(self) -> bool:
        return isinstance(self.record, bytes) and self.checksum == _checksum(self.record, self.number, self.next_table)


class Piece(NamedTuple):
    """A row of `pieces`."""

    number: int
    checksum: int
    content: bytes

    @staticmethod
    def of(number: int, content: bytes) -> Piece:
        return Piece(number, _checksum(content, number), content)

    @property
    def is_whole(self) -> bool:
        return isinstance(self.content, bytes) and self.checksum == _checksum(self.content, self.number)


class Snapshot(NamedTuple):
    """The row of `snapshot`. number: of the last event that it includes. first, last: of its pieces. nbytes: of all
    of them."""

    number: int
    next_table: int
    first: int
    last: int
    nbytes: int
    checksum: int

    @staticmethod
    def of(number: int, next_table: int, first: int, last: int, nbytes: int) -> Snapshot:
        return Snapshot(
            number, next_table, first, last, nbytes, _checksum(b"", number, next_table, first, last, nbytes)
        )

    @property
    def is_whole(self) -> bool:
        return self == Snapshot.of(*self[:-1])


def create(directory: Path, name: str, run: Description) -> None:
    """Creates a run's database. Returns when it is on disk. Raises UnavailableError."""
    path = directory / FILE_NAME
    with explained(path):
        # Creates the file with this mode, which SQLite also uses for the WAL.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with closing(connect(path, "FULL")) as database, transaction(database):
            for statement in _TABLES:
                database.execute(statement)
            config = run.config.decode()
            row = (FORMAT, name, run.run_id, config, _checksum_of_run(name, run.run_id, config), run.boot)
            database.execute("INSERT INTO run VALUES (?, ?, ?, ?, ?, ?)", row)
        sync_directory(directory)


def connect(path: Path, synchronous: Literal["FULL", "NORMAL"], timeout_s: float = _PATIENCE_S) -> sqlite3.Connection:
    """Opens an existing database, for use by one thread at a time. Raises sqlite3.Error."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    database = sqlite3.connect(uri, timeout_s, isolation_level=None, check_same_thread=False, uri=True)
    try:
        database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        [[mode]] = database.execute("PRAGMA journal_mode = WAL").fetchall()
        if mode != "wal":
            raise sqlite3.NotSupportedError("its file system cannot share memory, which SQLite's WAL needs")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        # Some builds of SQLite overwrite deleted data.
        database.execute("PRAGMA secure_delete = OFF")
    except BaseException:
        database.close()
        raise
    return database


class Connection:
    """A connection to a run's database, for one thread at a time. Large rows are written and read in place, without the
    interpreter's lock. Each time, CPython keeps some memory for as long as the connection is open
    (https://github.com/python/cpython/issues/144424), so `renew` opens it again after many times."""

    def __init__(self, path: Path, synchronous: Literal["FULL", "NORMAL"], text_factory: type = str) -> None:
        """Raises sqlite3.Error."""
        self._path, self._synchronous, self._text_factory = path, synchronous, text_factory
        self.sqlite = self._connected()

    def _connected(self) -> sqlite3.Connection:
        sqlite, self._blobs = connect(self._path, self._synchronous), 0
        sqlite.text_factory = self._text_factory
        return sqlite

    def renew(self) -> None:
        """Opens the connection again if it is worn out and can be opened now. Called between transactions."""
        if self._blobs >= _MOST_BLOBS:
            with suppress(sqlite3.Error):
                before, self.sqlite = self.sqlite, self._connected()
                before.close()

    def execute(self, query: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self.sqlite.execute(query, cast(Any, values))

    def write_rows(self, number: int, table: TableBytes) -> None:
        if table.size <= _SMALL_BYTES:
            self.execute("INSERT INTO tables VALUES (?, ?)", (number, table.joined()))
            return
        self.execute("INSERT INTO tables VALUES (?, zeroblob(?))", (number, table.size))
        self._blobs += 1
        with self.sqlite.blobopen("tables", "rows", number) as blob:
            for buffer in table.buffers:
                blob.write(buffer)

    def read_rows(self, number: int) -> bytes | None:
        """Returns a table; None if it is missing or damaged, and others may be whole."""
        for [size] in self.execute("SELECT length(rows) FROM tables WHERE number = ?", [number]).fetchall():
            try:
                if size is not None and size <= _SMALL_BYTES:
                    [[rows]] = self.execute("SELECT rows FROM tables WHERE number = ?", [number]).fetchall()
                    return rows if isinstance(rows, bytes) else None
                self._blobs += 1
                with self.sqlite.blobopen("tables", "rows", number, readonly=True) as blob:
                    return blob.read()
            except sqlite3.Error as error:
                if not is_of_value(error):
                    raise
        return None

    def close(self) -> None:
        self.sqlite.close()


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commits all statements of the `with` block, or none. Raises sqlite3.Error."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def read_description(directory: Path, name: str) -> Description:
    """Checks the database of a run that is not open, without changing it. Raises InvalidArgumentError if it is missing,
    damaged, of another run, or of another format, and UnavailableError."""
    path = directory / FILE_NAME
    with _read_only(path) as database:
        stored_format, stored_name = _identity(database, path)
        if stored_format != FORMAT:
            raise InvalidArgumentError(
                f"{path} has format {stored_format} and this version reads {FORMAT}; use the version that wrote it"
            )
        if stored_name != name:
            raise misplaced(path, stored_name, name)
        # Reads every page: 0.15 s per GB.
        [[problem]] = database.execute("PRAGMA quick_check(1)").fetchall()
        if problem != "ok":
            raise damaged(path, problem.splitlines()[-1])
        [[run_id, config, checksum, boot]] = database.execute("SELECT id, config, checksum, boot FROM run").fetchall()
        if checksum != _checksum_of_run(stored_name, run_id, config):
            raise damaged(path, "the checksum of its configuration does not match")
        lost = _transactions_lost(directory)
    is_short = boot is not None and boot != this_boot()
    if lost > 1 and not is_short:
        raise damaged(directory / WAL_NAME, f"{lost - 1} complete records follow, which must not be lost")
    if lost:
        # A single lost transaction was never confirmed.
        _log.warning("torn tail cut", file=str(directory / WAL_NAME), records=lost)
    return Description(run_id, config.encode(), boot, is_short)


def read_name(directory: Path) -> str:
    """Returns the name of a directory's run. Raises like `read_description`."""
    with _read_only(directory / FILE_NAME) as database:
        return _identity(database, directory / FILE_NAME)[1]


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Converts errors of SQLite and the operating system to UnavailableError, or to InvalidArgumentError if the file is
    damaged. The messages name the file and the remedy."""
    try:
        yield
    except GristmillError:
        raise
    except UnicodeError as error:
        # sqlite3 raises this if SQLite's error message quotes a damaged schema.
        raise damaged(path, error) from None
    except (sqlite3.Error, OSError) as error:
        if is_full(error):
            raise full_error(path.parent) from None
        if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise damaged(path, error) from None
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnavailableError(
            f"the journal cannot be used: {path}: {reason}; fix the file system, and the service continues by itself"
        ) from None


def damaged(path: Path, reason: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} is damaged: {reason}; restore it, or delete the run")


def misplaced(path: Path, stored_name: str, name: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} is of run {stored_name!r}, not of {name!r}; move it back, or delete the run")


def is_full(error: sqlite3.Error | OSError) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return _code(error) == sqlite3.SQLITE_FULL or error.sqlite_errorcode == sqlite3.SQLITE_IOERR_SHMSIZE


def is_of_value(error: sqlite3.Error) -> bool:
    """Returns whether an error of reading a value is of this value alone: its pages are damaged, cannot be read, or
    describe a value of another type."""
    is_damaged = _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)
    return is_damaged or error.sqlite_errorcode == sqlite3.SQLITE_IOERR_READ


def is_passing(error: sqlite3.Error | OSError) -> bool:
    """Returns whether the error may be temporary, such as a lock by another program or too few file descriptors."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN)


def sync_file(path: Path) -> None:
    """Syncs the file's data, or the directory's entries, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file


@cache
def this_boot() -> str:
    """Returns the kernel's random id of this boot of the machine; empty if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@contextmanager
def _read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens a database without changing it or its WAL, even when it is closed. Raises InvalidArgumentError if it is
    missing or damaged, and UnavailableError."""
    if not path.exists():
        raise InvalidArgumentError(f"{path.parent} has no {path.name}; restore it, or delete the run")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with explained(path), closing(sqlite3.connect(uri, _PATIENCE_S, isolation_level=None, uri=True)) as database:
        database.text_factory = partial(str, encoding="utf-8", errors="replace")
        yield database


def _identity(database: sqlite3.Connection, path: Path) -> tuple[int, str]:
    """Returns the format and the run's name, which every format stores at the same place."""
    rows = database.execute("SELECT format, name FROM run").fetchall()
    if len(rows) != 1 or [*map(type, rows[0])] != [int, str]:
        raise damaged(path, "it does not describe a run")
    return rows[0][0], rows[0][1]


def _transactions_lost(directory: Path) -> int:
    """Counts the transactions in the WAL that SQLite ignores because they, or earlier ones, are incomplete.

    A killed process leaves at most one: it writes one transaction after another, and the committing frame of each last.
    See https://sqlite.org/walformat.html.
    """
    wal, frame_bytes = directory / WAL_NAME, 24 + PAGE_BYTES
    with wal.open("rb") as file, Path(directory / f"{FILE_NAME}-shm").open("rb") as index:
        # The number of valid frames, according to SQLite.
        valid = int.from_bytes(os.pread(index.fileno(), 4, 16), sys.byteorder)
        header, first = file.read(32), file.read(16)
        if not first:
            return 0
        # Frames of an earlier use of the file may follow the last frame. They have other salts.
        salts = header[16:24] if _is_whole(header) else first[8:16]
        starts = range(32 + valid * frame_bytes, wal.stat().st_size, frame_bytes)
        frames = (os.pread(file.fileno(), 16, start) for start in starts)
        return sum(any(frame[4:8]) and frame[8:16] == salts for frame in frames)


def _is_whole(header: bytes) -> bool:
    """Returns whether the checksum of a WAL's header matches."""
    first = second = 0
    for one, other in struct.iter_unpack(">II" if header[3:4] == b"\x83" else "<II", header[:24]):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return struct.pack(">II", first, second) == header[24:]


def _checksum(content: bytes, *numbers: int) -> int:
    return zlib.crc32(content, zlib.crc32(" ".join(map(str, numbers)).encode()))


def _checksum_of_run(name: object, run_id: object, config: object) -> int:
    return zlib.crc32(f"{name}\0{run_id}\0{config}".encode())


def _code(error: sqlite3.Error | OSError) -> int:
    """Returns SQLite's primary result code; 0 for other errors."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
