"""Descriptors whose number is never used after it could be another file's."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gristmill.errors import UnavailableError
from gristmill_service.storage.journal.open_file import OpenFile


def opened(path: Path) -> tuple[OpenFile, int]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    return OpenFile(path, descriptor), descriptor


def is_open(descriptor: int, path: Path) -> bool:
    """Whether it is this file's: another thread of the process may have been given the number."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return os.path.samestat(found, path.stat())


def test_a_file_is_closed_when_its_last_user_leaves(tmp_path: Path) -> None:
    file, descriptor = opened(tmp_path / "file")
    with file.use() as one:
        with file.use() as other:
            assert one == other == descriptor
            file.close()
            assert is_open(descriptor, tmp_path / "file")
        assert is_open(descriptor, tmp_path / "file")
    assert not is_open(descriptor, tmp_path / "file")


def test_a_closed_file_has_no_more_users_and_says_why(tmp_path: Path) -> None:
    file, descriptor = opened(tmp_path / "file")
    with file.use():
        file.close()
        with pytest.raises(
            UnavailableError, match="closed meanwhile, because the run is being deleted or read again; ask again"
        ):
            file.use().__enter__()
    assert not is_open(descriptor, tmp_path / "file")


def test_closing_again_closes_nothing_of_anybody_else(tmp_path: Path) -> None:
    for _ in range(100):
        file, descriptor = opened(tmp_path / "file")
        file.close()
        _, reused = opened(tmp_path / "another")
        if reused == descriptor:
            break
        # Another thread of the process was given the number.
        os.close(reused)
    assert reused == descriptor, "the system gives the number away"
    file.close()
    assert is_open(reused, tmp_path / "another")
    os.close(reused)


def test_a_user_that_fails_has_left(tmp_path: Path) -> None:
    file, descriptor = opened(tmp_path / "file")
    with pytest.raises(ValueError, match="failed"), file.use():
        raise ValueError("failed")
    file.close()
    assert not is_open(descriptor, tmp_path / "file")


def write(file: OpenFile, name: bytes, begun: threading.Event) -> None:
    try:
        for _ in range(20):
            with file.use() as descriptor:
                os.write(descriptor, name)
                begun.set()
    except UnavailableError:
        begun.set()


def test_files_that_are_closed_while_they_are_written_hold_their_own_bytes_alone(tmp_path: Path) -> None:
    foreign = []

    def live(name: bytes) -> None:
        for number in range(200):
            path, begun = tmp_path / f"{name!r}-{number}", threading.Event()
            file, _ = opened(path)
            writing = threading.Thread(target=write, args=(file, name, begun))
            writing.start()
            begun.wait()
            file.close()
            file.close()
            writing.join()
            if set(path.read_bytes()) != set(name):
                foreign.append(path.name)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(live, (b"a", b"b", b"c", b"d")))
    assert foreign == []
