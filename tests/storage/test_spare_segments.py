"""Files of rows that are written over: what was there before is never taken for rows, nor changed while it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.run.machine.row_digests import row_digests
from gristmill_service.storage.journal import row_segments, spare_segments
from gristmill_service.storage.journal.files import punch, write_at
from gristmill_service.storage.journal.row_segments import RowSegments
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.journal.spare_segments import KEPT_S, SpareSegments
from gristmill_service.storage.row_tables import decode
from tests.storage.tables import any_table, same, whole

LARGE = 100_000
"""Tokens of a row, of which three are worth keeping a file for."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JournalRunStore]:
    store = JournalRunStore(tmp_path)
    yield store
    store.close()


def begun(store: JournalRunStore, name: str) -> JournalRunLog:
    log = store.create(name, b"{}")
    assert list(log.replay().records) == []
    return log


def segment_of(directory: Path, run: str) -> Path:
    (found,) = (directory / f"run-{run}").glob("rows-*.seg")
    return found


def spares(directory: Path) -> list[Path]:
    return sorted(directory.glob(".spare-*"))


def used(path: Path) -> int:
    """Bytes that a file really takes."""
    return path.stat().st_blocks * 512


class TestWhatIsWrittenOver:
    def test_a_deleted_runs_file_takes_the_rows_of_the_next_run(self, store: JournalRunStore, tmp_path: Path) -> None:
        old = begun(store, "old")
        old.put(any_table(1, tokens=LARGE))
        before = segment_of(tmp_path, "old").stat().st_ino
        store.delete("old")
        assert [path.stat().st_ino for path in spares(tmp_path)] == [before]
        log = begun(store, "new")
        number, kept = log.put(any_table(2, tokens=LARGE // 2))
        assert segment_of(tmp_path, "new").stat().st_ino == before
        assert spares(tmp_path) == []
        assert same(kept, any_table(2, tokens=LARGE // 2))
        log.close()
        again = store.open("new")
        assert again.retain({number}, whole) == set()
        assert same(again.get(number), any_table(2, tokens=LARGE // 2))
        again.close()

    def test_a_run_whose_rows_are_all_freed_writes_over_them_under_other_numbers(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path))
        first, kept = rows.put(any_table(1, tokens=LARGE))
        before = next(tmp_path.glob("rows-*.seg")).stat().st_ino
        del kept
        rows.remove([first])
        second, kept = rows.put(any_table(2, tokens=LARGE))
        assert next(tmp_path.glob("rows-*.seg")).stat().st_ino == before
        assert second != first
        assert same(kept, any_table(2, tokens=LARGE))
        with pytest.raises(NotFoundError):
            rows.get(first)
        rows.remove([first])
        assert same(rows.get(second), any_table(2, tokens=LARGE))
        rows.close()

    def test_not_while_a_row_of_it_is_read(self, store: JournalRunStore, tmp_path: Path) -> None:
        old = begun(store, "old")
        _, read = old.put(any_table(1, tokens=LARGE))
        store.delete("old")
        log = begun(store, "new")
        log.put(any_table(2, tokens=LARGE))
        assert same(read, any_table(1, tokens=LARGE))
        assert len(spares(tmp_path)) == 1
        del read
        other = begun(store, "other")
        other.put(any_table(3, tokens=LARGE))
        assert spares(tmp_path) == [], "it is read no more"
        for each in (log, other):
            each.close()

    def test_not_while_a_write_that_the_deletion_overtook_goes_on(
        self, store: JournalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deleted = begun(store, "old")
        deleted.put(any_table(0, tokens=LARGE))
        is_writing, is_deleted = threading.Event(), threading.Event()

        def held(descriptor: int, buffers: Sequence[bytes], offset: int) -> None:
            if threading.current_thread() is putting:
                is_writing.set()
                assert is_deleted.wait(30)
            write_at(descriptor, buffers, offset)

        monkeypatch.setattr(row_segments, "write_at", held)
        putting = threading.Thread(target=lambda: deleted.put(any_table(1, tokens=LARGE)))
        putting.start()
        assert is_writing.wait(30)
        store.delete("old")
        log = begun(store, "new")
        numbers = [log.put(any_table(index, tokens=LARGE))[0] for index in (2, 3)]
        is_deleted.set()
        putting.join()
        for index, number in zip((2, 3), numbers, strict=True):
            assert same(log.get(number), any_table(index, tokens=LARGE))
        log.close()

    def test_not_while_memory_of_it_is_given_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else it would be that of the next rows."""
        is_punching, is_written = threading.Event(), threading.Event()

        def held(descriptor: int, start: int, end: int) -> None:
            is_punching.set()
            assert is_written.wait(30)
            punch(descriptor, start, end)

        monkeypatch.setattr(row_segments, "punch", held)
        rows = RowSegments(tmp_path, SpareSegments(tmp_path))
        first, second = (rows.put(any_table(index, tokens=LARGE))[0] for index in range(2))
        removing = threading.Thread(target=lambda: rows.remove([first]))
        removing.start()
        assert is_punching.wait(30)
        rows.remove([second])
        third, _ = rows.put(any_table(2, tokens=LARGE))
        is_written.set()
        removing.join()
        assert same(rows.get(third), any_table(2, tokens=LARGE))
        rows.close()

    def test_what_a_killed_process_left_is_no_row_and_is_given_back(self, tmp_path: Path) -> None:
        """It was killed after one of two tables of which the log tells."""
        store = JournalRunStore(tmp_path)
        old = begun(store, "old")
        numbers = [old.put(any_table(index, tokens=LARGE))[0] for index in range(5)]
        store.delete("old")
        new = begun(store, "new")
        number, _ = new.put(any_table(9, tokens=LARGE))
        path = segment_of(tmp_path, "new")
        assert used(path) > 4_000_000, "former rows are behind the new one"
        store.close()
        store = JournalRunStore(tmp_path)
        log = store.open("new")
        assert log.retain({number, numbers[1]}, digests_of({number: any_table(9, tokens=LARGE)})) == {numbers[1]}
        assert same(log.get(number), any_table(9, tokens=LARGE))
        assert used(path) < 2_000_000
        log.close()
        store.close()


def digests_of(tables: dict[int, Steps]) -> Callable[[int, Steps], bool]:
    """As a run checks its tables: by the digests of their rows. Of a table that is not here it expects other rows."""

    def check(number: int, found: Steps) -> bool:
        return row_digests(found) == row_digests(tables.get(number, any_table(77)))

    return check


@settings(max_examples=60, deadline=None)
@given(
    former=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    now=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    data=st.data(),
)
def test_whichever_blocks_a_power_failure_leaves_unwritten_a_table_is_whole_or_lost(
    tmp_path_factory: pytest.TempPathFactory, former: list[int], now: list[int], data: st.DataObject
) -> None:
    """A block is one of the disk: 512 bytes. The log tells of all tables; some blocks are those of the former file."""
    directory = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patched:
        for module in (row_segments, spare_segments):
            patched.setattr(module, "WORTH_KEEPING", 1)
        kept = SpareSegments(directory)
        rows = RowSegments(directory, kept, segment_bytes=1 << 20)
        rows.remove([rows.put(any_table(index, tokens=tokens))[0] for index, tokens in enumerate(former)])
        (spare,) = spares(directory)
        before = spare.read_bytes()
        # The same rows again, or others of as many bytes.
        tables = [any_table(data.draw(st.sampled_from([0, 1, 50])), tokens=tokens) for tokens in now]
        numbers = [rows.put(table)[0] for table in tables]
        rows.close()
    (path,) = directory.glob("rows-*.seg")
    after = bytearray(path.read_bytes())
    blocks = -(-max(len(before), 1 + (numbers[-1] & 0xFFFFFFFF)) // 512)
    for block in data.draw(st.sets(st.integers(0, min(blocks, 150)))) | data.draw(st.sampled_from([set(), {0}])):
        after[512 * block : 512 * (block + 1)] = before[512 * block : 512 * (block + 1)]
    path.write_bytes(after)
    again = RowSegments(directory, SpareSegments(directory))
    lost = again.retain(set(numbers), digests_of(dict(zip(numbers, tables, strict=True))))
    for number, table in zip(numbers, tables, strict=True):
        assert number in lost or row_digests(decode(again.get(number))) == row_digests(table)
    again.close()


class TestHowMuchIsKept:
    def test_a_small_file_a_large_one_and_a_fifth_are_not(self, store: JournalRunStore, tmp_path: Path) -> None:
        sizes = {"small": 2000, "large": 6_000_000}
        logs = [begun(store, name) for name in sizes]
        for log, tokens in zip(logs, sizes.values(), strict=True):
            log.put(any_table(tokens=tokens))
        for name in sizes:
            store.delete(name)
        assert spares(tmp_path) == []
        logs = [begun(store, str(number)) for number in range(5)]
        for log in logs:
            log.put(any_table(tokens=LARGE))
        for number in range(5):
            store.delete(str(number))
        assert len(spares(tmp_path)) == 4
        assert not list(tmp_path.glob(".deleted-*"))

    def test_none_where_little_room_is_left(
        self, store: JournalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(spare_segments, "_LEAST_FREE", 1 << 60)
        old = begun(store, "old")
        old.put(any_table(tokens=LARGE))
        store.delete("old")
        assert spares(tmp_path) == []

    def test_a_full_file_system_has_their_room_before_rows_are_refused(
        self, store: JournalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = begun(store, "old")
        old.put(any_table(tokens=LARGE))
        log = begun(store, "new")
        log.put(any_table(tokens=20))
        store.delete("old")

        def full(descriptor: int, buffers: Sequence[bytes], offset: int) -> None:
            if spares(tmp_path):
                raise OSError(28, "No space left on device")
            write_at(descriptor, buffers, offset)

        monkeypatch.setattr(row_segments, "write_at", full)
        number, _ = log.put(any_table(5))
        assert same(log.get(number), any_table(5))
        assert store.unhealthy_reason() == ""
        log.close()

    def test_until_nobody_has_taken_them_for_some_seconds(self, tmp_path: Path) -> None:
        now = [0.0]
        kept = SpareSegments(tmp_path, lambda: now[0])
        rows = RowSegments(tmp_path, kept)
        rows.remove([rows.put(any_table(tokens=LARGE))[0]])
        now[0] = KEPT_S
        kept.give_back_old()
        assert len(spares(tmp_path)) == 1
        now[0] += 1
        kept.give_back_old()
        assert spares(tmp_path) == []
        rows.close()

    def test_former_rows_behind_the_last_one_until_none_came_for_some_seconds(self, tmp_path: Path) -> None:
        now = [0.0]
        rows = RowSegments(tmp_path, SpareSegments(tmp_path, lambda: now[0]))
        rows.remove([rows.put(any_table(index, tokens=LARGE))[0] for index in range(5)])
        first, _ = rows.put(any_table(1, tokens=LARGE))
        (path,) = tmp_path.glob("rows-*.seg")
        rows.give_back_former()
        assert used(path) > 4_000_000
        now[0] = KEPT_S + 1
        rows.give_back_former()
        assert used(path) < 2_000_000
        second, _ = rows.put(any_table(2, tokens=LARGE))
        assert same(rows.get(first), any_table(1, tokens=LARGE))
        assert same(rows.get(second), any_table(2, tokens=LARGE))
        rows.close()

    def test_until_the_service_stops_or_the_next_one_starts(self, tmp_path: Path) -> None:
        store = JournalRunStore(tmp_path)
        old = begun(store, "old")
        old.put(any_table(tokens=LARGE))
        store.delete("old")
        store.close()
        assert spares(tmp_path) == []
        (tmp_path / ".spare-7").write_bytes(bytes(100))
        JournalRunStore(tmp_path).close()
        assert spares(tmp_path) == []


def test_a_deletion_that_fails_keeps_the_rows(
    store: JournalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = begun(store, "run")
    number, _ = log.put(any_table(tokens=LARGE))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(UnavailableError, match="Input/output error"):
            store.delete("run")
    assert spares(tmp_path) == []
    again = store.open("run")
    assert again.retain({number}, whole) == set()
    again.close()
