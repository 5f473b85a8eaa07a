"""Runs in a journal's directory: their names and files, and what a process or a person left there."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gristmill.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.settings import Settings
from gristmill_service.storage.backends import StorageUnreachableError, open_storage
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.tables import any_table, compact, same


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def store(directory: Path) -> Iterator[JournalRunStore]:
    store = JournalRunStore(directory)
    yield store
    store.close()


def created(store: JournalRunStore, name: str = "run") -> JournalRunLog:
    log = store.create(name, b"{}")
    log.replay()
    return log


def execute(path: Path, statement: str) -> None:
    """As a person with the `sqlite3` shell."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


class TestRunStore:
    def test_a_directory_is_one_process_at_a_time(self, store: JournalRunStore, directory: Path) -> None:
        with pytest.raises(UnavailableError, match="in use by another gristmill"):
            JournalRunStore(directory)
        with pytest.raises(StorageUnreachableError, match="in use by another gristmill"):
            open_storage(Settings.model_validate({"journal_dir": directory}))

    def test_the_lock_is_given_back_once(self, tmp_path: Path) -> None:
        store = JournalRunStore(tmp_path)
        store.close()
        other = JournalRunStore(tmp_path)
        store.close()
        with pytest.raises(UnavailableError, match="in use by another gristmill"):
            JournalRunStore(tmp_path)
        other.close()

    def test_what_a_dead_process_had_half_created_or_deleted_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".creating-1").mkdir()
        (tmp_path / ".deleted-1").mkdir()
        JournalRunStore(tmp_path).close()
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "reserve"}

    def test_a_killed_process_loses_nothing(self, store: JournalRunStore, directory: Path, tmp_path: Path) -> None:
        log = store.create("a/run", b'{"dp_size":2}')
        log.replay()
        log.append(b"one", {0: any_table()})
        log.append(b"two", {})
        shutil.copytree(directory, tmp_path / "killed")
        again = JournalRunStore(tmp_path / "killed")
        assert again.names() == ["a/run"]
        log = again.open("a/run")
        assert log.config == b'{"dp_size":2}'
        replay = log.replay()
        assert (list(replay.records), replay.is_short()) == ([b"one", b"two"], False)
        assert log.retain({0}) == set()
        assert same(log.get(0), any_table())
        log.close()
        again.close()

    def test_a_closed_run_is_one_file(self, store: JournalRunStore, directory: Path) -> None:
        created(store).close()
        assert [path.name for path in (directory / "run-run").iterdir()] == ["journal.sqlite"]

    def test_its_tables_are_read_by_the_shell(self, store: JournalRunStore, directory: Path) -> None:
        log = created(store)
        log.append(b"one", {0: any_table()})
        compact(log, b"all")
        log.append(b"two", {1: any_table(), 2: any_table()})
        with closing(sqlite3.connect(f"file:{directory}/run-run/journal.sqlite?mode=ro", uri=True)) as database:
            assert database.execute("SELECT format, name, config FROM run").fetchall() == [(3, "run", "{}")]
            assert database.execute("SELECT number, next_table, first, last FROM snapshot").fetchall() == [(1, 1, 1, 1)]
            assert database.execute("SELECT number, content FROM pieces").fetchall() == [(1, b"all")]
            events = database.execute("SELECT number, next_table, record FROM events WHERE number > 1").fetchall()
            assert events == [(2, 3, b"two")]
            assert database.execute("SELECT number FROM tables").fetchall() == [(0,), (1,), (2,)]
        log.append(b"three", {})
        log.close()

    def test_a_log_is_long_once_it_is_much_longer_than_its_snapshot(self, store: JournalRunStore) -> None:
        log = created(store)
        while not log.is_long:
            log.append(bytes(1 << 20), {})
        assert log.log_bytes == 17 << 20
        compact(log, bytes(20 << 20))
        assert log.log_bytes == 20 << 20
        for _ in range(40):
            assert not log.is_long
            log.append(bytes(1 << 20), {})
        log.append(b"1", {})
        assert log.is_long
        log.close()
        log = store.open("run")
        log.replay()
        assert (log.is_long, log.log_bytes) == (True, (60 << 20) + 1)
        log.close()

    def test_unwanted_tables_are_deleted_when_a_run_is_opened_and_no_other_is_read(
        self, store: JournalRunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = created(store)
        log.append(b"one", {index: any_table(index) for index in range(4)})
        log.close()
        log = store.open("run")
        log.replay()
        read: list[int] = []
        monkeypatch.setattr(log._reader, "read_rows", read.append)
        assert log.retain({0, 2, 9}) == {9}
        assert read == []
        monkeypatch.undo()
        for number in (0, 2):
            assert same(log.get(number), any_table(number))
        for number in (1, 3, 9):
            with pytest.raises(NotFoundError):
                log.get(number)
        log.close()


class TestIdentity:
    def test_a_run_keeps_its_identity_and_another_of_its_name_has_another(self, store: JournalRunStore) -> None:
        log = created(store)
        assert len(log.run_id) == 32
        log.close()
        again = store.open("run")
        assert again.run_id == log.run_id
        store.delete("run")
        assert created(store).run_id != log.run_id
        store.delete("run")

    def test_a_directory_that_was_copied_is_no_other_run(self, store: JournalRunStore, directory: Path) -> None:
        created(store).close()
        shutil.copytree(directory / "run-run", directory / "run-copy")
        with pytest.raises(InvalidArgumentError, match="is of run 'run', not of 'copy'; move it back, or delete"):
            store.open("copy")
        shutil.move(directory / "run-copy", directory / f"hash-{64 * '0'}")
        assert store.names() == [f"hash-{64 * '0'}", "run"]
        with pytest.raises(InvalidArgumentError, match="is of run 'run', not of 'hash-0"):
            store.open(f"hash-{64 * '0'}")

    def test_a_name_that_looks_like_a_directory_is_a_name(self, store: JournalRunStore) -> None:
        name = f"hash-{64 * '1'}"
        created(store, name).close()
        assert store.names() == [name]
        store.open(name).close()
        store.delete(name)
        assert store.names() == []

    @pytest.mark.parametrize("name", ["a\0b", "%2e%2e", "?mode=memory", "日本語" * 40])
    def test_any_name_is_listed_and_opened_after_a_restart(
        self, store: JournalRunStore, directory: Path, name: str
    ) -> None:
        log = created(store, name)
        log.append(b"one", {})
        assert store.names() == [name], "while it is open"
        log.close()
        store.close()
        again = JournalRunStore(directory)
        assert again.names() == [name]
        log = again.open(name)
        assert log.replay().records == [b"one"]
        log.close()
        again.close()


class TestUnreadable:
    """No run keeps the others from being listed and opened, and what is refused is left as it was."""

    @pytest.mark.parametrize("name", ["a/run", "日本語" * 40])
    @pytest.mark.parametrize("content", [b"", b"{", bytes(100_000), b"SQLite format 3\0" + bytes(16368), None])
    def test_a_run_without_its_database_is_listed_refused_and_removed(
        self, store: JournalRunStore, directory: Path, name: str, content: bytes | None
    ) -> None:
        created(store, "good").close()
        created(store, name).close()
        [path] = {*directory.rglob("journal.sqlite")} - {directory / "run-good" / "journal.sqlite"}
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        [damaged] = {*store.names()} - {"good"}
        assert damaged == (name if name == "a/run" else path.parent.name)
        with pytest.raises(InvalidArgumentError, match="restore it, or delete the run"):
            store.open(damaged)
        assert content is None or path.read_bytes() == content
        store.open("good").close()
        store.delete(damaged)
        assert store.names() == ["good"]

    @pytest.mark.parametrize(
        ("statement", "reason"),
        [
            ("UPDATE run SET config = '{\"a\":1}'", "checksum of its configuration"),
            ("UPDATE run SET id = x'ff'", "checksum of its configuration"),
            ("UPDATE run SET format = 'two'", "does not describe a run"),
            ("DELETE FROM run", "does not describe a run"),
            ("DROP TABLE run", "no such table: run"),
            ("DROP TABLE events", "no such table: events"),
            ("DROP TABLE tables", "no such table: tables"),
            ("ALTER TABLE run DROP COLUMN boot", "no such column: boot"),
            ("DELETE FROM events WHERE number = 2", "records after 0 are missing"),
            ("UPDATE events SET record = x'00' WHERE number = 2", "checksum of record 2"),
            ("UPDATE events SET record = 'text' WHERE number = 2", "checksum of record 2"),
            ("UPDATE events SET record = NULL WHERE number = 2", "checksum of record 2"),
            ("UPDATE events SET next_table = 'x' WHERE number = 2", "checksum of record 2"),
            ("UPDATE events SET number = 9 WHERE number = 2", "checksum of record 9"),
        ],
    )
    def test_a_run_of_which_something_is_missing_is_refused(
        self, store: JournalRunStore, directory: Path, statement: str, reason: str
    ) -> None:
        log = created(store)
        for record in (b"one", b"two", b"three"):
            log.append(record, {})
        log.close()
        execute(directory / "run-run" / "journal.sqlite", statement)

        def open_it() -> None:
            log = store.open("run")
            log.replay()
            log.retain([])

        with pytest.raises(InvalidArgumentError, match=rf"{reason}.*; restore it, or delete the run"):
            open_it()

    @pytest.mark.parametrize("name", ["run", "日本語" * 40])
    def test_a_newer_format_is_refused_with_the_remedy(
        self, store: JournalRunStore, directory: Path, name: str
    ) -> None:
        created(store, name).close()
        [path] = directory.rglob("journal.sqlite")
        execute(path, "UPDATE run SET format = 4")
        content = path.read_bytes()
        assert store.names() == [name]
        with pytest.raises(
            InvalidArgumentError, match="has format 4 and this version reads 3; use the version that wrote it"
        ):
            store.open(name)
        assert path.read_bytes() == content

    def test_what_is_no_run_is_not_listed(self, store: JournalRunStore, directory: Path) -> None:
        for name in ("run-a b", "lost+found", "hash-1"):
            (directory / name).mkdir()
        assert store.names() == []

    def test_too_few_descriptors_are_no_damage(self, store: JournalRunStore, monkeypatch: pytest.MonkeyPatch) -> None:
        created(store).close()

        def refuse(*_: object, **__: object) -> sqlite3.Connection:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(sqlite3, "connect", refuse)
            with pytest.raises(UnavailableError, match="unable to open database file; fix the file system"):
                store.open("run")
        store.open("run").close()


class TestCreation:
    @pytest.mark.parametrize("fails", ["database.sync_directory", "JournalRunLog"])
    def test_a_creation_that_fails_after_the_run_has_its_name_leaves_nothing(
        self, store: JournalRunStore, directory: Path, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        def fail(path: Path, *_: object) -> None:
            if path.name in ("journal", "run-run"):
                raise OSError(5, "Input/output error")

        before = {*directory.iterdir()}
        with monkeypatch.context() as patched:
            patched.setattr(f"gristmill_service.storage.journal.run_store.{fails}", fail)
            with pytest.raises(UnavailableError, match="Input/output error"):
                store.create("run", b"{}")
        assert {*directory.iterdir()} == before
        store.create("run", b"{}").close()

    def test_a_run_is_created_once_though_many_try(self, store: JournalRunStore) -> None:
        logs, errors = list[JournalRunLog](), list[Exception]()

        def create() -> None:
            try:
                logs.append(store.create("run", b"{}"))
            except AlreadyExistsError as error:
                errors.append(error)

        threads = [threading.Thread(target=create) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(logs), len(errors)) == (1, 7)
        logs[0].close()

    @pytest.mark.parametrize("umask", [0, 0o022, 0o077])
    def test_files_are_their_owners_alone_whatever_the_umask(self, tmp_path: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            store = JournalRunStore(tmp_path / "new" / "journal", "interval")
            log = created(store)
            log.append(b"one", {0: any_table()})
            compact(log, b"snapshot")
        finally:
            os.umask(before)
        files = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
        assert len(files) == 8, "three directories, lock, reserve, and three of SQLite"
        for path in files:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        log.close()
        store.close()


class TestOpenLogs:
    def test_a_closed_log_takes_and_gives_nothing(self, store: JournalRunStore) -> None:
        log = created(store)
        log.append(b"one", {0: any_table()})
        log.close()
        calls: list[Callable[[], object]] = [
            lambda: log.append(b"two", {}),
            lambda: compact(log, b""),
            lambda: log.get(0),
            lambda: log.replay(),
        ]
        for call in calls:
            with pytest.raises(UnavailableError, match="is closed: the run is"):
                call()
        log.remove([0])
        log.flush()
        log.close()
        log = store.open("run")
        assert log.replay().records == [b"one"]
        assert same(log.get(0), any_table())
        log.close()

    def test_a_log_that_is_opened_again_is_closed(self, store: JournalRunStore) -> None:
        before = created(store)
        after = store.open("run")
        after.replay()
        with pytest.raises(UnavailableError, match="is closed: the run is"):
            before.append(b"one", {0: any_table()})
        with pytest.raises(UnavailableError, match="is closed: the run is"):
            compact(before, b"")
        after.append(b"one", {})
        before.close()
        assert store.open("run").replay().records == [b"one"]
        store.delete("run")

    def test_a_deleted_run_does_nothing_to_another_of_its_name(self, store: JournalRunStore, directory: Path) -> None:
        """A caller that still has its log may go on to use it."""
        before = created(store)
        before.append(b"one", {number: any_table(number) for number in range(3)})
        store.delete("run")
        after = created(store)
        after.append(b"kept", {0: any_table(7)})
        files = {path.name: path.read_bytes() for path in (directory / "run-run").iterdir()}
        calls: list[Callable[[], object]] = [
            lambda: before.append(b"lost", {4: any_table()}),
            lambda: before.get(0),
            lambda: compact(before, b"lost"),
            lambda: before.retain([0]),
            lambda: before.replay(),
        ]
        for call in calls:
            with pytest.raises(UnavailableError, match="is closed: the run is"):
                call()
        before.remove([0, 1])
        before.flush()
        before.close()
        assert {path.name: path.read_bytes() for path in (directory / "run-run").iterdir()} == files
        assert same(after.get(0), any_table(7))
        after.close()
