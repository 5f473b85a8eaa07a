"""Memory that this process shares with a service on its machine: a file in the service's shared memory, mapped here.

What is made there, as the columns of a large table are, the service reads where it stands: nothing is copied into a
message. The service only reads, and copies what it reads.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.uint8]

SIZE = 32 << 20
"""Bytes of a file at most; what was never used takes no memory."""

_UNIT = 128 << 10
# What requests need besides their tables' columns; tables take the rest.
_KEPT_UNITS = (4 << 20) // _UNIT
# Of all shared memory; shards need it.
_LEAST_FREE = 0.25
# Services that one process talks to, on this machine. The files of the first are given up.
_MOST_FILES = 4


class SharedFile:
    """One of this process' own. The lock that it holds says that the process lives; it goes with it. Thread-safe."""

    def __init__(self, directory: str) -> None:
        """Raises OSError where it cannot be made."""
        self.directory = directory
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._path = Path(directory) / self.name
        self._lock = threading.Lock()
        self._units, self._reserved = bytearray(SIZE // _UNIT), 0
        # Blocks are let go wherever garbage is collected, also by a thread that holds the lock.
        self._let_go = deque[tuple[int, int]]()
        self._is_retired = False
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError("it was taken for one that is left, before it was locked")
            os.ftruncate(self._descriptor, SIZE)
            self._memory = mmap.mmap(self._descriptor, SIZE)
        except OSError:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise
        weakref.finalize(self, os.close, self._descriptor)
        self._address = _address(np.frombuffer(self._memory, np.uint8))

    def take(self, nbytes: int, *, is_table: bool = False) -> Block | None:
        """Memory that is used again when no array views it any more; None where there is none left."""
        count = -(-nbytes // _UNIT)
        with self._lock:
            while self._let_go:
                begin, freed = self._let_go.popleft()
                self._units[begin : begin + freed] = bytes(freed)
            at = self._units.find(bytes(count), 0, len(self._units) - _KEPT_UNITS * is_table)
            if self._is_retired or at < 0 or not self._reserve((at + count) * _UNIT):
                return None
            self._units[at : at + count] = b"\1" * count
        # All views of it refer to this one, however they are made.
        block = np.frombuffer(self._memory, np.uint8, nbytes, at * _UNIT)
        weakref.finalize(block, self._let_go.append, (at, count)).atexit = False
        return block

    def offset_of(self, memory: memoryview | bytes) -> int | None:
        """Where this memory stands in the file; None where it is other memory."""
        offset = _address(np.frombuffer(memory, np.uint8)) - self._address
        return offset if 0 <= offset < SIZE else None

    def retire(self) -> None:
        """Gives no more blocks, and is written no more: a service that opened it may read it still."""
        with self._lock:
            self._is_retired = True
        self._path.unlink(missing_ok=True)

    def _reserve(self, end: int) -> bool:
        """Whether the memory up to there is this process' own: written to without, it would kill the process where
        none is left."""
        more = end - self._reserved
        if more <= 0:
            return True
        if not leaves_room(os.fstatvfs(self._descriptor), more):
            return False
        try:
            os.posix_fallocate(self._descriptor, self._reserved, more)
        except OSError:
            return False
        self._reserved = end
        return True


class SharedFiles:
    """Those of this process, one for each directory that a service named. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = ""
        self._files: dict[str, SharedFile] = {}

    def use(self, directory: str) -> None:
        """Tables are made there from now on."""
        self._current = directory

    def take(self, nbytes: int) -> Block | None:
        """Memory for a column of a table; None where it is better made elsewhere."""
        file = self.of(self._current) if self._current else None
        return None if file is None else file.take(nbytes, is_table=True)

    def of(self, directory: str) -> SharedFile | None:
        """The file in this directory; None where none can be made, on another machine or as another user."""
        if (file := self._files.get(directory)) is not None:
            return file
        with self._lock:
            if directory not in self._files:
                try:
                    self._files[directory] = SharedFile(directory)
                except OSError:
                    self.leave(directory)
                    return None
                self._give_up()
            return self._files[directory]

    def retire(self, file: SharedFile) -> None:
        """The next request in this directory gets another file."""
        with self._lock:
            for directory in [directory for directory, one in self._files.items() if one is file]:
                del self._files[directory]
        file.retire()

    def leave(self, directory: str) -> None:
        """Tables are not made there any more."""
        if self._current == directory:
            self._current = ""

    def close(self) -> None:
        """Removes them all."""
        while self._files:
            with suppress(OSError):
                self._files.popitem()[1].retire()

    def _give_up(self) -> None:
        """Those of services that are gone, and of more than a process talks to."""
        gone = [directory for directory in self._files if not Path(directory).is_dir()]
        for directory in [*gone, *list(self._files)[:-_MOST_FILES]]:
            if (file := self._files.pop(directory, None)) is not None:
                file.retire()


SHARED = SharedFiles()
"""Those of this process. A child that is forked has none: it would write over what its parent does."""

atexit.register(SHARED.close)
os.register_at_fork(after_in_child=SHARED.__init__)  # type: ignore[misc]


def leaves_room(memory: os.statvfs_result, nbytes: int = 0) -> bool:
    """Whether shards have room where so much more of the shared memory is taken."""
    return memory.f_bavail * memory.f_frsize - nbytes >= _LEAST_FREE * memory.f_blocks * memory.f_frsize


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
