"""The way from a seal to published shards, of the agents' rollouts and of 16 times as many.

`python -m tests.tools.bench seals` measures. GB are those of the rows as they would be whole. With a journal shards go
into shared memory, with Redis into Redis, as a service's do. Each is measured in a process of its own, tuned as a
service's.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gristmill_service.process_tuning import tune_process
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardStore
from gristmill_service.storage.shared_memory import SharedMemoryShardStore
from tests.tools.bench.figures import Figure
from tests.tools.bench.once import distinct_bytes, redis_store, run_of, submit
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.rollouts import rollouts
from tests.tools.bench.workloads import Workload

REACH = {"redis": 2.5, "journal": 2.5}
PEAK_REACH = 2.0
TIMES = {1: 5, 16: 1}
"""How many times the rollouts, and how often that is measured."""
PEAK_TIMES = 4
"""Enough that what every process has, such as what is on its way to Redis, is little of it."""

_PATIENCE_S = 300.0


class Sealing(NamedTuple):
    """What one batch took: elapsed, and of all cores that this process had."""

    elapsed_s: float
    cpu_s: float


def figures() -> Iterator[Figure]:
    for kind, reach in REACH.items():
        for times, rounds in TIMES.items():
            size = times * rollouts("agent").input_bytes / 1e9
            with ProcessPoolExecutor(1, get_context("spawn"), tune_process) as pool:
                measured = [pool.submit(sealing, kind, times).result() for _ in range(rounds)]
            elapsed, cpu = (statistics.median(values) / size for values in zip(*measured, strict=True))
            name = f"{kind}.seal_seconds_per_gb" + ("" if times == 1 else f".{times}x")
            yield Figure(name, elapsed, "s/GB", reach, cpu, "core-s/GB")
    with ProcessPoolExecutor(1, get_context("spawn"), tune_process) as pool:
        peak, distinct = pool.submit(peak_of_owner).result()
    yield Figure("once.peak_ratio", peak / distinct, "x distinct", PEAK_REACH, distinct / 2**20, "MiB")


def sealing(kind: str, times: int) -> Sealing:
    return _sealing(kind, _multiplied(rollouts("agent"), times))


def peak_of_owner() -> tuple[int, int]:
    """Bytes that the process which owns a run in Redis has at most, from the first row to published shards, and those
    of the columns of distinct tokens."""
    # Loads every module, and starts the threads.
    _sealing("redis", rollouts("short"))
    work = _multiplied(rollouts("agent"), PEAK_TIMES)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with _watched() as peak:
        _sealing("redis", work)
    return peak[0], PEAK_TIMES * distinct_bytes(rollouts("agent"))


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Within it, the most anonymous memory above what there was before."""
    before, most, over = _anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], _anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _anonymous_bytes() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _sealing(kind: str, work: Workload) -> Sealing:
    with ExitStack() as opened:
        runs, shards = _stores(kind, opened)
        run = opened.enter_context(run_of(work, runs, shards))
        submit(run, work)
        begin, cpu = time.perf_counter(), time.process_time()
        run.seal(0)
        while not run.status().batches_published:
            if time.perf_counter() - begin > _PATIENCE_S:
                raise TimeoutError(f"the batch is not published within {_PATIENCE_S:.0f} s")
            time.sleep(0.001)
        return Sealing(time.perf_counter() - begin, time.process_time() - cpu)


def _stores(kind: str, opened: ExitStack) -> tuple[RunStore, ShardStore]:
    if kind == "redis":
        client, runs = opened.enter_context(redis_store())
        return runs, RedisShardStore(client, runs)
    directory = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=TMPFS)))
    journal, shards = JournalRunStore(directory, "never"), SharedMemoryShardStore(directory)
    opened.callback(journal.close)
    opened.callback(shards.close)
    return journal, shards


def _multiplied(work: Workload, times: int) -> Workload:
    """The groups that many times, under other names; tokens are the same ones in each."""
    steps = work.steps
    if times == 1:
        return work
    rows = np.tile(np.arange(len(steps)), times)
    many = steps.take(rows)
    uids = [f"{at // len(steps)}-{uid}" for at, uid in enumerate(many.uids)]
    return Workload(work.name, replace(many, uids=uids), work.samples)
