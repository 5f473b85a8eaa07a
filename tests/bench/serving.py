"""What the service costs when nobody uses it: time to be ready, memory when idle; and what a pull of a shard costs."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gristmill.torch import map_shard
from gristmill_service.pipeline import mill
from gristmill_service.store.writing import write_file
from tests.bench.figures import Figure, seconds
from tests.bench.pipeline import TMPFS
from tests.bench.processes import served
from tests.bench.workloads import workload

STARTS = 5
PULLS = 51


def figures() -> Iterator[Figure]:
    yield _pull()
    started = [_start() for _ in range(STARTS)]
    yield Figure("serve.ready_s", statistics.median(ready for ready, _ in started), "s", 2.0)
    yield Figure("serve.idle_mb", max(memory for _, memory in started), "MB", 250.0)


def _pull() -> Figure:
    """Opening the largest shard that the workloads give, as a trainer does."""
    work = workload("agent")
    batch = mill(work.steps, work.config("none"), run="bench", batch=0)
    shard = max(batch.shards, key=lambda one: one.size)
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        path = Path(directory) / "shard.safetensors"
        write_file(path, shard.iovec())
        pulled = statistics.median(seconds(lambda: map_shard(str(path))) for _ in range(PULLS))
    return Figure("pull.shared_memory_ms", pulled * 1e3, "ms", 1.0, shard.size / 2**20, "MiB shard")


def _start() -> tuple[float, float]:
    """Seconds until a fresh `gristmill serve` is ready, and its resident megabytes then."""
    with served() as service:
        maps = Path(f"/proc/{service.process.pid}/maps").read_text()
        if "libtorch" in maps:
            raise RuntimeError("the service loaded torch")
        pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
    return service.ready_s, pages * os.sysconf("SC_PAGE_SIZE") / 1e6
