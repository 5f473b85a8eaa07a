"""Requests in files: read as they stand, refused where they cannot be, and gone with the workers that made them."""

from __future__ import annotations

import fcntl
import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from gristmill._client.rollout.request_files import RequestFile
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage.request_files import RequestFiles

_MOST = 1 << 20


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RequestFiles:
    """With room, whatever the disk has of it."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=100, f_blocks=100))
    return RequestFiles(tmp_path / "requests", _MOST, clock=count(0, 100).__next__)


def test_a_request_is_a_copy_of_the_first_bytes_of_its_file(files: RequestFiles) -> None:
    path = Path(files.offered()) / "one"
    path.write_bytes(b"request, and what was there before it")

    found = files.read("one", 7)
    path.write_bytes(b"another")

    assert bytes(found) == b"request"


def test_only_the_owner_may_enter_the_directory(files: RequestFiles) -> None:
    assert os.stat(files.offered()).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", ".", "..", "../plan.json", "a/b", "a\0", "é", "a" * 65])
def test_a_name_that_leads_elsewhere_is_refused(files: RequestFiles, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"file\.name"):
        files.read(name, 1)


@pytest.mark.parametrize("size", [-1, 0, _MOST + 1, 1 << 62])
def test_a_size_that_no_request_may_have_is_refused(files: RequestFiles, size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"file\.size"):
        files.read("one", size)


def test_a_file_that_is_shorter_than_it_is_said_to_be_is_refused(files: RequestFiles) -> None:
    (Path(files.offered()) / "one").write_bytes(b"short")

    with pytest.raises(UnavailableError, match="send the request itself"):
        files.read("one", 6)


def test_what_is_no_file_of_the_directory_is_refused(files: RequestFiles, tmp_path: Path) -> None:
    directory = Path(files.offered())
    (tmp_path / "secret").write_bytes(b"secret")
    (directory / "link").symlink_to(tmp_path / "secret")
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")

    for name in ("link", "directory", "pipe", "nothing"):
        with pytest.raises(UnavailableError, match="send the request itself"):
            files.read(name, 1)


@pytest.mark.parametrize(("free", "is_offered"), [(26, True), (24, False)])
def test_the_directory_is_offered_while_a_quarter_of_its_memory_is_free(
    files: RequestFiles, monkeypatch: pytest.MonkeyPatch, free: int, is_offered: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_blocks=100))

    assert bool(files.offered()) is is_offered


def test_a_directory_that_is_gone_is_not_offered(files: RequestFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(files.offered()).rmdir()
    monkeypatch.undo()

    assert files.offered() == ""


def test_files_go_that_nobody_holds_and_those_of_living_workers_stay(files: RequestFiles) -> None:
    directory = Path(files.offered())
    living = RequestFile(str(directory))
    living.write([b"of one that lives"])
    (directory / "left").write_bytes(b"of one that was killed")

    files.offered()

    [path] = directory.iterdir()
    assert bytes(files.read(path.name, 17)) == b"of one that lives"
    living.discard()
    assert not [*directory.iterdir()]


def test_a_file_is_written_in_pieces_over_what_it_has(files: RequestFiles) -> None:
    file = RequestFile(files.offered())
    file.write([b"x" * 100])
    file.write([bytes([number % 256]) for number in range(3_000)])

    [path] = Path(files.offered()).iterdir()

    assert file.size == 3_000
    assert bytes(files.read(path.name, file.size)) == bytes(number % 256 for number in range(3_000))
    file.discard()


def test_a_file_that_was_removed_before_it_was_locked_is_not_used(
    files: RequestFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = files.offered()

    def swept_first(descriptor: int, operation: int) -> None:
        for path in Path(directory).iterdir():
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", swept_first)

    with pytest.raises(FileNotFoundError, match="before it was locked"):
        RequestFile(directory)
