"""Reads the available and total memory of this machine and this process's container, on Linux."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple


class MemoryRoom(NamedTuple):
    """The available bytes, and the total bytes."""

    available: int
    total: int

    def within(self, other: MemoryRoom) -> MemoryRoom:
        """Combines two limits that both apply, such as a tmpfs in a container's memory."""
        return MemoryRoom(min(self.available, other.available), min(self.total, other.total))


class Writes:
    """The writes in progress, so that batches that fit one by one do not fill memory together. Thread-safe."""

    def __init__(self) -> None:
        self._nbytes, self._lock = 0, threading.Lock()

    @contextmanager
    def reserved(self, nbytes: int, check: Callable[[int], None]) -> Iterator[None]:
        """Counts a write of n bytes during the `with` block. check: called with the bytes of the other writes; raises
        an error if this one does not fit next to them."""
        with self._lock:
            check(self._nbytes)
            self._nbytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._nbytes -= nbytes


UNKNOWN = MemoryRoom(1 << 62, 1 << 62)


def memory_room(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryRoom:
    """Returns the memory of the machine or the container, whichever is less. Memory that the kernel can reclaim, such
    as file caches, counts as available. cgroup: the container's own cgroup, version 2."""
    return _of_machine(proc).within(_of_container(cgroup))


def _of_machine(proc: Path) -> MemoryRoom:
    with suppress(OSError, KeyError, ValueError):
        numbers = _numbers(proc / "meminfo")
        return MemoryRoom(1024 * numbers["MemAvailable:"], 1024 * numbers["MemTotal:"])
    return UNKNOWN


def _of_container(cgroup: Path) -> MemoryRoom:
    with suppress(OSError, KeyError, ValueError):
        # Without a limit, the file contains "max", which is not a number.
        most = int((cgroup / "memory.max").read_text())
        used, parts = int((cgroup / "memory.current").read_text()), _numbers(cgroup / "memory.stat")
        # tmpfs is counted as files, but cannot be reclaimed.
        return MemoryRoom(max(0, most - used + parts["file"] - parts["shmem"]), most)
    return UNKNOWN


def _numbers(path: Path) -> dict[str, int]:
    """Returns the number in each line, by the first word of the line."""
    return {line[0]: int(line[1]) for line in map(str.split, path.read_text().splitlines()) if len(line) > 1}
