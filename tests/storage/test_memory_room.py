"""What does not fit into memory is refused before any of it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gristmill.errors import ResourceExhaustedError
from gristmill_service.pipeline.layout.iovec import Iovec
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage import memory, shared_memory
from gristmill_service.storage import memory_room as rooms
from gristmill_service.storage.memory_room import UNKNOWN, MemoryRoom, memory_room
from gristmill_service.storage.shard_store import ShardStore
from tests.run.harness import Shard

MEMINFO = "MemTotal:       1000 kB\nMemFree:        10 kB\nMemAvailable:   600 kB\nHugePages_Total:   0\n"


def machine(directory: Path, **cgroup: str) -> MemoryRoom:
    """cgroup: the files of a container's own."""
    (directory / "meminfo").write_text(MEMINFO)
    for name, text in cgroup.items():
        (directory / f"memory.{name}").write_text(text)
    return memory_room(directory, directory)


def test_a_machine_has_what_it_says(tmp_path: Path) -> None:
    assert machine(tmp_path) == MemoryRoom(600 << 10, 1000 << 10)


def test_a_container_has_what_its_limit_leaves_and_what_the_kernel_gives_back(tmp_path: Path) -> None:
    stat = "anon 1\nfile 50000\nshmem 20000\n"
    available = machine(tmp_path, max="200000\n", current="150000\n", stat=stat)
    assert available == MemoryRoom(200_000 - 150_000 + 50_000 - 20_000, 200_000)


@pytest.mark.parametrize("most", ["max\n", ""])
def test_a_container_without_a_limit_has_the_machines(tmp_path: Path, most: str) -> None:
    assert machine(tmp_path, max=most, current="1\n", stat="file 1\nshmem 1\n") == MemoryRoom(600 << 10, 1000 << 10)


def test_a_system_that_says_nothing_has_any(tmp_path: Path) -> None:
    assert memory_room(tmp_path, tmp_path) == UNKNOWN
    assert rooms.memory_room().available < UNKNOWN.available, "this one does"


@pytest.mark.parametrize("kind", ["memory", "shared memory"])
def test_a_batch_waits_for_memory_though_all_of_it_were_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    makes: dict[str, Callable[[], ShardStore]] = {
        "memory": memory.MemoryShardStore,
        "shared memory": lambda: shared_memory.SharedMemoryShardStore(tmp_path),
    }
    store, address = makes[kind](), ShardAddress("policy", 0, 0)
    room = MemoryRoom(100, 200)
    for module in (memory, shared_memory):
        monkeypatch.setattr(module, "memory_room", lambda: room)
    with pytest.raises(ResourceExhaustedError, match=r"batch 0 .* 150 bytes"):
        store.publish("run", 0, b"{}", [Shard(address, b"x" * 150)])
    with pytest.raises(ResourceExhaustedError, match=r"batch 0 has 250 bytes.* 200 .*; .*lower train_batch_size"):
        store.publish("run", 0, b"{}", [Shard(address, b"x" * 250)])
    assert not list(tmp_path.glob("gristmill-*/*"))
    room = MemoryRoom(200, 200)
    store.publish("run", 0, b"{}", [Shard(address, b"x" * 150)])
    assert b"".join(store.read("run", 0, address)) == b"x" * 150
    store.close()


@pytest.mark.parametrize("kind", ["memory", "shared memory"])
def test_batches_that_are_written_at_once_fill_no_more_memory_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store: ShardStore = (
        memory.MemoryShardStore() if kind == "memory" else shared_memory.SharedMemoryShardStore(tmp_path)
    )
    monkeypatch.setattr(memory, "memory_room", lambda: MemoryRoom(200, 200))
    monkeypatch.setattr(shared_memory, "memory_room", lambda: MemoryRoom(200, 200))
    address, writing, may_write = ShardAddress("policy", 0, 0), threading.Event(), threading.Event()

    class Slow(Shard):
        def iovec(self) -> Iovec:
            writing.set()
            assert may_write.wait(60)
            return super().iovec()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.publish, "run", 0, b"{}", [Slow(address, b"x" * 150)])
        assert writing.wait(60)
        with pytest.raises(ResourceExhaustedError, match=r"batch 0 .* 150 bytes"):
            store.publish("other", 0, b"{}", [Shard(address, b"x" * 150)])
        store.publish("small", 0, b"{}", [Shard(address, b"x" * 50)])
        may_write.set()
        first.result(60)
    store.publish("other", 0, b"{}", [Shard(address, b"x" * 150)])
    store.close()
