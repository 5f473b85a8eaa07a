"""When each process last had a call that succeeded: a slot each in a mapped file, written without a system call."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

SLOTS = 64
_TIME_BYTES = 8


class Heartbeats:
    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(SLOTS * _TIME_BYTES))
        with path.open("r+b") as file:
            # One store a time, so that nobody reads half of one.
            self._times = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def beat(self, slot: int) -> None:
        self._times[slot] = time.time()

    def last(self, slot: int) -> float:
        return self._times[slot]
