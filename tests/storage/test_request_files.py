"""Requests in files: read as they stand, refused where they cannot be, and gone with the workers that made them."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gristmill._wire.codecs.submit_codec import Part
from gristmill._wire.shared_files import SharedFile
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage.request_files import RequestFiles

_MOST = 1 << 20


@pytest.fixture
def files(tmp_path: Path, free_memory: None) -> RequestFiles:
    return RequestFiles(tmp_path / "requests", _MOST, clock=count(0, 100).__next__)


def test_a_request_is_a_copy_of_its_parts_in_their_order(files: RequestFiles) -> None:
    path = Path(files.offered()) / "one"
    path.write_bytes(b"tail, and what was there before, head")

    found = files.read("one", [(33, 4), b" and ", (0, 4), (0, 0), b""])
    path.write_bytes(b"another")

    assert bytes(found) == b"head and tail"


def test_only_the_owner_may_enter_the_directory(files: RequestFiles) -> None:
    assert os.stat(files.offered()).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", ".", "..", "../plan.json", "a/b", "a\0", "é", "a" * 65])
def test_a_name_that_leads_elsewhere_is_refused(files: RequestFiles, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"file\.name"):
        files.read(name, [(0, 1)])


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [(0, 0)],
        [(0, -1)],
        [(-1, 1)],
        [(5, 5), (-9, 1)],
        [(0, _MOST + 1)],
        [(0, _MOST), b"x"],
        [(0, 1 << 62), (0, 1 << 62)],
        [b"x"] * 257,
    ],
)
def test_parts_that_no_request_may_have_are_refused(files: RequestFiles, parts: list[Part]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"file\.parts"):
        files.read("one", parts)


@pytest.mark.parametrize("part", [(0, 6), (5, 1), (1 << 62, 1), ((1 << 63) - 1, 1)])
def test_a_file_that_is_shorter_than_it_is_said_to_be_is_refused(files: RequestFiles, part: tuple[int, int]) -> None:
    (Path(files.offered()) / "one").write_bytes(b"short")

    with pytest.raises(UnavailableError, match="send the request itself"):
        files.read("one", [b"first", part])


def test_what_is_no_file_of_the_directory_is_refused(files: RequestFiles, tmp_path: Path) -> None:
    directory = Path(files.offered())
    (tmp_path / "secret").write_bytes(b"secret")
    (directory / "link").symlink_to(tmp_path / "secret")
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")

    for name in ("link", "directory", "pipe", "nothing"):
        with pytest.raises(UnavailableError, match="send the request itself"):
            files.read(name, [(0, 1)])


@pytest.mark.parametrize(("free", "is_offered"), [(26, True), (24, False)])
def test_the_directory_is_offered_while_a_quarter_of_its_memory_is_free(
    files: RequestFiles, monkeypatch: pytest.MonkeyPatch, free: int, is_offered: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_blocks=100, f_frsize=4 << 10))

    assert bool(files.offered()) is is_offered


def test_a_directory_that_is_gone_is_not_offered(files: RequestFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(files.offered()).rmdir()
    monkeypatch.undo()

    assert files.offered() == ""


def test_files_go_that_nobody_holds_and_those_of_living_workers_stay(files: RequestFiles) -> None:
    directory = Path(files.offered())
    living = SharedFile(str(directory))
    block = living.take(17)
    assert block is not None
    block[:] = np.frombuffer(b"of one that lives", np.uint8)
    (directory / "left").write_bytes(b"of one that was killed")

    files.offered()

    [path] = directory.iterdir()
    assert bytes(files.read(path.name, [(0, 17)])) == b"of one that lives"
    living.retire()
    assert not [*directory.iterdir()]
