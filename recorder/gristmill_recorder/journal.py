"""Stores recorded steps in a file until the service has acknowledged them.

The file is an SQLite database in WAL mode. When a method returns, its change is in the page cache of the operating
system, and survives a crash of the process. `sync`, called every second in a thread, writes changes to the disk: if the
machine fails, at most one second of changes is lost. No change waits for the disk, unless the log is too large.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill_recorder.columns import Columns
from gristmill_recorder.journal_files import JournalFiles
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.rows import Row

_LAYOUT = 7
_CHECK, _FREE = "restart the recorder, which checks the file", "free space on the journal's disk"
_LOG_PAGES = 16_384
_LOCKED_S = 60.0
_TABLES = """
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL, uid TEXT NOT NULL, sample INTEGER NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL,
    next_step INTEGER NOT NULL DEFAULT 0, delivered INTEGER NOT NULL DEFAULT 0,
    is_ended INTEGER NOT NULL DEFAULT 0, reward REAL,
    outcome TEXT, closed_at REAL,
    UNIQUE (run, uid, sample, round, attempt)
);
CREATE INDEX closed ON trajectories (closed_at) WHERE closed_at IS NOT NULL;
CREATE TABLE steps (
    trajectory INTEGER NOT NULL, step INTEGER NOT NULL,
    base INTEGER NOT NULL, shared INTEGER NOT NULL, rest BLOB NOT NULL, response BLOB NOT NULL, logprobs BLOB,
    stop_reason TEXT NOT NULL, policy_version INTEGER NOT NULL, policy_versions BLOB,
    is_masked INTEGER NOT NULL, columns BLOB, said BLOB, is_cut INTEGER NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (trajectory, step)
);
"""
# A prompt is stored as the number of tokens shared with an earlier step, its base, and the remaining tokens. So the
# tokens of a conversation are stored once.
_STEPS = (
    "SELECT step, base, shared, rest, response, logprobs, stop_reason, policy_version, policy_versions, is_masked, "
    "columns, said, is_cut, checksum FROM steps WHERE trajectory = ?"
)
_INSERT_STEP = "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_TOKENS = "SELECT base, shared, rest, response FROM steps WHERE trajectory = ? AND step = ?"


@dataclass(slots=True)
class Entry:
    """A trajectory in the journal.

    id: 0 until the first step is written. next_step: the number of steps. delivered: the number of steps that the
    service has acknowledged. rows: the steps to deliver. ends: the last step of each conversation, by its key.
    is_ended, reward: set when the trajectory ends. outcome: the result, "" while the trajectory is open; an open
    trajectory with an outcome must still be aborted in the service.
    """

    name: TrajectoryName
    id: int = 0
    next_step: int = 0
    delivered: int = 0
    is_ended: bool = False
    reward: float | None = None
    outcome: str = ""
    rows: deque[Row] = field(default_factory=deque)
    ends: dict[bytes, int] = field(default_factory=dict)


class Journal:
    """The journal file. Use it from one thread, except `sync`. Only one process at a time can open it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the journal. Raises UnavailableError if the file cannot be opened or locked, and
        InvalidArgumentError, without changing the file, if it is not a journal or damaged."""
        with ExitStack() as opened:
            self._files = opened.enter_context(closing(JournalFiles(path)))
            try:
                self._database = opened.enter_context(closing(_connect(path)))
                _check_layout(self._database, path)
                _check_pages(self._database)
                self._disk = opened.enter_context(closing(_connect(path)))
                _tune(self._database, "OFF")
                _tune(self._disk, "FULL")
                _make_tables(self._database)
                self._clock_offset_s = _last_closed_s(self._database) - time.monotonic()
            except sqlite3.Error as error:
                remedy = _FREE if isinstance(error, sqlite3.OperationalError) else "restore it"
                raise InvalidArgumentError(
                    f"journal: cannot open {path}: {error}; {remedy}, or choose another file"
                ) from None
            self._files.opened()
            opened.callback(self._files.closing)
            self._opened = opened.pop_all()

    def find(self, name: TrajectoryName) -> Entry | None:
        """Returns the trajectory without its rows, or None."""
        records = self._read(f"{_FIND} WHERE run = ? AND uid = ? AND sample = ? AND round = ? AND attempt = ?", name)
        return _entry(records[0]) if records else None

    def has_higher_attempt(self, name: TrajectoryName) -> bool:
        """Returns whether a higher attempt of the trajectory is recorded that the service did not refuse."""
        records = self._read(
            "SELECT 1 FROM trajectories WHERE run = ? AND uid = ? AND sample = ? AND round = ? AND attempt > ? "
            "AND coalesce(outcome, '') NOT LIKE 'refused%'",
            name,
        )
        return bool(records)

    def open(self) -> Iterator[Entry]:
        """Yields the open trajectories, with the rows to deliver."""
        for record in self._read(f"{_FIND} WHERE closed_at IS NULL ORDER BY id"):
            entry = _entry(record)
            for row in self.rows(entry.id):
                if row.step >= entry.delivered:
                    entry.rows.append(row)
                if row.said is not None:
                    entry.ends[row.said] = row.step
            yield entry

    def row(self, trajectory: int, step: int) -> Row | None:
        """Returns a step of an open trajectory; None if its steps are deleted."""
        records = self._read(f"{_STEPS} AND step = ?", (trajectory, step))
        return self._decode(trajectory, step, records[0], None) if records else None

    def rows(self, trajectory: int) -> Iterator[Row]:
        """Yields all steps of an open trajectory. Raises FailedPreconditionError if one is damaged or missing."""
        before: Row | None = None
        for step, record in enumerate(self._read(f"{_STEPS} ORDER BY step", (trajectory,))):
            before = self._decode(trajectory, step, record, before)
            yield before

    def _decode(self, trajectory: int, step: int, record: Sequence[Any], before: Row | None) -> Row:
        """Builds a step from its record. before: the previous step, if it is at hand."""
        *values, checksum = record
        if values[0] != step or checksum != _checksum(trajectory, *values):
            raise FailedPreconditionError(
                f"the journal is damaged: step {step} of its trajectory {trajectory} was changed or is missing; "
                "restore the file, or choose another"
            )
        _, base, shared, rest, *others = values
        if before is not None and before.step == base:
            known = np.concatenate([before.prompt, before.response])[:shared]
        else:
            known = self._conversation(trajectory, base, shared)
        return _row(step, np.concatenate([known, np.frombuffer(rest, np.int32)]), *others)

    def _conversation(self, trajectory: int, step: int, count: int) -> NDArray[np.int32]:
        """Returns the first tokens of a step's prompt and response."""
        parts = [np.empty(0, np.int32)]
        while count:
            ((base, shared, *tokens),) = self._read(_TOKENS, (trajectory, step))
            own = np.frombuffer(b"".join(tokens), np.int32)
            parts.append(own[: max(0, count - shared)])
            step, count = base, min(count, shared)
        return np.concatenate(parts[::-1])

    def _read(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Returns the query's records. Raises FailedPreconditionError if the file is damaged."""
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise FailedPreconditionError(f"the journal cannot be read: {error}; {_CHECK}") from None

    def append(self, entry: Entry, rows: Sequence[Row], base: Row | None) -> None:
        """Appends the next steps of a trajectory, all or none, and updates `id` and `next_step` of the entry.

        base: an earlier step with which they share their first tokens, if any.
        """
        # An answer waits for this method, and a single statement needs no transaction.
        is_single = entry.id and len(rows) == 1
        with self._writing() if is_single else self._transaction():
            id_ = entry.id or self._insert(entry.name)
            self._database.executemany(_INSERT_STEP, _records(id_, rows, base))
        entry.id, entry.next_step = id_, rows[-1].step + 1

    def _insert(self, name: TrajectoryName) -> int:
        inserted = self._database.execute(
            "INSERT INTO trajectories (run, uid, sample, round, attempt) VALUES (?, ?, ?, ?, ?)", name
        )
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def deliver(self, entry: Entry) -> None:
        """Stores `delivered` of the entry, so that these steps are not delivered again after a restart."""
        with self._writing():
            self._database.execute("UPDATE trajectories SET delivered = ? WHERE id = ?", (entry.delivered, entry.id))

    def end(self, trajectory: int, reward: float | None) -> None:
        """Stores that the trajectory has ended, and its reward."""
        with self._transaction():
            self._database.execute(
                "UPDATE trajectories SET is_ended = 1, reward = ? WHERE id = ?", (reward, trajectory)
            )

    def abort(self, entry: Entry, outcome: str) -> None:
        """Stores the outcome, also in the entry, and deletes the steps. The trajectory is open until the service has
        aborted it."""
        with self._transaction():
            id_ = entry.id or self._insert(entry.name)
            self._database.execute("UPDATE trajectories SET outcome = ?, closed_at = NULL WHERE id = ?", (outcome, id_))
            self._database.execute("DELETE FROM steps WHERE trajectory = ?", (id_,))
        entry.id, entry.next_step, entry.outcome = id_, 0, outcome

    def close_trajectory(self, trajectory: int, outcome: str, *, keeps_rows: bool) -> None:
        """Closes a trajectory and stores its outcome. keeps_rows: whether its steps stay for inspection until
        `forget`."""
        with self._transaction():
            self._database.execute(
                "UPDATE trajectories SET outcome = ?, closed_at = ?, next_step = "
                "(SELECT coalesce(max(step) + 1, 0) FROM steps WHERE trajectory = id) WHERE id = ?",
                (outcome, self._now_s(), trajectory),
            )
            if not keeps_rows:
                self._database.execute("DELETE FROM steps WHERE trajectory = ?", (trajectory,))

    def forget(self, after_s: float) -> None:
        """Deletes the trajectories that were closed more than this many seconds ago."""
        before = self._now_s() - after_s
        with self._transaction():
            self._database.execute(
                "DELETE FROM steps WHERE trajectory IN (SELECT id FROM trajectories WHERE closed_at < ?)", (before,)
            )
            self._database.execute("DELETE FROM trajectories WHERE closed_at < ?", (before,))

    def _now_s(self) -> float:
        """Returns the time by a clock that runs while a journal is open: the machine's clock may jump."""
        return time.monotonic() + self._clock_offset_s

    def sync(self) -> None:
        """Writes all changes to the disk. Can be called in another thread; writers wait for it only when the file's log
        is larger than 64 MiB. Raises FailedPreconditionError if the disk refuses; then the changes stay in the log
        until the next call."""
        try:
            _, pages, _ = self._disk.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages > _LOG_PAGES:
                # A log is overwritten only if nothing was written during a checkpoint, so under load it grows forever.
                self._disk.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        except sqlite3.Error as error:
            raise FailedPreconditionError(
                f"the journal cannot be written to the disk: {error}; free space on the journal's disk"
            ) from None

    def close(self) -> None:
        with self._opened:
            self.sync()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Runs the block as one transaction. Raises FailedPreconditionError like `_writing`."""
        with self._writing():
            self._database.execute("BEGIN")
            yield
            self._database.execute("COMMIT")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises FailedPreconditionError if the block cannot write its changes; then it wrote none of them."""
        self._files.check_present()
        try:
            yield
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            remedy = _FREE if isinstance(error, sqlite3.OperationalError) else _CHECK
            raise FailedPreconditionError(
                f"the journal cannot be written, so the call is not answered: {error}; {remedy}"
            ) from None


# next_step is stored when the steps are deleted; before, it is computed from them.
_FIND = (
    "SELECT id, run, uid, sample, round, attempt, "
    "max(next_step, (SELECT coalesce(max(step) + 1, 0) FROM steps WHERE trajectory = id)), "
    "delivered, is_ended, reward, outcome FROM trajectories"
)


def _connect(path: Path) -> sqlite3.Connection:
    # The file contains prompts and responses. SQLite creates its other files with the same mode.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    return sqlite3.connect(path, timeout=_LOCKED_S, isolation_level=None, check_same_thread=False)


def _tune(database: sqlite3.Connection, synchronous: str) -> None:
    for pragma in ("journal_mode = WAL", f"synchronous = {synchronous}", "wal_autocheckpoint = 0"):
        database.execute(f"PRAGMA {pragma}")


def _check_layout(database: sqlite3.Connection, path: Path) -> None:
    (layout,) = database.execute("PRAGMA user_version").fetchone()
    is_empty = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
    if layout != _LAYOUT and not (is_empty and layout == 0):
        raise InvalidArgumentError(
            f"journal: {path} has layout {layout}, and this version reads layout {_LAYOUT}; choose another file"
        )


def _check_pages(database: sqlite3.Connection) -> None:
    """Raises DatabaseError if the file was cut, or a page overwritten. Reads the whole file."""
    (result,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":
        raise sqlite3.DatabaseError(result.replace("\n", ", "))


def _make_tables(database: sqlite3.Connection) -> None:
    if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
        database.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {_LAYOUT};COMMIT;")


def _last_closed_s(database: sqlite3.Connection) -> float:
    (closed_at,) = database.execute("SELECT coalesce(max(closed_at), 0) FROM trajectories").fetchone()
    return float(closed_at)


def _entry(record: tuple[Any, ...]) -> Entry:
    id_, run, uid, sample, round_, attempt, next_step, delivered, is_ended, reward, outcome = record
    name = TrajectoryName(run, uid, sample, round_, attempt)
    return Entry(name, id_, next_step, delivered, bool(is_ended), reward, outcome or "")


def _records(trajectory: int, rows: Sequence[Row], base: Row | None) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        number, shared = (0, 0) if base is None else (base.step, base.shared(row.prompt))
        logprobs, versions = (None if a is None else a.data for a in (row.logprobs, row.policy_versions))
        tokens = (row.prompt[shared:].data, row.response.data, logprobs)
        more = (row.stop_reason, row.policy_version, versions, int(row.is_masked), _packed(row.columns))
        values = (row.step, number, shared, *tokens, *more, row.said, int(row.is_cut))
        yield trajectory, *values, _checksum(trajectory, *values)
        base = row


def _checksum(*values: Any) -> int:
    """Returns the CRC-32 of a step's values."""
    checksum = 0
    for value in values:
        checksum = crc32(value if isinstance(value, (bytes, memoryview)) else repr(value).encode(), checksum)
    return checksum


def _packed(columns: Columns) -> bytes | None:
    values = [(name, each.dtype.str, each.shape, each.tobytes()) for name, each in columns.items()]
    return msgspec.msgpack.encode(values) if values else None


def _unpacked(columns: bytes | None) -> Columns:
    values = msgspec.msgpack.decode(columns) if columns else ()
    return {name: np.frombuffer(data, dtype).reshape(shape) for name, dtype, shape, data in values}


def _row(step: int, prompt: NDArray[np.int32], response: bytes, logprobs: bytes | None, *others: Any) -> Row:
    stop_reason, policy_version, versions, is_masked, columns, said, is_cut = others
    values = None if logprobs is None else np.frombuffer(logprobs, np.float32)
    of_tokens = None if versions is None else np.frombuffer(versions, np.int32)
    sampled, more = np.frombuffer(response, np.int32), _unpacked(columns)
    row = Row(step, prompt, sampled, values, stop_reason, policy_version, of_tokens, bool(is_masked), more)
    row.said, row.is_cut = said, bool(is_cut)
    return row
