"""What is left of a run when its process, its machine or its disk dies."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import Fsync, JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.run_store import LogLostError
from tests.storage.tables import any_table, compact, digests_of, lost_tables, same

FRAME_BYTES = 24 + database.PAGE_BYTES
NAMES = ("journal.sqlite", "journal.sqlite-wal")
FSYNCS: list[Fsync] = ["always", "interval", "never"]
every_fsync = pytest.mark.parametrize("fsync", FSYNCS)


class Machine:
    """Runs one process after another on a journal. Each finds what the one before it had written when it was killed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory, self._lives, self._boots = directory, 0, 0
        self._patch = monkeypatch
        self._opened: list[JournalRunLog | JournalRunStore] = []
        self.boot()
        self.restart()

    def boot(self) -> None:
        self._boots += 1
        self._patch.setattr(database, "this_boot", lambda boot=str(self._boots): boot)

    @property
    def run(self) -> Path:
        return self._directory / str(self._lives) / "run-run"

    @property
    def wal(self) -> Path:
        return self.run / "journal.sqlite-wal"

    def files(self) -> dict[str, bytes]:
        """What a process leaves that is killed now."""
        return {name: (self.run / name).read_bytes() for name in NAMES if (self.run / name).exists()}

    def restart(self, fsync: Fsync = "interval", files: dict[str, bytes] | None = None) -> bool:
        """Whether the next process finds the log short. files: what is left of the one before, where it is less."""
        files = self.files() if files is None else files
        self._lives += 1
        store = JournalRunStore(self.run.parent, fsync)
        self._opened.append(store)
        if files:
            self.run.mkdir()
        for name, content in files.items():
            (self.run / name).write_bytes(content)
        self.log = store.open("run") if files else store.create("run", b"{}")
        self._opened.append(self.log)
        return self.log.replay().is_short()

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path, monkeypatch)
    yield machine
    machine.close()


class TestMachineThatWentDown:
    @pytest.mark.parametrize("fsync", ["interval", "never"])
    def test_a_log_that_was_open_may_be_short_until_a_record_notes_that(self, machine: Machine, fsync: Fsync) -> None:
        assert not machine.restart(fsync)
        machine.log.append(b"one", {})
        machine.boot()
        assert machine.restart(fsync)
        machine.log.close()
        assert machine.restart(fsync), "nothing was appended that notes it"
        assert machine.restart(fsync)
        machine.log.append(b"noted", {})
        machine.log.append(b"more", {})
        assert not machine.restart(fsync)
        machine.boot()
        assert machine.restart(fsync)
        machine.log.append(b"noted", {})
        machine.log.close()
        assert not machine.restart(fsync)

    def test_tables_that_are_deleted_note_nothing(self, machine: Machine) -> None:
        machine.restart()
        machine.log.append(b"one", {0: any_table()})
        machine.boot()
        assert machine.restart()
        assert machine.log.retain([]) == set()
        compact(machine.log, b"all")
        machine.log.flush()
        assert machine.restart()
        machine.log.close()
        assert machine.restart()

    @every_fsync
    def test_a_process_that_was_killed_left_all_to_the_machine(self, machine: Machine, fsync: Fsync) -> None:
        machine.restart(fsync)
        machine.log.append(b"one", {})
        assert not machine.restart(fsync)
        assert machine.log.replay().records == [b"one"]

    @every_fsync
    def test_a_log_that_was_closed_is_safe(self, machine: Machine, fsync: Fsync) -> None:
        machine.restart(fsync)
        machine.log.append(b"one", {})
        machine.log.close()
        machine.boot()
        assert not machine.restart(fsync)
        assert machine.log.replay().records == [b"one"]

    def test_what_is_synced_before_it_is_answered_is_safe(self, machine: Machine) -> None:
        machine.restart("always")
        machine.log.append(b"one", {})
        machine.boot()
        assert not machine.restart("always")

    def test_a_log_that_was_written_under_another_setting_may_be_short(self, machine: Machine) -> None:
        machine.restart("never")
        machine.log.append(b"one", {})
        machine.boot()
        assert machine.restart("always")
        machine.log.append(b"noted", {})
        machine.boot()
        assert not machine.restart("always")

    def test_a_run_that_was_moved_from_another_machine_while_it_was_open_may_be_short(self, machine: Machine) -> None:
        machine.restart()
        machine.log.append(b"one", {})
        compact(machine.log, b"all")
        machine.boot()
        assert machine.restart()


class TestTransactions:
    """Whatever is left of a WAL, it is the first records with all of their tables."""

    def appended(self, machine: Machine, fsync: Fsync, records: int) -> list[int]:
        """Appends them, and returns the size of the WAL after each."""
        machine.restart(fsync)
        sizes = []
        for number in range(records):
            big = any_table(number, tokens=9000 if number % 3 == 1 else 20)
            machine.log.append(b"%d" % number, {2 * number: any_table(number), 2 * number + 1: big})
            sizes.append(machine.wal.stat().st_size)
        return sizes

    def check(self, machine: Machine, records: int) -> None:
        assert machine.log.replay().records == [b"%d" % number for number in range(records)]
        assert machine.log.retain(range(2 * records)) == set()
        for number in range(records):
            assert same(machine.log.get(2 * number), any_table(number))
            big = any_table(number, tokens=9000 if number % 3 == 1 else 20)
            assert same(machine.log.get(2 * number + 1), big)
        machine.log.append(b"goes on", {machine.log.first_number: any_table()})
        assert [*machine.log.replay().records][records:] == [b"goes on"]

    @every_fsync
    def test_a_wal_that_is_cut_anywhere(self, machine: Machine, fsync: Fsync) -> None:
        sizes, files = self.appended(machine, fsync, 6), machine.files()
        # The first one is on the disk before it is answered.
        whole_frames = range(sizes[0], sizes[-1] + 1, FRAME_BYTES)
        for size in (*whole_frames, *(size + 5000 for size in whole_frames[:-1])):
            machine.boot()
            is_short = machine.restart(fsync, {**files, NAMES[1]: files[NAMES[1]][:size]})
            assert is_short == (fsync != "always"), "always: nothing of what is cut was promised"
            self.check(machine, sum(end <= size for end in sizes))
            machine.close()

    def test_a_process_that_dies_within_a_transaction_loses_nothing(self, machine: Machine) -> None:
        sizes = self.appended(machine, "interval", 4)
        files = machine.files()
        assert not machine.restart("interval", {**files, NAMES[1]: files[NAMES[1]][: sizes[-1] - FRAME_BYTES]})
        self.check(machine, 3)

    @pytest.mark.parametrize("fsync", ["always", "interval"])
    def test_a_last_record_that_is_not_whole_was_never_answered(self, machine: Machine, fsync: Fsync) -> None:
        sizes = self.appended(machine, fsync, 4)
        flip(machine.wal, sizes[-2] + 30)
        assert not machine.restart(fsync)
        self.check(machine, 3)

    def test_whole_records_that_follow_damage_are_missed_where_the_machine_died(self, machine: Machine) -> None:
        """It may write a file in any order."""
        sizes = self.appended(machine, "interval", 6)
        flip(machine.wal, sizes[1] + 30)
        machine.boot()
        assert machine.restart()
        self.check(machine, 2)

    @pytest.mark.parametrize("at", [5, 17, 30, 40, 5000], ids=["header", "salt", "checksum", "frame", "page"])
    def test_damage_that_whole_records_follow_is_refused(self, machine: Machine, at: int) -> None:
        self.appended(machine, "always", 4)
        flip(machine.wal, at)
        content = machine.wal.read_bytes()
        with pytest.raises(
            InvalidArgumentError, match=r"wal is damaged: \d complete records follow, which must not be"
        ):
            machine.restart()
        assert machine.wal.read_bytes() == content, "nothing is cut"

    def test_what_an_earlier_use_of_the_wal_left_behind_its_end_is_no_damage(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DiskRoom, "wal_limit", 100_000)
        sizes = self.appended(machine, "interval", 6)
        machine.log.flush()
        machine.log.append(b"6", {12: any_table(6), 13: any_table(6)})
        assert machine.wal.stat().st_size == sizes[-1], "it is used again from its beginning"
        assert not machine.restart()
        assert len([*machine.log.replay().records]) == 7


class TestDamage:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal"])
    def test_flipped_bits_are_refused_or_cost_the_last_records_and_lost_tables_alone(
        self, machine: Machine, name: str, seed: int
    ) -> None:
        generator = random.Random(seed)
        machine.restart()
        tables = {number: any_table(number, tokens=generator.choice([5, 300, 6000])) for number in range(24)}
        records = []
        for number, table in tables.items():
            records.append(b"%d " % number + bytes(generator.choice([10, 20_000])))
            machine.log.append(records[-1], {number: table})
        if name == "journal.sqlite":
            machine.log.close()
        files = machine.files()

        digests = digests_of(tables)
        outcomes, refusals = set(), list[str]()
        for _ in range(60):
            damaged = bytearray(files[name])
            for _ in range(generator.choice([1, 1, 20])):
                damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
            try:
                is_short = machine.restart("interval", {**files, name: bytes(damaged)})
                left = list(machine.log.replay().records)
                lost = lost_tables(machine.log, {number: digests[number] for number in range(len(left))})
                assert left == records[: len(left)]
                assert not is_short
                assert len(left) >= len(records) - 1
                for number in {*range(len(left))} - lost:
                    assert same(machine.log.get(number), tables[number])
                outcomes.add("cut" if len(left) < len(records) else "lost" if lost else "whole")
            except InvalidArgumentError as error:
                refusals.append(str(error))
                outcomes.add("refused")
            machine.close()
        assert "refused" in outcomes
        assert len(outcomes) > 1 or name == "journal.sqlite-wal"
        for refusal in refusals:
            assert "restore it, or delete the run" in refusal or "use the version that wrote it" in refusal

    def test_a_database_that_breaks_while_it_is_used_is_opened_again_and_refused(self, machine: Machine) -> None:
        machine.restart()
        machine.log.append(b"one", {0: any_table(tokens=9000), 1: any_table(1)})
        machine.log.flush()
        machine.log.append(b"two", {})
        with closing(sqlite3.connect(machine.run / "journal.sqlite")) as other, other:
            other.execute("UPDATE tables SET rows = NULL WHERE number = 0")
            other.execute("DROP TABLE events")
        with pytest.raises(NotFoundError, match="table 0 of rows is missing or damaged"):
            machine.log.get(0)
        assert same(machine.log.get(1), any_table(1))
        with pytest.raises(LogLostError, match=r"journal.sqlite: .*; it is being recovered"):
            machine.log.append(b"three", {})
        assert machine.log.is_lost
        machine.log.flush()
        machine.log.close()
        with pytest.raises(InvalidArgumentError, match="no such table: events"):
            machine.restart()

    @pytest.mark.parametrize("cut_bytes", [1, database.PAGE_BYTES, 10 * database.PAGE_BYTES])
    def test_a_database_that_is_cut_while_it_is_used_gives_no_zeros_for_rows(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, cut_bytes: int
    ) -> None:
        monkeypatch.setattr("gristmill_service.storage.journal.run_log._SHORT_WAL", 0)
        machine.log.append(b"one", {0: any_table(tokens=20_000)})
        for _ in range(2):
            machine.log.flush()
        path = machine.run / "journal.sqlite"
        os.truncate(path, path.stat().st_size - cut_bytes)
        with pytest.raises(LogLostError, match=r"it shrank from|is malformed"):
            machine.log.get(0)
        assert machine.log.is_lost

    def test_a_table_that_cannot_be_read_is_lost(self, machine: Machine) -> None:
        machine.restart()
        machine.log.append(b"one", {0: any_table(), 1: any_table(1)})
        machine.log.close()
        with closing(sqlite3.connect(machine.run / "journal.sqlite")) as other, other:
            other.execute("UPDATE tables SET rows = x'0102' WHERE number = 0")
        assert not machine.restart()
        assert lost_tables(machine.log, digests_of({0: any_table(), 1: any_table(1)})) == {0}


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << at % 8)]))


class TestSyncing:
    @every_fsync
    def test_how_safe_an_append_is(self, machine: Machine, fsync: Fsync, monkeypatch: pytest.MonkeyPatch) -> None:
        synced, real = list[str](), database.sync_file

        def sync(path: Path) -> None:
            synced.append(path.name)
            real(path)

        monkeypatch.setattr(database, "sync_file", sync)
        machine.restart(fsync)
        [[synchronous]] = machine.log._writer.execute("PRAGMA synchronous").fetchall()
        assert synchronous == (2 if fsync == "always" else 1), "FULL, NORMAL"
        machine.log.append(b"one", {})
        synced.clear()
        machine.log.append(b"two", {})
        assert not synced, "by SQLite, or later"
        for _ in range(2):
            machine.log.flush()
            assert synced == (["journal.sqlite-wal"] if fsync == "interval" else []), "once"

    def test_what_a_killed_process_left_is_on_the_disk_before_it_is_answered(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.restart("never")
        machine.log.append(b"one", {})
        synced = list[Path]()
        monkeypatch.setattr(database, "sync_file", synced.append)
        machine.restart("always")
        assert synced == [machine.wal]

    @every_fsync
    def test_a_table_is_deleted_after_the_record_that_allows_it(self, machine: Machine, fsync: Fsync) -> None:
        machine.restart(fsync)
        machine.log.append(b"one", {0: any_table(), 1: any_table()})
        machine.log.append(b"0 is free", {})
        machine.log.remove([0])
        with pytest.raises(NotFoundError):
            machine.log.get(0)
        sizes = []
        with closing(sqlite3.connect(machine.run / "journal.sqlite")) as other:
            for _ in range(2):
                sizes.append(machine.wal.stat().st_size)
                assert other.execute("SELECT number FROM tables").fetchall() == [(0,), (1,)][len(sizes) - 1 :]
                machine.log.flush()
        assert sizes[1] > sizes[0], "by a transaction of its own"

    def test_a_sync_that_fails_loses_the_log(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.log.append(b"one", {})
        machine.log.append(b"two", {})

        def fail(path: Path) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(database, "sync_file", fail)
            with pytest.raises(LogLostError, match="Input/output error"):
                machine.log.flush()
        assert machine.log.is_lost
        with pytest.raises(LogLostError, match="is being recovered"):
            machine.log.append(b"two", {})

    def test_a_commit_of_unknown_outcome_loses_the_log(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.restart()

        class Failing(sqlite3.Connection):
            def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
                if statement == "COMMIT":
                    error = sqlite3.OperationalError("disk I/O error")
                    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                    raise error
                return super().execute(statement, *parameters)

        machine.log._writer.close()
        machine.log._writer.sqlite = sqlite3.connect(
            machine.run / "journal.sqlite", factory=Failing, isolation_level=None, check_same_thread=False
        )
        with pytest.raises(LogLostError, match="disk I/O error"):
            machine.log.append(b"one", {0: any_table()})
        assert machine.log.is_lost
        machine.log._writer.close()
        machine.log.close()
        machine.restart()
        assert machine.log.replay().records == []


class Slow(sqlite3.Connection):
    """Copies a WAL when asked to."""

    begun, may_go_on = threading.Event(), threading.Event()

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if "wal_checkpoint(PASSIVE)" in statement:
            self.begun.set()
            assert self.may_go_on.wait(20)
        return super().execute(statement, *parameters)


class TestCheckpoints:
    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DiskRoom, "wal_limit", 200_000)

    def test_appends_reads_and_syncs_go_on_meanwhile(
        self, machine: Machine, small: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.restart()
        machine.log.append(b"one", {0: any_table(tokens=100_000)})
        real = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *args, **more: real(*args, factory=Slow, **more))
        flushing = threading.Thread(target=machine.log.flush)
        flushing.start()
        assert Slow.begun.wait(20)
        machine.log.append(b"two", {1: any_table(1)})
        assert same(machine.log.get(1), any_table(1))
        machine.log.sync()
        assert machine.log._synced == machine.log._commits
        machine.log.remove([0])
        assert flushing.is_alive()
        Slow.may_go_on.set()
        flushing.join()
        assert same(machine.log.get(1), any_table(1))

    def test_a_wal_does_not_grow_without_end_and_is_empty_at_rest(self, machine: Machine, small: None) -> None:
        machine.restart()
        sizes = []
        for number in range(40):
            machine.log.append(b"x", {number: any_table(number, tokens=20_000)})
            if number >= 4:
                machine.log.remove([number - 4])
            machine.log.flush()
            sizes.append(machine.wal.stat().st_size)
        assert max(sizes) < 2_000_000
        assert (machine.run / "journal.sqlite").stat().st_size < 4_000_000, "what is free is used again"
        machine.log.append(b"x" * 1_500_000, {})
        for _ in range(3):
            machine.log.flush()
        assert machine.wal.stat().st_size == 0
        machine.log.append(b"goes on", {})
        machine.restart()
        assert len([*machine.log.replay().records]) == 42

    def test_a_burst_gives_its_space_back(self, machine: Machine, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DiskRoom, "wal_file_limit", 2_000_000)
        machine.restart()
        machine.log.append(b"x" * 3_000_000, {})
        machine.log.flush()
        assert machine.wal.stat().st_size == 0

    def test_another_program_that_reads_delays_it_and_nothing_else(self, machine: Machine, small: None) -> None:
        machine.restart()
        machine.log.append(b"one", {0: any_table()})
        with closing(sqlite3.connect(machine.run / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT * FROM events").fetchall()
            machine.log.append(b"two", {1: any_table(1, tokens=90_000)})
            machine.log.flush()
            machine.log.append(b"three", {})
            machine.log.flush()
            assert machine.wal.stat().st_size > 300_000
            other.execute("COMMIT")
        machine.log.append(b"x" * 1_500_000, {})
        machine.log.flush()
        machine.log.flush()
        assert machine.wal.stat().st_size == 0
        assert len([*machine.log.replay().records]) == 4

    def test_threads_that_append_and_read_and_flush_hinder_nobody(self, machine: Machine, small: None) -> None:
        machine.restart("never")
        log, errors, done = machine.log, list[BaseException](), threading.Event()

        def repeat(step: Callable[[], None]) -> None:
            try:
                while not done.is_set():
                    step()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
                done.set()

        def append() -> None:
            number = log.first_number
            log.append(b"%d" % number, {number: any_table(number % 1000, tokens=number % 7 * 900 + 5)})
            if number >= 50:
                log.remove([number - 50])
            if number % 100 == 99:
                compact(log, b"")
            if number == 600:
                done.set()

        def read() -> None:
            last = log.first_number - 1
            try:
                stored = log.get(last)
            except NotFoundError:
                assert last < 0 or log.first_number >= last + 50, "it was removed meanwhile"
                return
            assert same(stored, any_table(last % 1000, tokens=last % 7 * 900 + 5))

        threads = [threading.Thread(target=repeat, args=(step,)) for step in (append, read, read, log.flush)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        machine.restart()
        machine.log.replay()
        assert machine.log.retain(range(551, 601)) == set()

    def test_a_log_that_is_closed_meanwhile_ends_well(self, machine: Machine, small: None) -> None:
        for _ in range(10):
            machine.restart()
            log = machine.log

            def work(step: Callable[[], object]) -> None:
                try:
                    for _ in range(100_000):
                        step()
                except (UnavailableError, NotFoundError):
                    return

            steps: list[Callable[[], object]] = [
                lambda log=log: log.append(b"x", {log.first_number: any_table(tokens=5000)}),  # type: ignore[misc]
                lambda log=log: log.get(log.first_number - 1),  # type: ignore[misc]
            ]
            threads = [threading.Thread(target=work, args=(step,)) for step in steps]
            for thread in threads:
                thread.start()
            log.flush()
            log.close()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
