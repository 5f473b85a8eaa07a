"""Peak memory of one pass of the pipeline over its input: anonymous plus tmpfs, in bytes, in addition to its output."""

from __future__ import annotations

import ctypes
import gc
import shutil
import sys
import tempfile
from pathlib import Path

from tests.tools.bench.pipeline import TMPFS, make
from tests.tools.bench.workloads import workload


def main(name: str, merge: str) -> None:
    work = workload(name)
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        # A first pass loads every module, so that the second one's peak is data alone.
        make(workload("short"), merge, Path(directory) / "warm")
        shutil.rmtree(Path(directory) / "warm")
        # What it left free in the heap goes back, so that the second one's is counted.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        written = make(work, merge, Path(directory) / "batch")
        over = _status("VmHWM") - before + written
    print(over, written)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


if __name__ == "__main__":
    main(*sys.argv[1:])
