"""The log's file: what is left of it when a process or a disk dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage.journal.event_log import EventLog


def new_log(directory: Path) -> EventLog:
    EventLog.create(directory)
    log = EventLog(directory)
    log.replay()
    return log


class TestTornTail:
    @given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.data())
    def test_whatever_is_cut_off_the_records_before_it_stay(
        self, tmp_path_factory: pytest.TempPathFactory, records: list[bytes], data: st.DataObject
    ) -> None:
        directory = tmp_path_factory.mktemp("log")
        log = new_log(directory)
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
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        directory = tmp_path_factory.mktemp("log")
        log = new_log(directory)
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

    def test_what_a_failed_write_left_is_no_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        log = new_log(tmp_path)
        log.append(b"kept")

        def fail(descriptor: int, buffers: Sequence[bytes], offset: int) -> None:
            os.pwrite(descriptor, b"".join(map(bytes, buffers))[:-1], offset)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("gristmill_service.storage.journal.event_log.write_at", fail)
            with pytest.raises(UnavailableError, match="is full"):
                log.append(b"a long record that is cut")
        log.append(b"short")
        log.close()
        log = EventLog(tmp_path)
        replay = log.replay()
        assert list(replay.records) == [b"kept", b"short"]
        assert not replay.is_short(), "nothing that was appended is missing"
        log.close()

    def test_a_replay_that_cut_a_torn_tail_is_short(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.append(b"kept")
        log.append(b"torn")
        log.close()
        os.truncate(tmp_path / "events-000000.log", log.size - 1)
        log = EventLog(tmp_path)
        assert log.replay().is_short()
        assert not log.replay().is_short(), "it was cut"
        log.close()

    def test_a_log_that_is_damaged_at_its_beginning_is_refused_and_stays_as_it_is(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.append(b"kept")
        log.close()
        path = tmp_path / "events-000000.log"
        for damaged in (path.read_bytes()[:20], b"", b"gristmill log\0\1\0" + bytes(100)):
            path.write_bytes(damaged)
            log = EventLog(tmp_path)
            with pytest.raises(InvalidArgumentError, match="restore it, or remove the run"):
                log.replay()
            assert path.read_bytes() == damaged
            log.close()

    def test_a_compaction_that_did_not_end_leaves_the_log_as_it_was(self, tmp_path: Path) -> None:
        log = new_log(tmp_path)
        log.append(b"one")
        log.close()
        (tmp_path / "events-000001.draft").write_bytes(b"half")
        log = EventLog(tmp_path)
        assert list(log.replay().records) == [b"one"]
        log.close()
        assert not (tmp_path / "events-000001.draft").exists()

    def test_a_compaction_whose_directory_cannot_be_synced_leaves_the_log_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = new_log(tmp_path)
        log.append(b"one")

        def fail(directory: Path) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr("gristmill_service.storage.journal.event_log.sync_directory", fail)
            with pytest.raises(UnavailableError, match="Input/output error"):
                log.compact(b"snapshot")
        log.append(b"two")
        log.close()
        log = EventLog(tmp_path)
        assert list(log.replay().records) == [b"one", b"two"], "a file that was not gone on with would hide them"
        log.close()


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events-old.log").touch()
    with pytest.raises(InvalidArgumentError, match="has no event log; restore it, or remove the run"):
        EventLog(tmp_path)


def test_a_closed_log_takes_nothing_and_may_be_closed_again(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    log.append(b"one")
    log.close()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    calls: list[Callable[[], object]] = [lambda: log.append(b"two"), lambda: log.compact(b"all"), log.sync]
    for call in calls:
        with pytest.raises(UnavailableError, match="closed meanwhile"):
            call()
    log.close()
    os.fstat(other)
    assert os.fstat(other).st_size == 0
    os.close(other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-000000.log", "other"]
