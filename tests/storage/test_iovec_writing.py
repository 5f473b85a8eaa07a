"""Shards written by two threads: all of them or an error, and nobody still at it afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill_service import helper_thread
from gristmill_service.pipeline.layout.iovec import Iovec, Region, coalesced, cut, join
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage.shard_files import write_shards


class Source:
    """A shard of one byte repeated; `before` is called by the thread that is about to write it."""

    def __init__(self, rank: int, size: int = 1000, before: Callable[[], object] = lambda: None) -> None:
        self.address, self.size, self._before = ShardAddress("policy", 0, rank), size, before
        self.region = Region(bytes([rank % 256]) * size)

    def iovec(self) -> Iovec:
        self._before()
        return self.region.whole()


def written(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("policy-000/*")}


def test_every_shard_is_written_once_and_reported_once(tmp_path: Path) -> None:
    sources = [Source(rank, size=rank * 10) for rank in range(100)]
    reported: list[int] = []
    sizes = write_shards(tmp_path, sources, reported.append)
    assert sizes == {source.address: source.size for source in sources}
    assert sorted(reported) == sorted(sizes.values())
    assert written(tmp_path) == {f"rank-{s.address.rank:03d}.safetensors": s.region.array.tobytes() for s in sources}


def test_no_shards_are_no_files(tmp_path: Path) -> None:
    assert write_shards(tmp_path, []) == {}


def test_two_threads_write(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)
    write_shards(tmp_path, [Source(0, before=both.wait), Source(1, before=both.wait)])
    assert len(written(tmp_path)) == 2


@pytest.mark.parametrize("failing", [0, 1, 7])
def test_an_error_of_either_thread_is_raised_when_nothing_is_written_any_more(tmp_path: Path, failing: int) -> None:
    def fail() -> None:
        raise OSError("no room")

    def slow() -> None:
        time.sleep(0.01)

    sources = [Source(rank, before=fail if rank == failing else slow) for rank in range(40)]
    with pytest.raises(OSError, match="no room"):
        write_shards(tmp_path, sources)
    left = written(tmp_path)
    assert len(left) < 40
    time.sleep(0.05)
    assert written(tmp_path) == left


def test_batches_written_at_the_same_time_do_not_wait_for_the_one_helper(tmp_path: Path) -> None:
    busy, release = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        release.wait(30)

    helping = helper_thread._helper().submit(hold)
    busy.wait(30)
    try:
        with ThreadPoolExecutor(4) as pool:
            directories = [tmp_path / str(index) for index in range(4)]
            for directory in directories:
                directory.mkdir()
            list(pool.map(lambda directory: write_shards(directory, [Source(rank) for rank in range(9)]), directories))
        assert [len(written(directory)) for directory in directories] == [9] * 4
    finally:
        release.set()
        helping.result()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12), st.integers(1, 20))
@example([(0, 4), (4, 4)], 3)
def test_runs_cut_and_coalesced_are_the_same_bytes(runs: list[tuple[int, int]], nbytes: int) -> None:
    region = Region(bytes(range(50)))
    made = region.ranges(np.array([at for at, _ in runs], np.int64), np.array([n for _, n in runs], np.int64))
    whole = join(made)
    groups = [join(group) for group in cut(coalesced(made), nbytes)]
    assert b"".join(groups) == whole
    assert [len(group) for group in groups[:-1]] == [nbytes] * (len(groups) - 1)
    if runs == [(0, 4), (4, 4)]:
        assert len(coalesced(made)) == 1
