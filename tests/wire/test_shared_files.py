"""Memory that a service reads where it stands: never given twice, never more than there is, gone with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gristmill._wire.reused_memory import ReusedMemory
from gristmill._wire.shared_files import SIZE, SharedFile, SharedFiles

LARGE = 300_000


pytestmark = pytest.mark.usefixtures("free_memory")


def in_file(path: Path, offset: int | None, size: int) -> bytes:
    assert offset is not None, "it stands in the file"
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)


def test_what_is_written_to_a_block_stands_in_the_file(tmp_path: Path) -> None:
    file = SharedFile(str(tmp_path))
    first, second = file.take(1_000), file.take(200_000)
    assert first is not None
    assert second is not None

    first[:], second[:] = 1, 2

    assert in_file(tmp_path / file.name, file.offset_of(first.data), 1_000) == b"\1" * 1_000
    assert in_file(tmp_path / file.name, file.offset_of(second[100:].data), 199_900) == b"\2" * 199_900
    assert file.offset_of(b"other memory") is None


def test_blocks_that_are_viewed_are_never_given_again(tmp_path: Path) -> None:
    file, rng = SharedFile(str(tmp_path)), random.Random(4)
    held: list[tuple[int, np.ndarray]] = []
    refused = 0
    for number in range(1_000):
        block = file.take(rng.randrange(1, 2 << 20))
        if block is not None:
            block[:] = number % 251
            # A view keeps the whole block.
            held.append((number % 251, block[len(block) // 2 :]))
        refused += block is None
        if block is None or rng.random() < 0.5:
            content, view = held.pop(rng.randrange(len(held)))
            assert (view == content).all()
    assert 0 < refused < 900
    assert os.stat(tmp_path / file.name).st_size == SIZE


def test_tables_leave_room_for_requests(tmp_path: Path) -> None:
    file, tables = SharedFile(str(tmp_path)), []
    while (block := file.take(1 << 20, is_table=True)) is not None:
        tables.append(block)

    assert len(tables) == (SIZE >> 20) - 4
    assert file.take(1 << 20) is not None
    tables.pop(0)
    assert file.take(1 << 20, is_table=True) is not None


def test_where_no_memory_is_left_there_is_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SharedFile(str(tmp_path))
    held = file.take(1 << 20)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    assert file.take(1 << 20) is None
    del held
    assert file.take(1 << 20) is not None, "what it has is used again"


@pytest.mark.parametrize(("free", "is_given"), [(296, True), (295, False)])
def test_a_quarter_of_all_shared_memory_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_given: bool
) -> None:
    file = SharedFile(str(tmp_path))
    memory = SimpleNamespace(f_bavail=free, f_blocks=800, f_frsize=4 << 10)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: memory)

    assert (file.take(300 << 10) is not None) is is_given


def test_a_file_that_is_retired_gives_no_blocks_and_what_views_it_stays(tmp_path: Path) -> None:
    file = SharedFile(str(tmp_path))
    block = file.take(1_000)
    assert block is not None
    block[:] = 7

    file.retire()

    assert not [*tmp_path.iterdir()]
    assert file.take(1_000) is None
    assert (block == 7).all()


def test_each_directory_has_one_file_until_it_is_retired(tmp_path: Path) -> None:
    files = SharedFiles()
    first = files.of(str(tmp_path))
    assert first is not None
    assert files.of(str(tmp_path)) is first

    files.retire(first)

    second = files.of(str(tmp_path))
    assert second is not None
    assert second is not first
    files.close()
    assert not [*tmp_path.iterdir()]


def test_files_of_services_that_are_gone_are_given_up(tmp_path: Path) -> None:
    files = SharedFiles()
    (tmp_path / "gone").mkdir()
    gone = files.of(str(tmp_path / "gone"))
    assert gone is not None
    (tmp_path / "gone" / gone.name).unlink()
    (tmp_path / "gone").rmdir()

    files.of(str(tmp_path))

    assert gone.take(1) is None
    files.close()


def test_a_process_has_files_of_few_services(tmp_path: Path) -> None:
    files, directories = SharedFiles(), [tmp_path / str(number) for number in range(9)]
    for directory in directories:
        directory.mkdir()
        files.of(str(directory))

    assert sum(len([*directory.iterdir()]) for directory in directories) == 4
    files.close()


@pytest.mark.parametrize("directory", ["", "/nowhere/requests"])
def test_where_no_file_can_be_made_tables_are_made_in_other_memory(directory: str) -> None:
    files = SharedFiles()
    files.use(directory)

    assert files.take(LARGE) is None


def test_columns_of_large_tables_are_made_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SharedFiles()
    files.use(str(tmp_path))
    monkeypatch.setattr("gristmill._wire.reused_memory.SHARED", files)

    joined = ReusedMemory().joined([np.arange(LARGE, dtype=np.int32), np.arange(5, dtype=np.int32)], np.int32)

    file = files.of(str(tmp_path))
    assert file is not None
    found = np.frombuffer(in_file(tmp_path / file.name, file.offset_of(joined.data.cast("B")), joined.nbytes), np.int32)
    assert np.array_equal(found, joined)
    files.close()


def test_threads_share_a_file(tmp_path: Path) -> None:
    file = SharedFile(str(tmp_path))

    def wrong(own: int) -> bool:
        for _ in range(200):
            if (block := file.take(100_000)) is not None:
                block[:] = own
                if (block != own).any():
                    return True
        return False

    with ThreadPoolExecutor(4) as threads:
        assert not any(threads.map(wrong, range(4)))


FORKS = """
import os, sys
from types import SimpleNamespace
from gristmill._wire.shared_files import SHARED

os.fstatvfs = lambda descriptor: SimpleNamespace(f_bavail=1 << 20, f_blocks=1 << 20, f_frsize=4 << 10)
SHARED.use(sys.argv[1])
block = SHARED.take(300_000)
block[:] = 1
if not os.fork():
    # The child lets go what it has, and makes tables of its own.
    del block
    assert SHARED.take(300_000) is None
    SHARED.use(sys.argv[1])
    own = SHARED.take(300_000)
    own[:] = 2
    SHARED.close()
    os._exit(0)
assert os.wait()[1] == 0
other = SHARED.take(300_000)
other[:] = 3
assert (block == 1).all()
assert len(os.listdir(sys.argv[1])) == 1
"""


def test_a_forked_child_has_a_file_of_its_own_and_processes_that_end_leave_none(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True, timeout=60)

    assert not [*tmp_path.iterdir()]


def test_a_file_that_was_removed_before_it_was_locked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swept_first(descriptor: int, operation: int) -> None:
        for path in tmp_path.iterdir():
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", swept_first)

    with pytest.raises(FileNotFoundError, match="before it was locked"):
        SharedFile(str(tmp_path))
