"""Files in which rows were that nobody needs any more: new rows are written over these.

Writing to pages and blocks that are there takes a fraction of what new ones take. What is left of former rows in a file
is no danger to rows: a table is where the run's log says, and after a restart it has to pass the digests logged there.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from gristmill_service.storage.journal.open_file import OpenFile

KEPT_S = 10.0
"""How long a file, or a part of one, waits for new rows."""

WORTH_KEEPING = 1 << 20
"""Files with fewer bytes of memory or disk are removed at once."""

_MOST_FILES, _MOST_BYTES = 4, 64 << 20
# Where less room is left on the file system, others need it more.
_LEAST_FREE = 4 * _MOST_FILES * _MOST_BYTES


class _Spare(NamedTuple):
    path: Path
    file: OpenFile
    memory: mmap.mmap
    since: float

    def is_unused(self) -> bool:
        """Whether nobody writes or reads it any more: else a late write, or a view, would be among another's rows."""
        if not self.file.is_released:
            return False
        try:
            self.memory.close()
        except BufferError:
            return False
        return True


class SpareSegments:
    """The `.spare-*` of a journal's directory: four at most, of 64 MiB each. Thread-safe. Never raises."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._directory, self._numbers = directory, count()
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        _remove(directory.glob(".spare-*"))

    def offer(self, path: Path, file: OpenFile, memory: mmap.mmap) -> None:
        """Takes a file of rows out of its directory: nobody needs them any more, though views of them may be held."""
        file.close()
        spare = _Spare(self._directory / f".spare-{next(self._numbers)}", file, memory, self.clock())
        with suppress(OSError):
            with self._lock:
                if len(self._spares) < _MOST_FILES and self._is_worth_keeping(path):
                    path.rename(spare.path)
                    self._spares.append(spare)
                    return
            path.unlink()

    def take(self, path: Path) -> bool:
        """Whether there is one that nobody uses, which is at this path now."""
        with self._lock:
            found = next((spare for spare in self._spares if spare.is_unused()), None)
            if found is None:
                return False
            self._spares.remove(found)
        try:
            found.path.rename(path)
        except OSError:
            _remove([found.path])
            return False
        return True

    def give_back(self) -> None:
        """Removes all files; views of them stay valid."""
        with self._lock:
            removed, self._spares = self._spares, []
        _remove(spare.path for spare in removed)

    def give_back_old(self) -> None:
        """Removes those that nobody has taken for some time."""
        oldest = self.clock() - KEPT_S
        with self._lock:
            removed = [spare for spare in self._spares if spare.since < oldest]
            self._spares = [spare for spare in self._spares if spare.since >= oldest]
        _remove(spare.path for spare in removed)

    def _is_worth_keeping(self, path: Path) -> bool:
        """Raises OSError."""
        size, room = path.stat(), os.statvfs(self._directory)
        is_of_use = 512 * size.st_blocks >= WORTH_KEEPING and size.st_size <= _MOST_BYTES
        return is_of_use and room.f_bavail * room.f_frsize >= _LEAST_FREE


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()
