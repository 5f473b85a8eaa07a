"""Rows in mapped files."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.storage.journal import files, row_segments
from gristmill_service.storage.journal.files import write_at
from gristmill_service.storage.journal.row_segments import RowSegments
from gristmill_service.storage.journal.spare_segments import SpareSegments
from tests.storage.tables import any_table, same, whole


class TestRowSegments:
    def used(self, directory: Path) -> int:
        """Bytes that the segments really take."""
        return sum(path.stat().st_blocks * 512 for path in directory.glob("rows-*.seg"))

    def test_memory_is_given_back_as_tables_go_and_a_segment_with_its_last(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path), segment_bytes=1 << 20)
        numbers = [rows.put(any_table(index, tokens=5000))[0] for index in range(40)]
        full, segments = self.used(tmp_path), len(list(tmp_path.glob("rows-*.seg")))
        assert segments > 2
        random.Random(1).shuffle(numbers)
        rows.remove(numbers[:20])
        assert self.used(tmp_path) < 0.7 * full
        for number in numbers[20:]:
            rows.remove([number])
        assert self.used(tmp_path) <= files.PAGE_BYTES
        assert len(list(tmp_path.glob("rows-*.seg"))) <= 1
        rows.close()

    def test_small_tables_that_share_a_page_give_it_back_together(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path))
        numbers = [rows.put(any_table(index, rows=1, tokens=2))[0] for index in range(200)]
        assert self.used(tmp_path) > 0
        for number in numbers:
            rows.remove([number])
        assert self.used(tmp_path) <= files.PAGE_BYTES
        rows.close()

    def test_a_table_larger_than_a_segment_gets_one_of_its_own(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path), segment_bytes=4096)
        number, kept = rows.put(any_table(tokens=10000))
        assert same(kept, any_table(tokens=10000))
        assert rows.get(number) == kept
        rows.close()

    def test_after_a_restart_only_what_is_wanted_is_kept_and_what_is_not_whole_is_told(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path), segment_bytes=1 << 18)
        numbers = [rows.put(any_table(index, tokens=3000))[0] for index in range(20)]
        rows.close()
        again = RowSegments(tmp_path, SpareSegments(tmp_path), segment_bytes=1 << 18)
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

    def test_the_check_sees_what_is_on_the_disk(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path))
        number, _ = rows.put(any_table(tokens=500))
        rows.close()
        path = next(tmp_path.glob("rows-*.seg"))
        with path.open("r+b") as file:
            file.seek(2000)
            file.write(b"\xff" * 100)
        again = RowSegments(tmp_path, SpareSegments(tmp_path))
        assert again.retain({number}, lambda number, steps: same(steps, any_table(tokens=500))) == {number}
        again.close()

    def test_an_empty_segment_is_lost_rows_and_no_error(self, tmp_path: Path) -> None:
        """As a machine that lost power leaves it."""
        (tmp_path / "rows-000002.seg").touch()
        (tmp_path / "rows-notes.seg").touch()
        rows = RowSegments(tmp_path, SpareSegments(tmp_path))
        assert rows.retain({2 << 40}, whole) == {2 << 40}
        assert rows.put(any_table())[0] == 3 << 40
        rows.close()


class TestClosed:
    def test_closed_rows_take_and_give_nothing_and_may_be_closed_again(self, tmp_path: Path) -> None:
        rows = RowSegments(tmp_path, SpareSegments(tmp_path))
        number, kept = rows.put(any_table())
        rows.close()
        other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
        for call in (lambda: rows.put(any_table()), lambda: rows.get(number), rows.sync):
            with pytest.raises(UnavailableError, match="closed meanwhile"):
                call()
        rows.remove([number])
        rows.close()
        assert os.fstat(other).st_size == 0
        os.close(other)
        assert same(kept, any_table()), "views stay valid"

    def test_a_put_that_close_overtakes_is_finished_on_its_own_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
        deleted, victim = (RowSegments(tmp_path / name, SpareSegments(tmp_path)) for name in "ab")
        deleted.put(any_table())
        is_writing, is_closed, write = threading.Event(), threading.Event(), write_at

        def held(descriptor: int, buffers: Sequence[bytes], offset: int) -> None:
            if threading.current_thread() is putting:
                is_writing.set()
                assert is_closed.wait(30)
            write(descriptor, buffers, offset)

        monkeypatch.setattr(row_segments, "write_at", held)
        found = []
        putting = threading.Thread(target=lambda: found.append(deleted.put(any_table(777, tokens=2000))[1]))
        putting.start()
        assert is_writing.wait(30)
        deleted.close()
        numbers = [victim.put(any_table(number))[0] for number in range(2)]
        is_closed.set()
        putting.join()
        assert [same(victim.get(number), any_table(index)) for index, number in enumerate(numbers)] == [True, True]
        assert same(found[0], any_table(777, tokens=2000))
        assert b"u777" in next((tmp_path / "a").glob("rows-*.seg")).read_bytes()
        assert b"u777" not in next((tmp_path / "b").glob("rows-*.seg")).read_bytes()
        victim.close()
