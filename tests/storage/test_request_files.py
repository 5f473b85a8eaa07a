"""Requests in files of workers: copied as they stand, refused where they cannot be, and gone with the workers."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from gristmill._wire.codecs.submit_codec import Part
from gristmill._wire.shared_files import SIZE, SharedFile, short
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage import request_files
from gristmill_service.storage.request_files import RequestFiles
from tests.run.harness import wait_until

_MOST = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RequestFiles]:
    files = RequestFiles(tmp_path / "requests", _MOST)
    yield files
    files.close()


def connected(files: RequestFiles) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    with short(files.offered()) as path:
        connection.connect(path)
    return connection


def opened() -> list[str]:
    """What this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(link))
    return found


def passed(files: RequestFiles, descriptors: Sequence[int]) -> bytes:
    """What the service answers to a worker who passes these, and goes."""
    with connected(files) as connection:
        socket.send_fds(connection, [b"x"], descriptors)
        return connection.recv(64)


def test_a_request_is_a_copy_of_its_parts_in_their_order(files: RequestFiles) -> None:
    file = SharedFile(files.offered())
    block = file.take(36)
    assert block is not None
    block[:] = np.frombuffer(b"tail, and what was there before head", np.uint8)

    found = files.read(file.name, [(32, 4), b" and ", (0, 4), (0, 0), b""])
    block[:] = 0

    assert bytes(found) == b"head and tail"
    file.retire()


def test_only_the_owner_may_enter_the_directory(files: RequestFiles) -> None:
    path = Path(files.offered())
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert path.parent.stat().st_mode & 0o777 == 0o700


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


@pytest.mark.parametrize("part", [(SIZE, 1), (SIZE - 1, 2), (1 << 62, 1), ((1 << 63) - 1, 1)])
def test_parts_that_the_file_does_not_have_are_refused(files: RequestFiles, part: tuple[int, int]) -> None:
    file = SharedFile(files.offered())

    with pytest.raises(UnavailableError, match="send the request itself"):
        files.read(file.name, [b"first", part])
    file.retire()


@pytest.mark.parametrize("name", ["", ".", "..", "../plan.json", "socket", "a\0", "é" * 1_000])
def test_a_name_that_no_worker_was_told_is_refused(files: RequestFiles, name: str) -> None:
    with pytest.raises(UnavailableError, match="send the request itself") as refused:
        files.read(name, [(0, 1)])
    assert len(str(refused.value)) < 200


def test_what_could_be_cut_off_while_it_is_read_is_not_mapped(files: RequestFiles, tmp_path: Path) -> None:
    unsealed, empty, large = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("unsealed", "empty", "large"))
    os.ftruncate(unsealed, 4_096)
    os.ftruncate(large, SIZE + 1)
    for sealed in (empty, large):
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, _SEALS)
    on_disk = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.write(on_disk, b"on disk")
    reader, writer = os.pipe()
    given = [unsealed, empty, large, on_disk, reader, writer]

    assert [passed(files, [descriptor]) for descriptor in given] == [b""] * 6
    assert passed(files, []) == b""
    wait_until(lambda: not files._files)
    for descriptor in given:
        os.close(descriptor)


def test_descriptors_that_are_refused_are_closed(files: RequestFiles, tmp_path: Path) -> None:
    path = tmp_path / "on disk"
    path.touch()
    descriptors = [os.open(path, os.O_RDONLY) for _ in range(9)]
    assert passed(files, descriptors) == b""
    for descriptor in descriptors:
        os.close(descriptor)

    wait_until(lambda: str(path) not in opened())


def test_a_worker_that_says_nothing_or_goes_at_once_keeps_nobody_from_coming(files: RequestFiles) -> None:
    silent = [connected(files) for _ in range(20)]
    for connection in silent[::2]:
        connection.close()

    file = SharedFile(files.offered())

    assert bytes(files.read(file.name, [b"1"])) == b"1"
    for connection in silent:
        connection.close()
    file.retire()


def test_whoever_comes_when_there_are_enough_workers_sends_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_files, "_MOST_WORKERS", 2)
    files = RequestFiles(tmp_path / "few", _MOST)
    first, second = SharedFile(files.offered()), SharedFile(files.offered())

    with pytest.raises(OSError, match=r"takes no more files|reset|Broken pipe"):
        SharedFile(files.offered())

    first.retire()
    wait_until(lambda: len(files._files) == 1)
    wait_until(lambda: files._places._value == 1)
    third = SharedFile(files.offered())
    assert bytes(files.read(third.name, [b"1"])) == b"1"
    for file in (second, third):
        file.retire()
    files.close()


def test_workers_leave_descriptors_for_what_stores_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for connections, workers in ((3, 1), (341, 85), (10_000, 256)):
        monkeypatch.setattr(request_files, "most_connections", lambda most=connections: most)
        with closing(RequestFiles(tmp_path / str(workers), _MOST)) as files:
            assert files._places._value == workers


def test_where_no_thread_can_be_started_workers_are_sent_away_and_come_later(
    files: RequestFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    places = files._places._value
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        for _ in range(2):
            with pytest.raises(OSError, match=r"takes no more files|reset|Broken pipe"):
                SharedFile(files.offered())

    wait_until(lambda: files._places._value == places)
    file = SharedFile(files.offered())
    assert bytes(files.read(file.name, [b"1"])) == b"1"
    file.retire()


def test_a_service_that_stops_reads_nothing_more_and_leaves_no_thread(files: RequestFiles) -> None:
    worker = SharedFile(files.offered())

    files.close()
    files.close()

    assert files.offered() == ""
    wait_until(lambda: not worker.is_known())
    with pytest.raises(UnavailableError, match="not here"):
        files.read(worker.name, [b"1"])
    worker.retire()


def test_a_path_may_be_longer_than_a_sockets_address(tmp_path: Path) -> None:
    files = RequestFiles(tmp_path / ("deep" * 50), _MOST)
    file = SharedFile(files.offered())

    assert len(files.offered()) > 200
    assert bytes(files.read(file.name, [b"1"])) == b"1"
    file.retire()
    files.close()


def test_where_no_socket_can_be_bound_none_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_files, "short", lambda path: nullcontext("/nowhere/socket"))

    files = RequestFiles(tmp_path / "requests", _MOST)

    assert files.offered() == ""
    files.close()


def test_requests_are_read_while_workers_come_and_go(files: RequestFiles) -> None:
    wrong = list[bytes]()

    def work(own: int) -> None:
        for _ in range(20):
            file = SharedFile(files.offered())
            block = file.take(100_000)
            assert block is not None
            block[:] = own
            offset = file.offset_of(block.data)
            assert offset is not None
            if (found := bytes(files.read(file.name, [(offset, 100_000)]))) != bytes([own]) * 100_000:
                wrong.append(found)
            file.retire()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    wait_until(lambda: not files._files)
