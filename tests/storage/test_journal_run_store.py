"""Runs in a journal's directory, and what is found there after a process or a disk died."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import Fsync
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.tables import any_table, same, whole


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JournalRunStore]:
    store = JournalRunStore(tmp_path / "journal")
    yield store
    store.close()


class TestRunStore:
    def test_a_run_is_there_again_with_its_configuration_records_and_rows(self, tmp_path: Path) -> None:
        store = JournalRunStore(tmp_path)
        log = store.create("a/run", b'{"dp_size":2}')
        assert (log.replay().snapshot, list(log.replay().records)) == (None, [])
        number, kept = log.put(any_table())
        log.append(b"one")
        log.append(b"two")
        store.close()  # as a killed process leaves it: nothing is closed but the lock

        again = JournalRunStore(tmp_path)
        assert again.names() == ["a/run"]
        log = again.open("a/run")
        assert log.config == b'{"dp_size":2}'
        assert tuple(map(list, [log.replay().records])) == ([b"one", b"two"],)
        assert log.retain({number}, whole) == set()
        assert same(log.get(number), any_table())
        assert same(kept, any_table()), "views outlive the log that gave them"
        again.close()

    def test_a_snapshot_stands_for_what_was_before_it(self, store: JournalRunStore) -> None:
        log = store.create("run", b"{}")
        log.replay()
        log.append(b"before")
        log.compact(b"all before")
        log.append(b"after")
        log.close()
        replay = store.open("run").replay()
        assert (replay.snapshot, list(replay.records)) == (b"all before", [b"after"])

    def test_a_log_is_long_once_it_is_much_longer_than_its_snapshot(self, store: JournalRunStore) -> None:
        log = store.create("run", b"{}")
        log.replay()
        while not log.is_long:
            log.append(bytes(1 << 20))
        log.compact(bytes(20 << 20))
        assert not log.is_long
        for _ in range(40):
            assert not log.is_long
            log.append(bytes(1 << 20))
        assert log.is_long

    def test_runs_are_created_once_and_deleted_whole(self, store: JournalRunStore, tmp_path: Path) -> None:
        log = store.create("run", b"{}")
        with pytest.raises(AlreadyExistsError):
            store.create("run", b"{}")
        log.put(any_table())
        log.close()
        store.delete("run")
        store.delete("run")
        assert store.names() == []
        assert {path.name for path in (tmp_path / "journal").iterdir()} == {"lock", "reserve"}
        with pytest.raises(NotFoundError):
            store.open("run")

    def test_a_directory_is_one_process_at_a_time(self, store: JournalRunStore, tmp_path: Path) -> None:
        with pytest.raises(FailedPreconditionError, match="in use by another gristmill"):
            JournalRunStore(tmp_path / "journal")

    def test_a_newer_format_is_refused_with_the_remedy(self, store: JournalRunStore, tmp_path: Path) -> None:
        store.create("run", b"{}").close()
        description = tmp_path / "journal" / "run-run" / "run.json"
        description.write_text(description.read_text().replace('"format":1', '"format":2'))
        with pytest.raises(InvalidArgumentError, match="has format 2 and this version reads up to 1; use a newer"):
            store.open("run")

    def test_what_a_dead_process_had_half_created_or_deleted_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".creating-1").mkdir()
        (tmp_path / ".deleted-1").mkdir()
        JournalRunStore(tmp_path).close()
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "reserve"}

    def test_a_full_file_system_refuses_and_goes_on_when_there_is_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = JournalRunStore(tmp_path)
        log = store.create("run", b"{}")
        log.replay()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("gristmill_service.storage.journal.row_segments.write_at", full)
            with pytest.raises(UnavailableError, match="is full; give it more room"):
                log.put(any_table())
            patched.setattr(DiskRoom, "_has_room", lambda self: False)
            assert "is full" in store.unhealthy_reason()
            log.append(b"one")
            with pytest.raises(UnavailableError, match="is full"):
                log.put(any_table())
        assert store.unhealthy_reason() == "", "looking finds that there is room"
        number, _ = log.put(any_table())
        assert same(log.get(number), any_table())
        assert store.unhealthy_reason() == ""
        log.close()
        store.close()


class TestIdentity:
    def test_a_run_keeps_its_identity_and_another_of_its_name_has_another(self, store: JournalRunStore) -> None:
        log = store.create("run", b"{}")
        first = log.run_id
        assert len(first) == 32
        log.close()
        assert store.open("run").run_id == first
        store.delete("run")
        assert store.create("run", b"{}").run_id != first

    def test_a_directory_that_was_copied_is_no_other_run(self, store: JournalRunStore, tmp_path: Path) -> None:
        store.create("run", b"{}").close()
        shutil.copytree(tmp_path / "journal" / "run-run", tmp_path / "journal" / "run-copy")
        with pytest.raises(InvalidArgumentError, match="is of run 'run', not of 'copy'; move it back, or remove"):
            store.open("copy")
        shutil.move(tmp_path / "journal" / "run-copy", tmp_path / "journal" / f"hash-{64 * '0'}")
        assert store.names() == [f"hash-{64 * '0'}", "run"]
        with pytest.raises(InvalidArgumentError, match="is of run 'run', not of 'hash-0"):
            store.open(f"hash-{64 * '0'}")

    def test_a_name_that_looks_like_a_directory_is_a_name(self, store: JournalRunStore) -> None:
        name = f"hash-{64 * '1'}"
        store.create(name, b"{}").close()
        assert store.names() == [name]
        store.open(name).close()
        store.delete(name)
        assert store.names() == []


class Machine:
    """Runs one process after another on a journal; each finds what the one before it left when it was killed."""

    def __init__(self, directory: Path, fsync: Fsync) -> None:
        self.directory, self._fsync = directory, fsync
        self.mark = directory / "run-run" / "boot-id"
        self._store = JournalRunStore(directory, fsync)
        self.log = self._store.create("run", b"{}")
        self.log.replay()
        self.log.append(b"one")

    def restart_process(self) -> bool:
        self._store.close()
        self._store = JournalRunStore(self.directory, self._fsync)
        self.log = self._store.open("run")
        return self.log.replay().is_short()

    def go_down(self) -> None:
        """As a log looks to a later boot; what is on the disk stays."""
        if self.mark.exists():
            self.mark.write_text("another boot")


class TestMachineThatWentDown:
    @pytest.mark.parametrize("fsync", ["interval", "never"])
    def test_a_log_that_was_open_may_be_short_until_a_record_notes_that(self, tmp_path: Path, fsync: Fsync) -> None:
        machine = Machine(tmp_path, fsync)
        machine.go_down()
        assert machine.restart_process()
        machine.log.close()
        assert machine.restart_process(), "nothing was appended that notes it"
        assert machine.restart_process()
        machine.log.append(b"noted")
        machine.log.append(b"more")
        assert not machine.restart_process()
        machine.go_down()
        assert machine.restart_process()
        machine.log.append(b"noted")
        machine.log.close()
        assert not machine.restart_process()

    def test_a_process_that_was_killed_left_all_to_the_machine(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, "never")
        assert machine.mark.exists()
        assert not machine.restart_process()

    @pytest.mark.parametrize("fsync", ["interval", "never"])
    def test_a_log_that_was_closed_is_safe(self, tmp_path: Path, fsync: Fsync) -> None:
        machine = Machine(tmp_path, fsync)
        machine.log.close()
        machine.go_down()
        assert not machine.restart_process()

    def test_what_is_synced_before_it_is_answered_is_safe(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, "always")
        machine.log.sync()
        machine.go_down()
        assert not machine.restart_process()

    def test_a_log_that_was_written_under_another_setting_may_be_short(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path, "always")
        machine.mark.write_text("another boot")
        assert machine.restart_process()
        machine.log.append(b"noted")
        machine.log.sync()
        assert not machine.restart_process()


class TestDamage:
    """No run keeps the others from being listed and opened."""

    @pytest.mark.parametrize("name", ["a/run", "日本語" * 40])
    @pytest.mark.parametrize("content", ["", "{", '{"format":1}', '{"format":2,"run":7}', "[]", None])
    def test_a_run_without_its_description_is_listed_refused_and_removed(
        self, store: JournalRunStore, tmp_path: Path, name: str, content: str | None
    ) -> None:
        store.create("good", b"{}").close()
        store.create(name, b"{}").close()
        (path,) = {one.parent for one in (tmp_path / "journal").rglob("run.json")} - {tmp_path / "journal" / "run-good"}
        (path / "run.json").unlink()
        if content is not None:
            (path / "run.json").write_text(content)
        (damaged,) = set(store.names()) - {"good"}
        assert damaged == (name if name == "a/run" else path.name)
        with pytest.raises(InvalidArgumentError, match="restore it, or remove the run"):
            store.open(damaged)
        store.open("good").close()
        store.delete(damaged)
        assert store.names() == ["good"]

    def test_a_run_of_a_newer_format_is_listed(self, store: JournalRunStore, tmp_path: Path) -> None:
        store.create("日本語" * 40, b"{}").close()
        (description,) = (tmp_path / "journal").rglob("run.json")
        description.write_text(description.read_text().replace('"format":1', '"format":2'))
        assert store.names() == ["日本語" * 40]
        with pytest.raises(InvalidArgumentError, match="has format 2 and this version reads up to 1"):
            store.open("日本語" * 40)

    def test_a_run_without_its_log_is_refused(self, store: JournalRunStore, tmp_path: Path) -> None:
        store.create("run", b"{}").close()
        (tmp_path / "journal" / "run-run" / "events-000000.log").unlink()
        with pytest.raises(InvalidArgumentError, match="has no event log; restore it, or remove the run"):
            store.open("run")

    def test_what_is_no_run_is_not_listed(self, store: JournalRunStore, tmp_path: Path) -> None:
        for name in ("run-a b", "lost+found", "hash-1"):
            (tmp_path / "journal" / name).mkdir()
        assert store.names() == []

    def test_a_long_name_is_listed_after_a_restart(self, store: JournalRunStore) -> None:
        store.create("日本語" * 40, b"{}").close()
        assert store.names() == ["日本語" * 40]


class TestCreation:
    @pytest.mark.parametrize(
        "config",
        [
            b'{"a":18446744073709551616}',
            b'{"a":-9223372036854775809}',
            b'{"a":1' + b"0" * 400 + b"}",
            b'{"a":NaN}',
            b"{",
        ],
    )
    def test_a_configuration_that_could_not_be_read_again_leaves_nothing(
        self, store: JournalRunStore, tmp_path: Path, config: bytes
    ) -> None:
        before = {*(tmp_path / "journal").iterdir()}
        with pytest.raises(InvalidArgumentError, match="run 'run': its configuration cannot be stored as JSON"):
            store.create("run", config)
        assert {*(tmp_path / "journal").iterdir()} == before

    @pytest.mark.parametrize("fails", ["sync_directory", "JournalRunLog"])
    def test_a_creation_that_fails_after_the_run_has_its_name_leaves_nothing(
        self, store: JournalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        before = {*(tmp_path / "journal").iterdir()}
        with monkeypatch.context() as patched:
            patched.setattr(f"gristmill_service.storage.journal.run_store.{fails}", fail)
            with pytest.raises(UnavailableError, match="Input/output error"):
                store.create("run", b"{}")
        assert {*(tmp_path / "journal").iterdir()} == before
        store.create("run", b"{}").close()

    @pytest.mark.parametrize("umask", [0, 0o022, 0o077])
    def test_files_are_their_owners_alone_whatever_the_umask(self, tmp_path: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            store = JournalRunStore(tmp_path / "new" / "journal", "interval")
            log = store.create("run", b"{}")
            log.replay()
            log.put(any_table())
            log.append(b"one")
            log.compact(b"snapshot")
        finally:
            os.umask(before)
        found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
        assert len(found) == 9
        for path in found:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        log.close()
        store.close()


class TestOpenLogs:
    def test_a_log_that_is_opened_anew_is_closed(self, store: JournalRunStore) -> None:
        before = store.create("run", b"{}")
        before.replay()
        after = store.open("run")
        after.replay()
        for call in (lambda: before.append(b"one"), lambda: before.put(any_table()), lambda: before.compact(b"")):
            with pytest.raises(UnavailableError, match="closed meanwhile"):
                call()
        after.append(b"one")
        before.close()
        assert list(store.open("run").replay().records) == [b"one"]

    def test_a_deleted_run_does_nothing_to_another_of_its_name(self, store: JournalRunStore, tmp_path: Path) -> None:
        """Whoever still has its log may go on to use it."""
        before = store.create("run", b"{}")
        before.replay()
        numbers = [before.put(any_table(number))[0] for number in range(3)]
        store.delete("run")
        after = store.create("run", b"{}")
        after.replay()
        kept, _ = after.put(any_table(7))
        after.append(b"kept", [kept])
        files = {path.name: path.read_bytes() for path in (tmp_path / "journal" / "run-run").iterdir()}
        for call in (
            lambda: before.append(b"lost"),
            lambda: before.put(any_table()),
            lambda: before.get(numbers[0]),
            lambda: before.compact(b"lost"),
            before.replay,
        ):
            with pytest.raises(UnavailableError, match="closed meanwhile"):
                call()
        before.remove(numbers)
        before.flush()
        before.close()
        before.close()
        assert {path.name: path.read_bytes() for path in (tmp_path / "journal" / "run-run").iterdir()} == files
        assert same(after.get(kept), any_table(7))
        after.close()

    def test_the_lock_is_given_back_once(self, tmp_path: Path) -> None:
        store = JournalRunStore(tmp_path)
        store.close()
        other = JournalRunStore(tmp_path)
        store.close()
        with pytest.raises(FailedPreconditionError, match="in use by another gristmill"):
            JournalRunStore(tmp_path)
        other.close()


def test_what_a_killed_process_left_is_on_the_disk_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = JournalRunStore(tmp_path, "always")
    log = before.create("run", b"{}")
    log.replay()
    log.append(b"one")
    before.close()  # killed before the record was synced

    synced: list[str] = []
    real = os.fdatasync

    def noted(file: int) -> None:
        # Journals of other tests' services are synced in this process, too.
        name = Path(os.readlink(f"/proc/self/fd/{file}"))
        synced.extend([name.name] if name.is_relative_to(tmp_path) else [])
        real(file)

    monkeypatch.setattr(os, "fdatasync", noted)
    store = JournalRunStore(tmp_path, "always")
    log = store.open("run")
    assert list(log.replay().records) == [b"one"]
    log.sync()
    assert synced == ["events-000000.log"]
    log.sync()
    assert len(synced) == 1
    store.close()
