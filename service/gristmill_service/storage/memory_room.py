"""How much memory there is: what the machine and this process' container say. Linux without either says nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class MemoryRoom(NamedTuple):
    """Bytes that may still be taken, and all that there are."""

    available: int
    total: int

    def within(self, other: MemoryRoom) -> MemoryRoom:
        """Where both hold, as a tmpfs within a container's memory."""
        return MemoryRoom(min(self.available, other.available), min(self.total, other.total))


UNKNOWN = MemoryRoom(1 << 62, 1 << 62)


def memory_room(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryRoom:
    """What is available does not count what the kernel gives back when it is asked for, such as files' caches.

    cgroup: of version 2, as a container sees its own.
    """
    return _of_machine(proc).within(_of_container(cgroup))


def _of_machine(proc: Path) -> MemoryRoom:
    with suppress(OSError, KeyError, ValueError):
        found = _numbers(proc / "meminfo")
        return MemoryRoom(1024 * found["MemAvailable:"], 1024 * found["MemTotal:"])
    return UNKNOWN


def _of_container(cgroup: Path) -> MemoryRoom:
    with suppress(OSError, KeyError, ValueError):
        # "max" where there is no limit, which is no number.
        most = int((cgroup / "memory.max").read_text())
        held, parts = int((cgroup / "memory.current").read_text()), _numbers(cgroup / "memory.stat")
        # tmpfs counts among files, and is not given back.
        return MemoryRoom(max(0, most - held + parts["file"] - parts["shmem"]), most)
    return UNKNOWN


def _numbers(path: Path) -> dict[str, int]:
    """The number of each line, by the word before it."""
    return {line[0]: int(line[1]) for line in map(str.split, path.read_text().splitlines()) if len(line) > 1}
