"""Large requests of workers on the same machine, which stand in memory of theirs: each is copied once, where a
connection would copy it several times.

A worker connects to a Unix socket, passes a file in memory (memfd) over it and is told the name that its requests give.
The file is mapped here for as long as the connection lasts, and so nothing outlives either process. It is sealed
against being cut off, which would kill whoever reads it then; and all is copied before it is looked at: a worker that
changes what it wrote changes no more than its own request.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from gristmill._wire.codecs.submit_codec import MOST_PARTS, Part
from gristmill._wire.shared_files import SIZE, short
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.process_tuning import most_connections

_log = structlog.get_logger(__name__)

# Each takes a thread that sleeps, and two descriptors. Who comes later sends its requests.
_MOST_WORKERS = 256
# Whoever connects passes its file at once.
_GREETING_S = 10.0


class _WorkerFile(NamedTuple):
    connection: socket.socket
    memory: NDArray[np.uint8]


class RequestFiles:
    """Thread-safe. most_bytes: what a request may have."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """The directory, which is made here, is for this process' user alone."""
        directory.mkdir(mode=0o700)
        self._path, self._most_bytes = directory / "socket", most_bytes
        self._files: dict[str, _WorkerFile] = {}
        self._places = threading.BoundedSemaphore(_most_workers())
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with short(str(self._path)) as path:
                self._listener.bind(path)
            self._listener.listen(_MOST_WORKERS)
        except OSError as error:
            _log.warning("large requests will all be sent", socket=str(self._path), reason=str(error))
            self._path.unlink(missing_ok=True)
            self.close()
        else:
            threading.Thread(target=self._accept, name="request-files", daemon=True).start()

    def offered(self) -> str:
        """The socket's path, to be told to a worker; empty where there is none."""
        return "" if self._is_closed else str(self._path)

    def read(self, name: str, parts: Sequence[Part]) -> memoryview:
        """A copy of the request of these parts, at a multiple of 8 bytes.

        Raises InvalidArgumentError for what no request can be, and UnavailableError where there is no such file, or not
        all of the parts: the request has to be sent then.
        """
        self._check(parts)
        if (file := self._files.get(name)) is None:
            raise UnavailableError(f"file {name[:80]!r} of the request is not here; send the request itself")
        end = max((sum(part) for part in parts if not isinstance(part, bytes)), default=0)
        if end > len(file.memory):
            raise UnavailableError(
                f"file {name!r} of the request has {len(file.memory)} bytes, not {end}; send the request itself"
            )
        return _copy(file.memory, parts)

    def close(self) -> None:
        """From now on no worker's file is read. Idempotent."""
        self._is_closed = True
        # Wakes the thread that waits for workers to come, and those that wait for them to go.
        _shut(self._listener)
        self._listener.close()
        while self._files:
            with suppress(KeyError):
                _shut(self._files.popitem()[1].connection)

    def _check(self, parts: Sequence[Part]) -> None:
        if not 1 <= len(parts) <= MOST_PARTS:
            raise InvalidArgumentError(
                f"file.parts has {len(parts)} entries, and a request has 1 to {MOST_PARTS}; copy small parts together"
            )
        for at, part in enumerate(parts):
            if not isinstance(part, bytes) and (part[0] < 0 or part[1] < 0):
                raise InvalidArgumentError(
                    f"file.parts[{at}] has offset {part[0]} and size {part[1]}; give where its bytes stand in the file"
                )
        if not 0 < (size := sum(map(_size, parts))) <= self._most_bytes:
            raise InvalidArgumentError(
                f"file.parts have {size} bytes together, and a request has 1 to {self._most_bytes} "
                "(max_message_bytes); send fewer rows a request, or raise the setting"
            )

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # It is closed; or there are no descriptors left, which passes.
                time.sleep(0.1)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._hold, args=(connection,), name="request-file", daemon=True).start()
            except RuntimeError:
                # The process may have no more threads now: who comes later finds this one still here.
                self._places.release()
                connection.close()

    def _hold(self, connection: socket.socket) -> None:
        """Has a worker's file until the worker is gone."""
        name = secrets.token_hex(16)
        try:
            with connection, suppress(OSError, ValueError):
                connection.settimeout(_GREETING_S)
                self._files[name] = _WorkerFile(connection, _received(connection))
                if not self._is_closed:
                    connection.send(name.encode())
                    connection.settimeout(None)
                    # A worker says nothing more: this is its end, or ours.
                    connection.recv(1)
        finally:
            self._files.pop(name, None)
            self._places.release()


def _most_workers() -> int:
    """With two descriptors each they take half of those that both doors leave: stores need some, too."""
    return max(1, min(_MOST_WORKERS, most_connections() // 4))


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _received(connection: socket.socket) -> NDArray[np.uint8]:
    """The memory of the file that the worker passes. Raises OSError for what may not be mapped."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError("no file was passed")
    [descriptor] = descriptors
    try:
        status = os.fstat(descriptor)
        is_file = stat.S_ISREG(status.st_mode) and 0 < status.st_size <= SIZE
        # Anything else than a file in memory has no seals, and is refused here.
        if not is_file or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("a file in memory is passed, sealed against being cut off")
        return np.frombuffer(mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)


def _copy(memory: NDArray[np.uint8], parts: Sequence[Part]) -> memoryview:
    found = np.empty(sum(map(_size, parts)), np.uint8)
    at = 0
    for part in parts:
        end = at + _size(part)
        found[at:end] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else memory[part[0] : sum(part)]
        at = end
    return found.data


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part[1]
