"""What was answered and is not delivered yet, in a file that outlives the process.

An SQLite database in WAL mode. A change is in the operating system's memory when its method returns, which survives the
death of the process; `sync`, called each second in a thread of its own, brings it to the disk, so that the death of the
machine costs a second at most. No change waits for the disk.
"""

from __future__ import annotations

import fcntl
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.rows import Row

_LAYOUT = 1
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
    shared INTEGER NOT NULL, rest BLOB NOT NULL, response BLOB NOT NULL, logprobs BLOB,
    stop_reason TEXT NOT NULL, policy_version INTEGER NOT NULL,
    PRIMARY KEY (trajectory, step)
);
"""
# A prompt is as many tokens as it shares with the step before, and the rest: a conversation is written once.
_STEPS = (
    "SELECT step, shared, rest, response, logprobs, stop_reason, policy_version FROM steps WHERE trajectory = ? "
    "ORDER BY step"
)


@dataclass(slots=True)
class Entry:
    """A trajectory as the journal has it.

    id: 0 before it is there. next_step: how many steps it has. delivered: how many of these the service has, as far as
    was seen. rows: the others. is_ended, reward: what its end said. outcome: what became of it, "" while it is open.
    """

    name: TrajectoryName
    id: int = 0
    next_step: int = 0
    delivered: int = 0
    is_ended: bool = False
    reward: float | None = None
    outcome: str = ""
    rows: list[Row] = field(default_factory=list)


class Journal:
    """For one thread, except for `sync`. One process at a time has it: another one is refused."""

    def __init__(self, path: Path) -> None:
        """Raises UnavailableError where the file cannot be had, InvalidArgumentError where it is no journal, which is
        left as it is."""
        with ExitStack() as opened:
            opened.enter_context(_locked(path))
            try:
                self._database = opened.enter_context(closing(_connect(path)))
                _check_layout(self._database, path)
                self._disk = opened.enter_context(closing(_connect(path)))
                _tune(self._database, "OFF")
                _tune(self._disk, "FULL")
                _make_tables(self._database)
            except sqlite3.Error as error:
                raise InvalidArgumentError(f"journal: {path} cannot be read: {error}; choose another file") from None
            self._opened = opened.pop_all()

    def find(self, name: TrajectoryName) -> Entry | None:
        """The trajectory of that name without its rows."""
        found = self._database.execute(
            f"{_FIND} WHERE run = ? AND uid = ? AND sample = ? AND round = ? AND attempt = ?", name
        )
        entry = found.fetchone()
        return None if entry is None else _entry(entry)

    def open(self) -> Iterator[Entry]:
        """The trajectories that are not closed, with the rows that are left of them: for a start."""
        for found in self._database.execute(f"{_FIND} WHERE closed_at IS NULL ORDER BY id").fetchall():
            entry = _entry(found)
            before: Row | None = None
            for record in self._database.execute(_STEPS, (entry.id,)):
                before = _row(record, before)
                if before.step >= entry.delivered:
                    entry.rows.append(before)
            yield entry

    def append(self, entry: Entry, rows: Sequence[Row], before: Row | None) -> None:
        """The next steps of a trajectory, all or none; the first make it. Completes the entry's `id` and `next_step`.

        before: the step before them, if there is one.
        """
        # An answer waits for this, and one statement is a change by itself.
        is_single = entry.id and len(rows) == 1
        with self._kept() if is_single else self._changing():
            id_ = entry.id or self._make(entry.name)
            records = _records(id_, rows, before)
            self._database.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)", records)
        entry.id, entry.next_step = id_, rows[-1].step + 1

    def _make(self, name: TrajectoryName) -> int:
        made = self._database.execute(
            "INSERT INTO trajectories (run, uid, sample, round, attempt) VALUES (?, ?, ?, ?, ?)", name
        )
        assert made.lastrowid is not None
        return made.lastrowid

    def deliver(self, entry: Entry) -> None:
        """Takes note of the entry's `delivered`, so that these steps are not delivered again after a restart."""
        with self._kept():
            self._database.execute("UPDATE trajectories SET delivered = ? WHERE id = ?", (entry.delivered, entry.id))

    def end(self, trajectory: int, reward: float | None) -> None:
        """No more steps come."""
        with self._changing():
            self._database.execute(
                "UPDATE trajectories SET is_ended = 1, reward = ? WHERE id = ?", (reward, trajectory)
            )

    def close_trajectory(self, trajectory: int, outcome: str, *, keeps_rows: bool) -> None:
        """Nothing is left to do for it. keeps_rows: for a person to look at, until `forget`."""
        with self._changing():
            self._database.execute(
                "UPDATE trajectories SET outcome = ?, closed_at = ?, next_step = "
                "(SELECT coalesce(max(step) + 1, 0) FROM steps WHERE trajectory = id) WHERE id = ?",
                (outcome, time.time(), trajectory),
            )
            if not keeps_rows:
                self._database.execute("DELETE FROM steps WHERE trajectory = ?", (trajectory,))

    def forget(self, before: float) -> None:
        """Removes what was closed before this time."""
        with self._changing():
            self._database.execute(
                "DELETE FROM steps WHERE trajectory IN (SELECT id FROM trajectories WHERE closed_at < ?)", (before,)
            )
            self._database.execute("DELETE FROM trajectories WHERE closed_at < ?", (before,))

    def sync(self) -> None:
        """Brings all changes to the disk. May be called in another thread, which changes do not wait for."""
        self._disk.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        self.sync()
        self._opened.close()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Several statements as one change. Raises FailedPreconditionError as `_kept`."""
        with self._kept():
            self._database.execute("BEGIN")
            yield
            self._database.execute("COMMIT")

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """One change. Raises FailedPreconditionError where the disk does not take it; then nothing of it was kept."""
        try:
            yield
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise FailedPreconditionError(
                f"the journal cannot be written: {error}; make room on its disk: a call that is not "
                "recorded is not answered"
            ) from None


# How many steps there are is noted when they go; until then they say it.
_FIND = (
    "SELECT id, run, uid, sample, round, attempt, "
    "max(next_step, (SELECT coalesce(max(step) + 1, 0) FROM steps WHERE trajectory = id)), "
    "delivered, is_ended, reward, outcome FROM trajectories"
)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise UnavailableError(f"journal: cannot write {path}: {error.strerror}; choose another file") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(f"journal: another recorder uses {path}; give each a journal of its own") from None
        yield


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


def _tune(database: sqlite3.Connection, synchronous: str) -> None:
    for pragma in ("journal_mode = WAL", f"synchronous = {synchronous}", "wal_autocheckpoint = 0"):
        database.execute(f"PRAGMA {pragma}")


def _check_layout(database: sqlite3.Connection, path: Path) -> None:
    (layout,) = database.execute("PRAGMA user_version").fetchone()
    is_empty = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
    if layout != _LAYOUT and not (is_empty and layout == 0):
        raise InvalidArgumentError(
            f"journal: {path} has the layout {layout} and this version reads {_LAYOUT}; choose another file"
        )


def _make_tables(database: sqlite3.Connection) -> None:
    if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
        database.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {_LAYOUT};COMMIT;")


def _entry(found: tuple[Any, ...]) -> Entry:
    id_, run, uid, sample, round_, attempt, next_step, delivered, is_ended, reward, outcome = found
    name = TrajectoryName(run, uid, sample, round_, attempt)
    return Entry(name, id_, next_step, delivered, bool(is_ended), reward, outcome or "")


def _records(trajectory: int, rows: Sequence[Row], before: Row | None) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        shared = 0 if before is None else before.shared(row.prompt)
        logprobs = None if row.logprobs is None else row.logprobs.data
        rest, response = row.prompt[shared:].data, row.response.data
        yield trajectory, row.step, shared, rest, response, logprobs, row.stop_reason, row.policy_version
        before = row


def _row(found: tuple[Any, ...], before: Row | None) -> Row:
    step, shared, rest, response, logprobs, stop_reason, policy_version = found
    prompt, sampled = np.frombuffer(rest, np.int32), np.frombuffer(response, np.int32)
    if before is not None and shared:
        prompt = np.concatenate([np.concatenate([before.prompt, before.response])[:shared], prompt])
    values = None if logprobs is None else np.frombuffer(logprobs, np.float32)
    return Row(step, prompt, sampled, values, stop_reason, policy_version)
