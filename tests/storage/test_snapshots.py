"""Snapshots of a log in a journal: whatever interrupts one, the log is one whole snapshot and all records after it."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage.journal import database, disk_room, run_log
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.run_store import FullError
from tests.storage.tables import any_table, compact, same, snapshot_in
from tests.strategies import LAW


class KilledError(BaseException):
    """The process ends here."""


class Dying:
    """A connection that ends its process before one of its statements."""

    def __init__(self, connection: sqlite3.Connection, before: int, on_death: Callable[[], None]) -> None:
        self._connection, self._left, self._on_death = connection, before, on_death

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        if self._left == 0:
            self._on_death()
            self._left = -1
            raise KilledError
        self._left -= 1
        return self._connection.execute(*arguments)


class Journal:
    """A run's log, of which one process after another is killed. A snapshot says how many records it includes.

    records: those that were appended; `asked`: one that may have been, when the process was killed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._lives = directory, 0
        self.records: list[bytes] = []
        self.asked: list[bytes] = []
        self._open(None)

    def _open(self, files: dict[str, bytes] | None) -> None:
        self._lives += 1
        self._run = self._directory / str(self._lives) / "run-run"
        self._store = JournalRunStore(self._run.parent, "never")
        if files is None:
            self.log = self._store.create("run", b"{}")
        else:
            self._run.mkdir()
            for name, content in files.items():
                (self._run / name).write_bytes(content)
            self.log = self._store.open("run")
        replay = self.log.replay()
        count = int(snapshot_in(replay) or b"0")
        left = [*self.records[:count], *replay.records]
        assert left in (self.records, self.records + self.asked)
        assert not replay.is_short()
        self.records, self.asked = left, []
        self.log.retain([])

    def append(self) -> None:
        self.asked = [b"%d" % len(self.records) + bytes(5000)]
        self.log.append(self.asked[0], {})
        self.records += self.asked
        self.asked = []

    def compact(self, appends: list[int], fails: bool) -> None:
        """Writes a snapshot, with so many appends before each further piece."""
        first = b"%d" % len(self.records)

        def pieces() -> Iterator[bytes]:
            yield first
            for count in appends:
                for _ in range(count):
                    self.append()
                yield b" " * 20_000
            if fails:
                raise UnavailableError("no snapshot can be made")

        with suppress(UnavailableError):
            self.log.compact(self.log.end, pieces())

    def killed(self, step: Callable[[], None], before: int | None) -> None:
        """Performs a step, in which the process is killed before that statement, or after it."""
        files: list[dict[str, bytes]] = []
        connection = self.log._writer.sqlite
        if before is not None:
            self.log._writer.sqlite = Dying(connection, before, lambda: files.append(self.files()))  # type: ignore[assignment]
        with suppress(KilledError):
            step()
        self.log._writer.sqlite = connection
        left = files[0] if files else self.files()
        self.close()
        self._open(left)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self._run.iterdir() if not path.name.endswith("-shm")}

    def close(self) -> None:
        self.log.close()
        self._store.close()


BEFORE = st.one_of(st.none(), st.integers(0, 40))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 4)),
        st.tuples(st.just("compact"), st.lists(st.integers(0, 2), max_size=4), st.booleans()),
        st.tuples(st.just("flush")),
        st.tuples(st.just("killed compact"), st.lists(st.integers(0, 2), max_size=4), st.booleans(), BEFORE),
        st.tuples(st.just("killed flush"), BEFORE),
    ),
    max_size=12,
)


@LAW
@given(STEPS)
def test_whatever_interrupts_a_snapshot_the_log_is_whole(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(DiskRoom, "wal_limit", 100_000)
        patched.setattr(run_log, "_REMOVAL_S", 0.0)
        journal = Journal(Path(directory))
        for kind, *given in steps:
            match kind:
                case "append":
                    for _ in range(given[0]):
                        journal.append()
                case "compact":
                    journal.compact(given[0], given[1])
                case "flush":
                    journal.log.flush()
                case "killed compact":
                    journal.killed(lambda given=given: journal.compact(given[0], given[1]), given[2])  # type: ignore[misc]
                case "killed flush":
                    journal.killed(journal.log.flush, given[0])
        journal.killed(lambda: None, None)
        journal.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[JournalRunLog]:
    store = JournalRunStore(tmp_path / "journal")
    log = store.create("run", b"{}")
    log.replay()
    yield log
    log.close()
    store.close()


def rows_of(log: JournalRunLog, table: str) -> list[int]:
    return [number for [number] in log._reader.execute(f"SELECT number FROM {table} ORDER BY number")]


def test_what_a_snapshot_replaced_is_removed_with_the_next_flush(log: JournalRunLog) -> None:
    for number in range(40):
        log.append(b"%d" % number, {})
    log.compact(log.end, [b"one", b"two"])
    log.append(b"after", {})
    log.compact(log.end, [b"three", b"four"])
    assert rows_of(log, "pieces") == [1, 2, 3, 4]
    log.flush()
    assert (rows_of(log, "pieces"), rows_of(log, "events")) == ([3, 4], [])


def test_a_snapshot_that_was_not_finished_is_removed_and_the_one_before_stays(log: JournalRunLog) -> None:
    log.append(b"one", {})
    log.compact(log.end, [b"all"])
    log.append(b"two", {})
    log.flush()

    def pieces() -> Iterator[bytes]:
        yield b"half"
        log.append(b"meanwhile", {})
        log.flush()
        assert rows_of(log, "pieces") == [1, 2], "it is still being written"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        log.compact(log.end, pieces())
    assert log.log_bytes == len(b"alltwomeanwhile")
    log.flush()
    assert rows_of(log, "pieces") == [1]
    replay = log.replay()
    assert (snapshot_in(replay), replay.records) == (b"all", [b"two", b"meanwhile"])


def test_a_snapshot_may_be_larger_than_what_sqlite_takes_as_one_value(log: JournalRunLog) -> None:
    log._writer.sqlite.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 << 20)
    log.append(b"one", {})
    compact(log, bytes(5 << 20))
    assert snapshot_in(log.replay()) == bytes(5 << 20)


def test_one_that_sqlite_refuses_leaves_the_log_as_it_was(log: JournalRunLog) -> None:
    log._writer.sqlite.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
    log.append(b"one", {})
    with pytest.raises(UnavailableError, match=r"a snapshot cannot be written: .*: string or blob too big"):
        log.compact(log.end, [bytes(1000), bytes(200_000)])
    assert not log.is_lost
    log.append(b"two", {})
    assert log.replay().records == [b"one", b"two"]


def test_one_without_space_is_refused_at_once_and_rows_are_not(
    log: JournalRunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(b"one", {})
    compact(log, bytes(3 << 20))
    log.append(b"two", {})

    def measure() -> None:
        room._total, room._least, room._free = 1 << 30, 16 << 20, 20 << 20

    room = log._room
    monkeypatch.setattr(room, "measure", measure)
    with pytest.raises(FullError, match=r"is full \(20971520 bytes are free, a snapshot of the log needs 2\d{7}\)"):
        log.compact(log.end, iter(()))
    log.check(row_bytes=1 << 20)
    assert room._least == disk_room._LEAST_FREE
    assert log._room.unhealthy_reason([log.reusable]) == ""


@pytest.mark.parametrize("change", ["DELETE FROM pieces WHERE number = 2", "UPDATE pieces SET content = x'00'"])
def test_a_damaged_piece_sets_the_run_aside(log: JournalRunLog, change: str) -> None:
    log.append(b"one", {})
    log.compact(log.end, [b"one", b"two"])
    log._writer.execute(change)
    with pytest.raises(InvalidArgumentError, match=r"piece \d of the snapshot is missing or damaged; restore it"):
        snapshot_in(log.replay())


@pytest.mark.parametrize("change", ["number = 0", "last = 1", "bytes = 1", "next_table = 'x'", "checksum = NULL"])
def test_a_damaged_row_of_the_snapshot_sets_the_run_aside(log: JournalRunLog, change: str) -> None:
    log.append(b"one", {})
    log.compact(log.end, [b"one", b"two"])
    log._writer.execute(f"UPDATE snapshot SET {change}")
    with pytest.raises(InvalidArgumentError, match="the checksum of the snapshot does not match; restore it"):
        log.replay()


class TestRowsInPlace:
    """CPython keeps memory for each use of `blobopen`, for as long as the connection is open."""

    def test_small_rows_do_not_use_it(self, log: JournalRunLog) -> None:
        log.append(b"one", {0: any_table(tokens=15_000)})
        assert same(log.get(0), any_table(tokens=15_000))
        assert (log._writer._blobs, log._reader._blobs) == (0, 0)

    def test_connections_that_used_it_often_are_opened_again(
        self, log: JournalRunLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database, "_MOST_BLOBS", 3)
        before = log._writer.sqlite, log._reader.sqlite
        large = any_table(rows=1, tokens=80_000)
        for number in range(8):
            log.append(b"rows", {number: large})
            assert same(log.get(number), large)
            assert 0 < log._writer._blobs <= 3
            assert 0 < log._reader._blobs <= 3
        for connection in before:
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                connection.execute("SELECT 1")
        assert log._reader.sqlite.text_factory is bytes
        assert log.replay().records == [b"rows"] * 8
