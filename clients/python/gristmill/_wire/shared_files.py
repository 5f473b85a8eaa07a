"""Memory that this process shares with a service on its machine: a file in memory (memfd), mapped here and there.

What is made in it, as the columns of a large table are, the service reads where it stands: nothing is copied into a
message. The service only reads, and copies what it reads.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.uint8]

SIZE = 32 << 20
"""Bytes of a file at most; what was never used takes no memory."""

_UNIT = 128 << 10
# What requests need besides their tables' columns; tables take the rest.
_KEPT_UNITS = (4 << 20) // _UNIT
# The service answers at once, or is too busy to be waited for; it is asked again after a while.
_GREETING_S, _ASKED_AGAIN_S = 5.0, 60.0
# One that just failed to answer may hang, and an event loop stands still meanwhile.
_DOUBTED_GREETING_S = 1.0
# Services that one process talks to, on this machine. The files of the first are given up.
_MOST_FILES = 4


class SharedFile:
    """One of this process' own, which a service knows by name for as long as they are connected. Thread-safe."""

    def __init__(self, address: str, *, is_doubted: bool = False) -> None:
        """address: the path of the service's socket. is_doubted: whether it may hang. Raises OSError where the file
        cannot be made or passed."""
        if not hasattr(os, "memfd_create"):
            raise OSError("files in memory are Linux'")
        self.address = address
        self._lock = threading.Lock()
        self._units, self._reserved = bytearray(SIZE // _UNIT), 0
        # Blocks are let go wherever garbage is collected, also by a thread that holds the lock.
        self._let_go = deque[tuple[int, int]]()
        self._is_retired = False
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._connection.close)
        self._connection.settimeout(_DOUBTED_GREETING_S if is_doubted else _GREETING_S)
        with short(address) as path:
            self._connection.connect(path)
        self._descriptor = os.memfd_create("gristmill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, SIZE)
        # The service maps it, and would be killed where it is cut off.
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self._descriptor, SIZE)
        self._address = _address(np.frombuffer(self._memory, np.uint8))
        socket.send_fds(self._connection, [b"\0"], [self._descriptor])
        self.name = self._connection.recv(64).decode()
        if not self.name:
            raise ConnectionError("the service takes no more files")
        self._connection.setblocking(False)

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
        """Gives no more blocks, and is written no more: a service may be reading it still."""
        with self._lock:
            self._is_retired = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def is_known(self) -> bool:
        """Whether the service is still there."""
        try:
            return bool(self._connection.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _reserve(self, end: int) -> bool:
        """Whether the memory up to there is this process' own: written to without, it would kill the process where
        none is left."""
        more = end - self._reserved
        if more <= 0:
            return True
        try:
            os.posix_fallocate(self._descriptor, self._reserved, more)
        except OSError:
            return False
        self._reserved = end
        return True


class SharedFiles:
    """Those of this process, one for each service that named its socket. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = ""
        self._files: dict[str, SharedFile] = {}
        # By when each may be asked again.
        self._unreachable: dict[str, float] = {}
        # Those that a file was given up of after a call.
        self._doubted = set[str]()

    def use(self, address: str) -> None:
        """Tables are made for this service from now on."""
        self._current = address

    def take(self, nbytes: int) -> Block | None:
        """Memory for a column of a table; None where it is better made elsewhere."""
        file = self.of(self._current) if self._current else None
        return None if file is None else file.take(nbytes, is_table=True)

    def of(self, address: str) -> SharedFile | None:
        """The file that the service of this socket knows; None where it could not be reached, from another machine or
        as another user."""
        if (file := self._files.get(address)) is not None:
            return file
        with self._lock:
            if address not in self._files and self._unreachable.get(address, 0.0) <= time.monotonic():
                try:
                    self._files[address] = SharedFile(address, is_doubted=address in self._doubted)
                except OSError:
                    self._unreachable[address] = time.monotonic() + _ASKED_AGAIN_S
                else:
                    self._doubted.discard(address)
                    self._give_up()
            return self._files.get(address)

    def retire(self, file: SharedFile) -> None:
        """The next request to its service gets another file."""
        with self._lock:
            if self._files.get(file.address) is file:
                del self._files[file.address]
            self._doubted.add(file.address)
        file.retire()

    def leave(self, address: str) -> None:
        """Tables are not made for this service any more."""
        if self._current == address:
            self._current = ""

    def close(self) -> None:
        """Gives them all up."""
        while self._files:
            self._files.popitem()[1].retire()

    def _give_up(self) -> None:
        """Those of services that are gone, and of more than a process talks to."""
        gone = [address for address, file in self._files.items() if not file.is_known()]
        for address in [*gone, *list(self._files)[:-_MOST_FILES]]:
            if (file := self._files.pop(address, None)) is not None:
                file.retire()


SHARED = SharedFiles()
"""Those of this process. A child that is forked has none: it would write over what its parent does."""

atexit.register(SHARED.close)
os.register_at_fork(after_in_child=SHARED.__init__)  # type: ignore[misc]


@contextmanager
def short(path: str) -> Iterator[str]:
    """Another path of the same socket, which a socket's address has room for: it has 107 bytes. Raises OSError where
    there is no such directory."""
    directory = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(path).name}"
    finally:
        os.close(directory)


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])
