"""What the service costs when nobody uses it: time to be ready, memory when idle; and what a pull of a shard costs."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gristmill.torch import map_shard
from gristmill_service.pipeline import mill
from gristmill_service.store.writing import write_file
from tests.bench.figures import Figure, seconds
from tests.bench.pipeline import TMPFS
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
    with tempfile.TemporaryDirectory() as directory:
        announced = Path(directory) / "announced.json"
        command = [str(Path(sys.executable).with_name("gristmill")), "serve", "--announce", str(announced)]
        command += ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not announced.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"gristmill serve ended with {process.returncode}")
                time.sleep(0.005)
            ready = time.perf_counter() - begin
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            if "libtorch" in maps:
                raise RuntimeError("the service loaded torch")
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
    return ready, pages * os.sysconf("SC_PAGE_SIZE") / 1e6
