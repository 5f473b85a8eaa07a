"""When each process last had a call that succeeded: a slot each in a mapped file, written without a system call."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

SLOTS = 64
_TIME = struct.Struct("<d")


class Heartbeats:
    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(SLOTS * _TIME.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def beat(self, slot: int) -> None:
        _TIME.pack_into(self._memory, slot * _TIME.size, time.time())

    def last(self, slot: int) -> float:
        return float(_TIME.unpack_from(self._memory, slot * _TIME.size)[0])
