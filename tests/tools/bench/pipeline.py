"""The pipeline, arrays in to shard bytes in shared memory, against reading the input and writing the output once.

`python -m tests.tools.bench.pipeline short prefix 10` makes one workload's batch again and again, for a profiler
(seconds).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.steps import check
from gristmill_service.pipeline import build_batch
from gristmill_service.storage.shard_files import write_shards
from tests.tools.bench.figures import Figure, paired
from tests.tools.bench.workloads import Workload, workload

TMPFS = "/dev/shm"
NAMES = ("short", "agent", "anti")
MERGES = ("none", "prefix")
ROUNDS = 15
_CHUNK = 8 << 20


def figures() -> Iterator[Figure]:
    for name in NAMES:
        work = workload(name)
        for merge in MERGES:
            yield _speed(work, merge)
    for name in NAMES:
        for merge in MERGES:
            yield _memory(name, merge)


def _speed(work: Workload, merge: str) -> Figure:
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        target = Path(directory) / "batch"
        size = 0

        def ours() -> None:
            nonlocal size
            size = make(work, merge, target)
            shutil.rmtree(target)

        ours()
        warm = np.ones(_CHUNK, np.uint8)

        def bound() -> None:
            for column in work.columns():
                read_once(column.values)
            write_once(Path(directory) / "bound", warm, size)

        ratio, limit = paired(ours, bound, ROUNDS)
    return Figure(f"pipeline.{work.name}.{merge}", ratio, "x bound", 1.5, limit * 1e3, "ms")


def make(work: Workload, merge: str, target: Path) -> int:
    """The whole path once; the bytes written."""
    batch = build_batch(check(work.steps), work.config(merge), run="bench", batch=0)
    target.mkdir()
    return sum(write_shards(target, batch.shards).values())


def read_once(values: np.ndarray) -> None:
    data = values.view(np.uint8)
    data[: len(data) // 8 * 8].view(np.uint64).max()


def write_once(path: Path, warm: NDArray[np.uint8], size: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        while size > 0:
            size -= os.write(descriptor, warm.data[: min(size, _CHUNK)])
    finally:
        os.close(descriptor)
        path.unlink()


def _memory(name: str, merge: str) -> Figure:
    """In a process of its own, so that the peak is this workload's."""
    command = [sys.executable, "-m", "tests.tools.bench.memory", name, merge]
    over, output = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    return Figure(f"memory.{name}.{merge}", over / output, "peak over input / output", 1.2, output / 2**20, "MiB")


def _again_and_again(name: str, merge: str, duration: float) -> None:
    work = workload(name)
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        end = time.monotonic() + duration
        while time.monotonic() < end:
            make(work, merge, Path(directory) / "batch")
            shutil.rmtree(Path(directory) / "batch")


if __name__ == "__main__":
    _again_and_again(sys.argv[1], sys.argv[2], float(sys.argv[3]))
