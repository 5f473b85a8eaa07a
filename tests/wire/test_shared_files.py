"""Memory that a service reads where it stands: never given twice, never more than there is, gone with its process."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gristmill._wire import shared_files
from gristmill._wire.reused_memory import ReusedMemory
from gristmill._wire.shared_files import SIZE, SharedFile, SharedFiles
from gristmill_service.storage.request_files import RequestFiles
from tests.run.harness import wait_until

LARGE = 300_000

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RequestFiles]:
    running = RequestFiles(tmp_path / "requests", SIZE)
    yield running
    running.close()


@pytest.fixture
def file(service: RequestFiles) -> Iterator[SharedFile]:
    file = SharedFile(service.offered())
    yield file
    file.retire()


def in_file(service: RequestFiles, file: SharedFile, memory: memoryview) -> bytes:
    offset = file.offset_of(memory)
    assert offset is not None, "it stands in the file"
    return bytes(service.read(file.name, [(offset, memory.nbytes)]))


def test_what_is_written_to_a_block_stands_in_the_file(service: RequestFiles, file: SharedFile) -> None:
    first, second = file.take(1_000), file.take(200_000)
    assert first is not None
    assert second is not None

    first[:], second[:] = 1, 2

    assert in_file(service, file, first.data) == b"\1" * 1_000
    assert in_file(service, file, second[100:].data) == b"\2" * 199_900
    assert file.offset_of(b"other memory") is None


def test_blocks_that_are_viewed_are_never_given_again(file: SharedFile) -> None:
    rng = random.Random(4)
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


def test_tables_leave_room_for_requests(file: SharedFile) -> None:
    tables = []
    while (block := file.take(1 << 20, is_table=True)) is not None:
        tables.append(block)

    assert len(tables) == (SIZE >> 20) - 4
    assert file.take(1 << 20) is not None
    tables.pop(0)
    assert file.take(1 << 20, is_table=True) is not None


def test_where_no_memory_is_left_there_is_no_block(file: SharedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    held = file.take(1 << 20)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    assert file.take(1 << 20) is None
    del held
    assert file.take(1 << 20) is not None, "what it has is used again"


def test_a_file_that_is_retired_gives_no_blocks_and_what_views_it_stays(
    service: RequestFiles, file: SharedFile
) -> None:
    block = file.take(1_000)
    assert block is not None
    block[:] = 7

    file.retire()

    wait_until(lambda: not service._files)
    assert file.take(1_000) is None
    assert (block == 7).all()


def test_nobody_can_cut_a_file_off_that_the_service_maps(file: SharedFile) -> None:
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(file._descriptor, size)


def test_each_service_has_one_file_until_it_is_retired(service: RequestFiles) -> None:
    files = SharedFiles()
    first = files.of(service.offered())
    assert first is not None
    assert files.of(service.offered()) is first

    files.retire(first)

    second = files.of(service.offered())
    assert second is not None
    assert second is not first
    files.close()
    wait_until(lambda: not service._files)


def test_files_of_services_that_are_gone_are_given_up(service: RequestFiles, tmp_path: Path) -> None:
    files, other = SharedFiles(), RequestFiles(tmp_path / "gone", SIZE)
    gone = files.of(other.offered())
    assert gone is not None
    assert gone.is_known()
    other.close()
    wait_until(lambda: not gone.is_known())

    files.of(service.offered())

    assert gone.take(1) is None
    files.close()


def test_a_process_has_files_of_few_services(tmp_path: Path) -> None:
    files, services = SharedFiles(), [RequestFiles(tmp_path / str(number), SIZE) for number in range(9)]
    for one in services:
        files.of(one.offered())

    wait_until(lambda: sum(len(one._files) for one in services) == 4)
    files.close()
    for one in services:
        one.close()


@pytest.mark.parametrize("address", ["", "/nowhere/socket"])
def test_where_no_file_can_be_passed_tables_are_made_in_other_memory(address: str) -> None:
    files = SharedFiles()
    files.use(address)

    assert files.take(LARGE) is None


def test_a_service_that_does_not_answer_is_asked_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "_GREETING_S", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        with shared_files.short(str(tmp_path / "socket")) as path:
            silent.bind(path)
        silent.listen()
        files = SharedFiles()
        files.use(str(tmp_path / "socket"))

        assert [files.take(LARGE) for _ in range(3)] == [None] * 3
        assert files.of(str(tmp_path / "socket")) is None
        silent.settimeout(60)
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()

        monkeypatch.setattr(shared_files, "_ASKED_AGAIN_S", 0.0)
        files._unreachable.clear()
        assert [files.take(LARGE) for _ in range(3)] == [None] * 3
        for _ in range(3):
            silent.accept()[0].close()


def test_a_service_that_failed_to_answer_a_call_is_waited_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "_GREETING_S", 60.0)
    monkeypatch.setattr(shared_files, "_DOUBTED_GREETING_S", 0.2)
    files, path = SharedFiles(), tmp_path / "requests" / "socket"
    with closing(RequestFiles(path.parent, SIZE)) as answering:
        file = files.of(answering.offered())
        assert file is not None
        files.retire(file)
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hanging:
        hanging.bind(str(path))
        hanging.listen()
        begin = time.monotonic()

        assert files.of(str(path)) is None
        assert time.monotonic() - begin < 30


def test_columns_of_large_tables_are_made_in_the_file(service: RequestFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SharedFiles()
    files.use(service.offered())
    monkeypatch.setattr("gristmill._wire.reused_memory.SHARED", files)

    joined = ReusedMemory().joined([np.arange(LARGE, dtype=np.int32), np.arange(5, dtype=np.int32)], np.int32)

    file = files.of(service.offered())
    assert file is not None
    found = np.frombuffer(in_file(service, file, joined.data.cast("B")), np.int32)
    assert np.array_equal(found, joined)
    files.close()


def test_threads_share_a_file(file: SharedFile) -> None:
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
from gristmill._wire.shared_files import SHARED

address = sys.argv[1]
SHARED.use(address)
block = SHARED.take(300_000)
block[:] = 1
name = SHARED.of(address).name
if not os.fork():
    # The child lets go what it has, and makes tables of its own.
    del block
    assert SHARED.take(300_000) is None
    SHARED.use(address)
    own = SHARED.take(300_000)
    own[:] = 2
    assert SHARED.of(address).name != name
    SHARED.close()
    os._exit(0)
assert os.wait()[1] == 0
assert SHARED.of(address).is_known()
other = SHARED.take(300_000)
other[:] = 3
assert (block == 1).all()
"""


def test_a_forked_child_has_a_file_of_its_own_and_processes_that_end_leave_none(service: RequestFiles) -> None:
    subprocess.run([sys.executable, "-c", FORKS, service.offered()], check=True, timeout=60)

    wait_until(lambda: not service._files)


def test_a_parent_that_is_killed_leaves_no_file_while_its_forked_child_lives(service: RequestFiles) -> None:
    program = """
import os, sys, time
from gristmill._wire.shared_files import SHARED

SHARED.of(sys.argv[1])
if os.fork():
    os._exit(1)
print(os.getpid(), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program, service.offered()], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.wait(60)
        wait_until(lambda: not service._files)
    finally:
        os.kill(child, 9)
        process.stdout.close()
