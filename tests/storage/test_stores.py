"""What every store does, the one in shared memory and its in-process twin."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.codecs.zstd_frames import compressed
from gristmill.errors import NotFoundError, ResourceExhaustedError, UnavailableError
from gristmill_service.pipeline.layout import iovec
from gristmill_service.pipeline.layout.iovec import Iovec, Region
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.shard_files import write_file
from gristmill_service.storage.shard_store import ShardsLostError, ShardStore
from gristmill_service.storage.shared_memory import SharedMemoryShardStore
from tests.redis.fence import OpenFence
from tests.redis.servers import RedisServer


class Source:
    """A shard of given bytes, in groups of buffers as the pipeline gives them."""

    def __init__(self, data: bytes, address: ShardAddress, fails: Exception | None = None) -> None:
        self.address, self._data, self._fails = address, data, fails

    @property
    def size(self) -> int:
        return len(self._data)

    def iovec(self) -> Iovec:
        if self._fails:
            raise self._fails
        half = len(self._data) // 2
        self._regions = [Region(self._data[:half]), Region(b""), Region(self._data[half:])]
        return np.concatenate([region.whole() for region in self._regions])


FIRST, SECOND = ShardAddress("policy", 0, 0), ShardAddress("critic", 1, 7)


def sources(first: bytes = b"first shard", second: bytes = b"second") -> list[Source]:
    return [Source(first, FIRST), Source(second, SECOND)]


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server


def in_shared_memory(request: pytest.FixtureRequest) -> Iterator[ShardStore]:
    directory = request.getfixturevalue("tmp_path")
    store = SharedMemoryShardStore(directory)
    yield store
    store.close()
    assert list(directory.iterdir()) == []


def in_memory(request: pytest.FixtureRequest) -> Iterator[ShardStore]:
    yield MemoryShardStore()


def in_redis(request: pytest.FixtureRequest) -> Iterator[ShardStore]:
    client = request.getfixturevalue("redis_server").client()
    client.flushall()
    yield RedisShardStore(client, OpenFence(client))


@pytest.fixture(params=[in_shared_memory, in_memory, in_redis], ids=["shared_memory", "memory", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[ShardStore]:
    yield from request.param(request)


class TestEveryStore:
    def test_a_published_batch_gives_its_plan_its_table_and_every_shard(self, store: ShardStore) -> None:
        nbytes = store.publish("run", 0, b"{}", sources(), b"numbers")
        forms = [store.read_frames("run", 0, one) or store.read("run", 0, one) for one in (FIRST, SECOND)]
        stored = compressed if isinstance(store, RedisShardStore) else bytes
        documents = len(stored(b"{}")) + len(stored(b"numbers"))
        assert nbytes == documents + sum(len(data) for form in forms for data in form)
        assert (store.plan("run", 0), store.table("run", 0)) == (b"{}", b"numbers")
        assert b"".join(store.read("run", 0, FIRST)) == b"first shard"
        assert b"".join(store.read("run", 0, SECOND)) == b"second"
        assert store.locate("run", 0, SECOND).size == 6

    def test_a_batch_that_is_published_again_takes_the_place_of_the_one_before(self, store: ShardStore) -> None:
        store.publish("run", 0, b"{}", sources())
        store.publish("run", 0, b'{"again":1}', sources()[:1], b"other numbers")
        assert (store.plan("run", 0), store.table("run", 0)) == (b'{"again":1}', b"other numbers")
        assert b"".join(store.read("run", 0, sources()[0].address))
        with pytest.raises(NotFoundError):
            store.locate("run", 0, sources()[1].address)

    def test_nothing_of_a_batch_is_there_before_it_is_published(self, store: ShardStore) -> None:
        for read in (store.plan, store.table, lambda run, batch: store.locate(run, batch, FIRST)):
            with pytest.raises(NotFoundError, match="run 'run': batch 0 is not published"):
                read("run", 0)

    def test_a_shard_that_the_batch_does_not_have_is_not_found(self, store: ShardStore) -> None:
        store.publish("run", 0, b"{}", sources())
        with pytest.raises(NotFoundError, match="batch 0 has no shard policy-000/rank-009"):
            store.locate("run", 0, ShardAddress("policy", 0, 9))

    def test_a_batch_that_fails_half_way_leaves_nothing(self, store: ShardStore) -> None:
        broken = [Source(b"good", FIRST), Source(b"bad!", SECOND, fails=ValueError("no rows"))]
        with pytest.raises(ValueError, match="no rows"):
            store.publish("run", 0, b"{}", broken)
        with pytest.raises(NotFoundError):
            store.plan("run", 0)
        store.publish("run", 0, b"{}", sources())

    def test_a_freed_batch_is_gone_and_freeing_it_again_is_no_error(self, store: ShardStore) -> None:
        store.publish("run", 0, b"{}", sources())
        store.publish("run", 1, b"{1}", sources())
        store.free("run", 0)
        store.free("run", 0)
        with pytest.raises(NotFoundError):
            store.locate("run", 0, FIRST)
        assert store.plan("run", 1) == b"{1}"

    def test_a_read_that_has_begun_ends_although_the_batch_is_freed(self, store: ShardStore) -> None:
        data = os.urandom(5 << 20)
        store.publish("run", 0, b"{}", sources(first=data))
        pieces = store.read("run", 0, FIRST)
        begun = next(pieces)
        store.free("run", 0)
        assert begun + b"".join(pieces) == data

    def test_deleting_a_run_leaves_the_others(self, store: ShardStore) -> None:
        for run in ("one", "other"):
            store.publish(run, 0, b"{}", sources())
        store.delete_run("one")
        store.delete_run("one")
        with pytest.raises(NotFoundError):
            store.plan("one", 0)
        assert store.plan("other", 0) == b"{}"

    def test_freeing_batches_while_their_run_is_deleted_is_no_error(self, store: ShardStore) -> None:
        for _ in range(20):
            for batch in range(8):
                store.publish("run", batch, b"{}", sources())
            with ThreadPoolExecutor(4) as pool:
                calls = [pool.submit(store.free, "run", batch) for batch in range(8)]
                calls += [pool.submit(store.delete_run, "run") for _ in range(2)]
            for call in calls:
                call.result()
            with pytest.raises(NotFoundError):
                store.plan("run", 0)

    @pytest.mark.parametrize(
        "run", ["..", ".", "a/b", "/etc", "~root", "x" * 128, "日本語" * 40, "a\0b", "%2e%2e", "-"]
    )
    def test_any_run_name_is_a_name_of_its_own(self, store: ShardStore, run: str) -> None:
        store.publish(run, 0, b"{}", sources())
        store.publish("plain", 0, b"plain", sources())
        assert store.plan(run, 0) == b"{}"
        store.delete_run(run)
        assert store.plan("plain", 0) == b"plain"

    def test_readers_see_all_of_a_batch_or_none_of_it(self, store: ShardStore) -> None:
        problems = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                try:
                    store.plan("run", 0)
                    seen = b"".join(store.read("run", 0, FIRST)), b"".join(store.read("run", 0, SECOND))
                except NotFoundError:
                    continue
                if seen != (b"first shard", b"second"):
                    problems.append(seen)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for _ in range(50):
            store.publish("run", 0, b"{}", sources())
            store.free("run", 0)
        done.set()
        for reader in readers:
            reader.join()
        assert problems == []


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    store = SharedMemoryShardStore(tmp_path)
    store.publish("run", 0, b"{}", sources())
    for path in [store.root, *store.root.rglob("*")]:
        want = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == want, path
    store.close()


def test_a_location_names_a_file_with_exactly_the_shards_bytes(tmp_path: Path) -> None:
    store = SharedMemoryShardStore(tmp_path)
    store.publish("run", 3, b"{}", sources())
    name = store.locate("run", 3, FIRST).shared_memory_path
    assert name is not None
    path = Path(name)
    assert path.read_bytes() == b"first shard"
    assert path.parts[-3:] == ("batch-00003", "policy-000", "rank-000.safetensors")
    store.close()


def test_a_missing_directory_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"shared_memory_dir: cannot write to .*missing: No such file"):
        SharedMemoryShardStore(tmp_path / "missing")


def test_a_full_tmpfs_refuses_the_batch_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    store = SharedMemoryShardStore(tmp_path)
    full = [Source(b"some", FIRST, fails=OSError(errno.ENOSPC, "no space"))]
    with pytest.raises(ResourceExhaustedError, match=r"batch 0 does not fit .* lower max_buffered_batches"):
        store.publish("run", 0, b"{}", full)
    assert [path for path in store.root.rglob("*") if path.is_file()] == []
    store.close()


def test_what_the_operating_system_refuses_is_unavailable_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedMemoryShardStore(tmp_path)
    store.publish("run", 0, b"{}", sources())

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        patch.setattr(Path, "read_bytes", refuse)
        for call in (
            lambda: store.publish("run", 1, b"{}", sources()),
            lambda: store.plan("run", 0),
            lambda: store.free("run", 0),
            lambda: store.delete_run("run"),
        ):
            with pytest.raises(UnavailableError, match="Input/output error"):
                call()
    assert store.plan("run", 0) == b"{}"
    store.free("run", 0)
    assert [path for path in store.root.rglob("*") if path.is_file()] == []
    store.close()


def test_what_was_published_is_never_truncated_whatever_becomes_of_its_batch(tmp_path: Path) -> None:
    store, data = SharedMemoryShardStore(tmp_path), os.urandom(3 << 20)

    def map_it(run: str, batch: int) -> mmap.mmap:
        store.publish(run, batch, b"{}", sources(first=data))
        with open(store.locate(run, batch, FIRST).shared_memory_path or "", "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    # A page of a file that was truncated under its map would kill the process that touches it.
    published_anew, freed, deleted, closed = map_it("run", 0), map_it("run", 1), map_it("other", 0), map_it("last", 0)
    store.publish("run", 0, b"{}", sources(first=b"shorter"))
    store.free("run", 1)
    store.delete_run("other")
    store.close()
    for mapped in (published_anew, freed, deleted, closed):
        assert mapped[:] == data
        mapped.close()


@pytest.mark.parametrize("size", [0, 5, 20], ids=["emptied", "shortened", "lengthened"])
def test_a_shard_that_somebody_truncated_is_lost_and_may_be_published_again(tmp_path: Path, size: int) -> None:
    store = SharedMemoryShardStore(tmp_path)
    store.publish("run", 0, b"{}", sources())
    os.truncate(store.locate("run", 0, FIRST).shared_memory_path or "", size)
    with pytest.raises(ShardsLostError, match=rf"has {size} bytes instead of 11, because another program changed"):
        store.read("run", 0, FIRST)
    assert b"".join(store.read("run", 0, SECOND)) == b"second"
    store.publish("run", 0, b"{}", sources(), b"table")
    assert b"".join(store.read("run", 0, FIRST)) == b"first shard"
    [table] = store.root.rglob("table")
    os.truncate(table, 4)
    with pytest.raises(ShardsLostError, match="has 4 bytes instead of 5, because another program changed"):
        store.table("run", 0)
    assert store.plan("run", 0) == b"{}"
    store.close()


def test_shards_that_somebody_removed_are_lost_and_may_be_published_again(tmp_path: Path) -> None:
    """As a system that cleans up after a user's logout does: the directory goes with all that is in it."""
    store = SharedMemoryShardStore(tmp_path)
    store.publish("run", 0, b"{}", sources())
    shutil.rmtree(store.root)
    for read in (lambda: store.read("run", 0, FIRST), lambda: store.plan("run", 0)):
        with pytest.raises(ShardsLostError, match="was removed by another program"):
            read()
    store.free("run", 0)
    with pytest.raises(NotFoundError, match="not published, or already freed"):
        store.read("run", 0, FIRST)
    store.publish("run", 0, b"{}", sources())
    assert b"".join(store.read("run", 0, FIRST)) == b"first shard"
    assert store.root.stat().st_mode & 0o777 == 0o700
    store.close()


def test_a_directory_that_somebody_put_in_the_place_of_the_own_is_not_written_to(tmp_path: Path) -> None:
    store = SharedMemoryShardStore(tmp_path)
    store.root.rmdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    store.root.symlink_to(elsewhere)
    with pytest.raises(UnavailableError, match="belongs to another user, or is not a directory"):
        store.publish("run", 0, b"{}", sources())
    assert not list(elsewhere.iterdir())
    store.root.unlink()
    store.close()


DIES = """
import os, sys
from pathlib import Path
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.shared_memory import SharedMemoryShardStore
store = SharedMemoryShardStore(Path(sys.argv[1]))
(store.root / "left").write_bytes(b"behind")
print(store.root, flush=True)
if sys.argv[2] == "dies":
    os._exit(9)
sys.stdin.read()
"""


def start(directory: Path, fate: str) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", DIES, str(directory), fate]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_leftovers_of_a_dead_process_are_removed_at_start_and_a_living_ones_are_not(tmp_path: Path) -> None:
    living, kept = start(tmp_path, "lives")
    dead, left = start(tmp_path, "dies")
    dead.communicate()
    assert left.exists()
    store = SharedMemoryShardStore(tmp_path)
    try:
        assert not left.exists()
        assert (kept / "left").read_bytes() == b"behind"
        assert store.root.exists()
    finally:
        living.communicate("")
        store.close()


def test_a_batch_that_is_being_written_while_the_store_closes_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = SharedMemoryShardStore(tmp_path)

    class ClosesMeanwhile(Source):
        def iovec(self) -> Iovec:
            store.close()
            return super().iovec()

    with pytest.raises((UnavailableError, FileNotFoundError)):
        store.publish("run", 0, b"{}", [ClosesMeanwhile(b"data", FIRST)])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_could_not_be_removed_keeps_its_lock_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedMemoryShardStore(tmp_path)
    store.publish("run", 0, b"{}", sources())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        store.close()
    assert store.root.exists()
    SharedMemoryShardStore(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_planted_lock_does_not_lead_the_clean_up_astray(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("data")
    base = tmp_path / "shm"
    base.mkdir()
    name = f"gristmill-{os.geteuid()}-1-planted"
    (base / f"{name}.lock").touch()
    (base / name).symlink_to(victim)
    (base / f"gristmill-{os.geteuid()}-2-link.lock").symlink_to(victim / "precious")
    store = SharedMemoryShardStore(base)
    store.close()
    assert (victim / "precious").read_text() == "data"


def test_a_file_is_written_whole_whatever_the_number_of_runs(tmp_path: Path) -> None:
    regions = [Region(bytes([index % 256]) * (index % 7)) for index in range(5000)]
    write_file(tmp_path / "file", np.concatenate([region.whole() for region in regions]))
    assert (tmp_path / "file").read_bytes() == b"".join(region.array.tobytes() for region in regions)


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=30), st.lists(st.integers(1, 7), max_size=40))
def test_short_writes_are_continued_where_they_ended(pieces: list[bytes], limits: list[int]) -> None:
    regions = [Region(piece) for piece in pieces]
    allowed = iter(limits)

    class Libc:
        def writev(self, descriptor: int, address: int, count: int) -> int:
            runs = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(address)).reshape(-1, 2)
            data = iovec.join(runs)[: next(allowed, None)]
            return os.write(descriptor, data)

    reader, writer = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iovec, "_libc", Libc())
        iovec.write(writer, np.concatenate([region.whole() for region in regions]))
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"".join(pieces)


def test_a_failing_write_says_why(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        iovec.write(descriptor, Region(b"data").whole())
    os.close(descriptor)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, 2), (0, 5), (0, -1), (9, 0)])
def test_no_run_leaves_its_buffer(start: int, length: int) -> None:
    with pytest.raises(IndexError, match="outside of its buffer of 4 bytes"):
        Region(b"1234").ranges(np.array([start]), np.array([length]))
