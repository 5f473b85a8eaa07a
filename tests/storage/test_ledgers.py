"""What every ledger that keeps something promises, and what files make of it when a process or a disk dies."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows, to_rows
from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal import files
from gristmill_service.storage.journal.event_log import EventLog
from gristmill_service.storage.journal.row_segments import RowSegments
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.run.harness import row, table
from tests.strategies import rollouts


def any_table(number: int = 0, rows: int = 3, tokens: int = 20):
    return table(*(row(f"u{number}-{index}", response=range(number, number + tokens)) for index in range(rows)))


def same(one, other) -> bool:
    return list(to_rows(one)) == list(to_rows(other))


def whole(number, steps) -> bool:
    return True


class TestTables:
    @given(rollouts())
    def test_come_back_as_they_were(self, rows):
        steps = from_rows(rows, step_wise=True)
        encoded = row_tables.encode(steps)
        data = b"".join(encoded.buffers)
        assert len(data) == encoded.size
        assert same(row_tables.decode(memoryview(data)), steps)

    def test_are_views_of_the_bytes_that_they_are_read_from(self):
        data = bytearray(b"".join(row_tables.encode(any_table()).buffers))
        read = row_tables.decode(memoryview(data))
        assert np.shares_memory(read.tokens.values, np.frombuffer(data, np.uint8))

    @given(st.binary(max_size=200))
    def test_what_is_no_table_is_refused(self, data):
        with pytest.raises(InvalidArgumentError):
            row_tables.decode(memoryview(data))

    def test_a_cut_table_is_refused(self):
        data = b"".join(row_tables.encode(any_table()).buffers)
        for size in range(0, len(data) - 8, 7):
            with pytest.raises(InvalidArgumentError):
                row_tables.decode(memoryview(data[:size]))


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = JournalRunStore(tmp_path / "journal")
    yield ledger
    ledger.close()


class TestLedger:
    def test_a_run_is_there_again_with_its_configuration_records_and_rows(self, tmp_path):
        ledger = JournalRunStore(tmp_path)
        book = ledger.create("a/run", b'{"dp_size":2}')
        assert (book.replay().snapshot, list(book.replay().records)) == (None, [])
        number, kept = book.put(any_table())
        book.append(b"one")
        book.append(b"two")
        ledger.close()  # as a killed process leaves it: nothing is closed but the lock

        again = JournalRunStore(tmp_path)
        assert again.names() == ["a/run"]
        book = again.open("a/run")
        assert book.config == b'{"dp_size":2}'
        assert tuple(map(list, [book.replay().records])) == ([b"one", b"two"],)
        assert book.retain({number}, whole) == set()
        assert same(book.get(number), any_table())
        assert same(kept, any_table()), "views outlive the book that gave them"
        again.close()

    def test_a_snapshot_stands_for_what_was_before_it(self, ledger):
        book = ledger.create("run", b"{}")
        book.replay()
        book.append(b"before")
        book.compact(b"all before")
        book.append(b"after")
        book.close()
        replay = ledger.open("run").replay()
        assert (replay.snapshot, list(replay.records)) == (b"all before", [b"after"])

    def test_a_log_is_long_once_it_is_much_longer_than_its_snapshot(self, ledger):
        book = ledger.create("run", b"{}")
        book.replay()
        while not book.is_long:
            book.append(bytes(1 << 20))
        book.compact(bytes(20 << 20))
        assert not book.is_long
        for _ in range(40):
            assert not book.is_long
            book.append(bytes(1 << 20))
        assert book.is_long

    def test_runs_are_created_once_and_deleted_whole(self, ledger, tmp_path):
        book = ledger.create("run", b"{}")
        with pytest.raises(AlreadyExistsError):
            ledger.create("run", b"{}")
        book.put(any_table())
        book.close()
        ledger.delete("run")
        ledger.delete("run")
        assert ledger.names() == []
        assert {path.name for path in (tmp_path / "journal").iterdir()} == {"lock", "ballast"}
        with pytest.raises(NotFoundError):
            ledger.open("run")

    def test_a_directory_is_one_process_at_a_time(self, ledger, tmp_path):
        with pytest.raises(FailedPreconditionError, match="in use by another gristmill"):
            JournalRunStore(tmp_path / "journal")

    def test_a_newer_format_is_refused_with_the_remedy(self, ledger, tmp_path):
        ledger.create("run", b"{}").close()
        description = tmp_path / "journal" / "run-run" / "run.json"
        description.write_text(description.read_text().replace('"format":1', '"format":2'))
        with pytest.raises(InvalidArgumentError, match="has format 2 and this version reads up to 1; use a newer"):
            ledger.open("run")

    def test_what_a_dead_process_had_half_created_or_deleted_is_removed(self, tmp_path):
        (tmp_path / ".creating-1").mkdir()
        (tmp_path / ".deleted-1").mkdir()
        JournalRunStore(tmp_path).close()
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "ballast"}


class TestTornTail:
    @given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.data())
    def test_whatever_is_cut_off_the_records_before_it_stay(self, tmp_path_factory, records, data):
        directory = tmp_path_factory.mktemp("log")
        log = EventLog(directory)
        log.replay()
        ends = []
        for record in records:
            log.append(record)
            ends.append(log._end)
        log.close()
        path = directory / "events-000000.log"
        size = data.draw(st.integers(ends[0] - 1 - len(records[0]) - 8, ends[-1]))
        os.truncate(path, size)
        kept = [record for record, end in zip(records, ends, strict=True) if end <= size]

        log = EventLog(directory)
        assert list(log.replay().records) == kept
        log.append(b"goes on")
        log.close()
        log = EventLog(directory)
        assert list(log.replay().records) == [*kept, b"goes on"]
        log.close()
        shutil.rmtree(directory)

    @given(st.data())
    def test_a_changed_byte_ends_the_log_before_it_and_is_refused_where_whole_records_follow(
        self, tmp_path_factory, data
    ):
        directory = tmp_path_factory.mktemp("log")
        log = EventLog(directory)
        log.replay()
        begin = log._end
        for record in (b"first", b"second", b"third"):
            log.append(record)
        log.close()
        path = directory / "events-000000.log"
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(begin, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        log = EventLog(directory)
        if at >= begin + 16 + len(b"first") + 16 + len(b"second"):
            assert list(log.replay().records) == [b"first", b"second"]
        else:
            with pytest.raises(InvalidArgumentError, match=r"is damaged at byte .*, and whole records follow"):
                log.replay()
            assert path.read_bytes() == content, "nothing is cut"
        log.close()
        shutil.rmtree(directory)

    def test_what_a_failed_write_left_is_no_record(self, tmp_path, monkeypatch):
        log = EventLog(tmp_path)
        log.replay()
        log.append(b"kept")

        def fail(descriptor, buffers, offset):
            os.pwrite(descriptor, b"".join(map(bytes, buffers))[:-1], offset)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("gristmill_service.storage.journal.event_log.write_at", fail)
            with pytest.raises(UnavailableError, match="is full"):
                log.append(b"a long record that is cut")
        log.append(b"short")
        log.close()
        log = EventLog(tmp_path)
        assert list(log.replay().records) == [b"kept", b"short"]
        log.close()

    def test_a_compaction_that_did_not_end_leaves_the_log_as_it_was(self, tmp_path):
        log = EventLog(tmp_path)
        log.replay()
        log.append(b"one")
        log.close()
        (tmp_path / "events-000001.draft").write_bytes(b"half")
        log = EventLog(tmp_path)
        assert list(log.replay().records) == [b"one"]
        log.close()
        assert not (tmp_path / "events-000001.draft").exists()


class TestRowSegments:
    def used(self, directory: Path) -> int:
        """Bytes that the segments really take."""
        return sum(path.stat().st_blocks * 512 for path in directory.glob("rows-*.seg"))

    def test_memory_is_given_back_as_tables_go_and_a_segment_with_its_last(self, tmp_path):
        rows = RowSegments(tmp_path, segment_bytes=1 << 20)
        numbers = [rows.put(any_table(index, tokens=5000))[0] for index in range(40)]
        full, segments = self.used(tmp_path), len(list(tmp_path.glob("rows-*.seg")))
        assert segments > 2
        random.Random(1).shuffle(numbers)
        rows.remove(numbers[:20])
        assert self.used(tmp_path) < 0.7 * full
        for number in numbers[20:]:
            rows.remove([number])
        assert self.used(tmp_path) <= files._PAGE
        assert len(list(tmp_path.glob("rows-*.seg"))) <= 1
        rows.close()

    def test_small_tables_that_share_a_page_give_it_back_together(self, tmp_path):
        rows = RowSegments(tmp_path)
        numbers = [rows.put(any_table(index, rows=1, tokens=2))[0] for index in range(200)]
        assert self.used(tmp_path) > 0
        for number in numbers:
            rows.remove([number])
        assert self.used(tmp_path) <= files._PAGE
        rows.close()

    def test_a_table_larger_than_a_segment_gets_one_of_its_own(self, tmp_path):
        rows = RowSegments(tmp_path, segment_bytes=4096)
        number, kept = rows.put(any_table(tokens=10000))
        assert same(kept, any_table(tokens=10000))
        assert same(rows.get(number), kept)
        rows.close()

    def test_after_a_restart_only_what_is_wanted_is_kept_and_what_is_not_whole_is_told(self, tmp_path):
        rows = RowSegments(tmp_path, segment_bytes=1 << 18)
        numbers = [rows.put(any_table(index, tokens=3000))[0] for index in range(20)]
        rows.close()
        again = RowSegments(tmp_path, segment_bytes=1 << 18)
        wanted = {numbers[3], numbers[17]}
        absent = (99 << 40) | 64
        lost = again.retain({*wanted, absent, numbers[5]}, lambda number, steps: number != numbers[5])
        assert lost == {absent, numbers[5]}
        assert same(again.get(numbers[3]), any_table(3, tokens=3000))
        assert same(again.get(numbers[17]), any_table(17, tokens=3000))
        for number in (numbers[0], numbers[5]):
            with pytest.raises(NotFoundError):
                again.get(number)
        number, _ = again.put(any_table())
        assert number not in numbers
        again.close()

    def test_the_check_sees_what_is_on_the_disk(self, tmp_path):
        rows = RowSegments(tmp_path)
        number, _ = rows.put(any_table(tokens=500))
        rows.close()
        path = next(tmp_path.glob("rows-*.seg"))
        with path.open("r+b") as file:
            file.seek(2000)
            file.write(b"\xff" * 100)
        again = RowSegments(tmp_path)
        assert again.retain({number}, lambda number, steps: same(steps, any_table(tokens=500))) == {number}
        again.close()

    def test_a_full_file_system_refuses_and_goes_on_when_there_is_room(self, tmp_path, monkeypatch):
        ledger = JournalRunStore(tmp_path)
        book = ledger.create("run", b"{}")
        book.replay()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("gristmill_service.storage.journal.row_segments.write_at", full)
            with pytest.raises(UnavailableError, match="is full; give it more room"):
                book.put(any_table())
            patched.setattr(JournalRunStore, "_has_room", lambda self: False)
            assert "is full" in ledger.unhealthy_reason()
            book.append(b"one")
            with pytest.raises(UnavailableError, match="is full"):
                book.put(any_table())
        assert ledger.unhealthy_reason() == "", "looking finds that there is room"
        number, _ = book.put(any_table())
        assert same(book.get(number), any_table())
        assert ledger.unhealthy_reason() == ""
        book.close()
        ledger.close()
