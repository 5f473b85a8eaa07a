"""Measures what the service costs when nobody uses it: time to be ready, and memory when idle."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import served

STARTS = 5


def figures() -> Iterator[Figure]:
    started = [_start() for _ in range(STARTS)]
    yield Figure("serve.ready_s", statistics.median(ready for ready, _ in started), "s", 2.0)
    yield Figure("serve.idle_mb", max(memory for _, memory in started), "MB", 250.0)


def _start() -> tuple[float, float]:
    """Seconds until a fresh `gristmill serve` is ready, and its resident megabytes then."""
    with served() as service:
        maps = Path(f"/proc/{service.process.pid}/maps").read_text()
        if "libtorch" in maps:
            raise RuntimeError("the service loaded torch")
        pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
    return service.ready_s, pages * os.sysconf("SC_PAGE_SIZE") / 1e6
