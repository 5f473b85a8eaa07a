"""A journal whose file system is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gristmill.errors import UnavailableError
from gristmill_service.storage.journal import disk_room
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.run_store import FullError
from tests.run.harness import wait_until
from tests.storage.tables import any_table, compact, same, snapshot_in


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JournalRunStore]:
    store = JournalRunStore(tmp_path / "journal")
    yield store
    store.close()


def created(store: JournalRunStore) -> JournalRunLog:
    log = store.create("run", b"{}")
    log.replay()
    return log


def limit(log: JournalRunLog, more_pages: int) -> None:
    """SQLite reports a database that may not grow as it does a full file system."""
    [[pages]] = log._writer.execute("PRAGMA page_count").fetchall()
    log._writer.execute(f"PRAGMA max_page_count = {pages + more_pages}")


def fix_free_space(store: JournalRunStore, free: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the store's file system have that many bytes free of a gigabyte."""

    def measure() -> None:
        room._total, room._least, room._free = 1 << 30, 16 << 20, free()

    room = store._room
    monkeypatch.setattr(room, "measure", measure)
    measure()


class TestRefusedWrites:
    def test_what_does_not_fit_is_refused_and_it_goes_on_when_there_is_room(
        self, store: JournalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk_room, "_FAILED_S", 0.3)
        log, reserve = created(store), tmp_path / "journal" / "reserve"
        log.append(b"one", {0: any_table()})
        limit(log, 3)
        with pytest.raises(
            FullError, match=r"the file system of .*run-run is full; free or add space, or lower max_row"
        ):
            log.append(b"two", {1: any_table(), 2: any_table(tokens=50_000)})
        assert not reserve.exists(), "it was given up, which did not help here"
        with pytest.raises(UnavailableError, match="is full; free or add space"):
            log.check()
        assert not log.is_lost
        log.append(b"an acknowledgement", {})
        assert "is full" in store.unhealthy_reason(), "although the file system says that it has room"
        limit(log, 1000)
        wait_until(lambda: store.unhealthy_reason() == "")
        assert reserve.stat().st_size
        log.check()
        log.append(b"two", {1: any_table(1)})
        assert log.replay().records == [b"one", b"an acknowledgement", b"two"]
        assert log.retain([0, 1, 2]) == {2}
        assert same(log.get(1), any_table(1))
        log.close()

    def test_rows_that_are_too_large_for_what_is_free_are_refused_before_anything_is_written(
        self, store: JournalRunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log, free = created(store), 40_000_000
        fix_free_space(store, lambda: free, monkeypatch)
        log.check(row_bytes=1_000_000)
        assert store.unhealthy_reason() == ""
        with pytest.raises(FullError, match=r"is full \(40000000 bytes are free, a request needs 104194304\); free or"):
            log.check(has_rows=False, row_bytes=50_000_000)
        log.check()
        log.check(row_bytes=1_000_000)
        assert "is full (40000000 bytes are free" in store.unhealthy_reason()
        free = 200_000_000
        assert store.unhealthy_reason() == ""
        log.check(row_bytes=50_000_000)
        free = 40_000_000
        monkeypatch.setattr(disk_room, "_REFUSED_S", 0.3)
        store.unhealthy_reason()
        with pytest.raises(FullError):
            log.append(b"rows", {0: any_table(tokens=12_000_000)})
        assert store.unhealthy_reason()
        wait_until(lambda: not store.unhealthy_reason())
        assert not log.is_lost
        log.close()

    def test_records_that_cannot_be_written_are_refused_until_it_is_tried_again(
        self, store: JournalRunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk_room, "_FAILED_S", 0.3)
        log = created(store)
        limit(log, 0)
        with pytest.raises(FullError):
            log.append(bytes(100_000), {})
        with pytest.raises(FullError):
            log.check(has_rows=False)
        assert store.unhealthy_reason()
        wait_until(lambda: not store.unhealthy_reason())
        log.check(has_rows=False)
        log.close()

    def test_a_compaction_that_does_not_fit_leaves_the_log_as_it_was(self, store: JournalRunStore) -> None:
        log = created(store)
        log.append(b"one", {})
        limit(log, 0)
        with pytest.raises(FullError):
            compact(log, bytes(100_000))
        log.append(b"two", {})
        replay = log.replay()
        assert (snapshot_in(replay), replay.records) == (None, [b"one", b"two"])
        log.close()

    def test_the_reserve_is_enough_for_what_makes_room(
        self, store: JournalRunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = created(store)
        limit(log, 0)
        monkeypatch.setattr(DiskRoom, "give_up_reserve", lambda room: limit(log, 1000))
        log.append(b"one", {0: any_table(tokens=50_000)})
        assert same(log.get(0), any_table(tokens=50_000))
        log.close()


class TestSmallFileSystem:
    SIZE = 40 << 20

    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[Path]:
        path = tmp_path / "disk"
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.SIZE}", "tmpfs", str(path)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small file system needs root")
        yield path
        subprocess.run(["umount", "-l", str(path)], check=True)

    def fill(self, log: JournalRunLog, tokens: int = 100_000) -> list[int]:
        """Appends tables until they are refused. Returns their numbers."""
        numbers = []
        with suppress(UnavailableError):
            for _ in range(10_000):
                log.check()
                log.append(b"rows", {log.first_number: any_table(rows=2, tokens=tokens)})
                numbers.append(log.first_number - 1)
        assert not log.is_lost
        return numbers

    def settle(self, store: JournalRunStore, log: JournalRunLog) -> str:
        """What happens each second."""
        log.flush()
        return store.unhealthy_reason()

    def test_rows_are_refused_and_acknowledgements_make_room(self, disk: Path) -> None:
        store = JournalRunStore(disk)
        log = created(store)
        numbers = []
        while more := self.fill(log):
            numbers += more
            self.settle(store, log)
        assert len(numbers) > 20, "of about 1 MB"
        assert "is full; free or add space" in self.settle(store, log)
        for number in numbers[::2]:
            log.append(b"acknowledged", {})
            log.remove([number])
            if number % 4 == 0:
                self.settle(store, log)
        assert self.settle(store, log) == ""
        kept = numbers[1::2]
        while more := self.fill(log):
            kept += more
            self.settle(store, log)
        assert len(kept) > len(numbers) - 5, "what was freed is used again"
        log.close()
        log = store.open("run")
        log.replay()
        assert log.retain(kept) == set()
        for number in kept:
            assert same(log.get(number), any_table(rows=2, tokens=100_000))
        log.close()
        store.close()

    def test_producers_that_go_on_trying_do_not_take_what_acknowledgements_need(self, disk: Path) -> None:
        store = JournalRunStore(disk, "never")
        log = created(store)
        for _ in range(3):
            for tokens in (200_000, 20_000, 3000, 400, 50, 1, 1, 1):
                while self.fill(log, tokens):
                    self.settle(store, log)
            assert "is full" in self.settle(store, log)
            for number in range(200):
                log.append(b"a rank moved on, a batch is freed, its rows are no longer needed", {})
                if number % 50 == 0:
                    log.flush()
        log.close()
        store.close()

    def test_another_program_fills_it_and_gives_it_back(self, disk: Path) -> None:
        store = JournalRunStore(disk)
        log = created(store)
        for number in range(10):
            log.append(b"rows", {number: any_table(rows=2, tokens=100_000)})
        other = disk / "other"
        with other.open("wb") as file, suppress(OSError):
            while True:
                os.posix_fallocate(file.fileno(), other.stat().st_size, 1 << 16)
        assert "is full" in self.settle(store, log)
        with pytest.raises(UnavailableError):
            log.append(b"rows", {log.first_number: any_table(tokens=50_000)})
        for _ in range(20):
            log.append(b"acknowledged", {})
        other.unlink()
        assert self.settle(store, log) == ""
        log.append(b"rows", {log.first_number: any_table(7)})
        assert same(log.get(log.first_number - 1), any_table(7))
        assert same(log.get(9), any_table(rows=2, tokens=100_000))
        log.close()
        store.close()

    def test_killed_when_full_it_starts_again(self, disk: Path, tmp_path: Path) -> None:
        store = JournalRunStore(disk)
        log = created(store)
        numbers = self.fill(log)
        store.close()
        again = JournalRunStore(disk)
        log = again.open("run")
        assert len([*log.replay().records]) == len(numbers)
        assert log.retain(numbers) == set()
        log.append(b"acknowledged", {})
        log.close()
        again.close()
