"""Large requests of workers on the same machine, which stand in files of theirs: each is read once, where a connection
would copy it several times.

The directory lies in shared memory and is this process' own, so that nothing outlives it. Workers make the files, write
request after request to them, and hold a lock on each for as long as they live. Nothing is mapped, and all is copied
before it is looked at: a worker that changes its file, or cuts it off, changes no more than its own request.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from gristmill.errors import InvalidArgumentError, UnavailableError

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_SWEEP_S = 10.0
_LEAST_FREE = 0.25


class RequestFiles:
    """Thread-safe. most_bytes: what a request may have."""

    def __init__(self, directory: Path, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        directory.mkdir(mode=0o700)
        self._directory, self._most_bytes, self._clock = directory, most_bytes, clock
        self._lock = threading.Lock()
        self._sweep_after = clock() + _SWEEP_S

    def offered(self) -> str:
        """The directory, to be told to a worker; empty where most of its memory is taken, which shards need. Now and
        then what dead workers left there is removed first."""
        with self._lock:
            is_due = self._clock() >= self._sweep_after
            if is_due:
                self._sweep_after = self._clock() + _SWEEP_S
        if is_due:
            self._sweep()
        return str(self._directory) if self._has_room() else ""

    def read(self, name: str, size: int) -> memoryview:
        """A copy of the first `size` bytes of the file, at a multiple of 8 bytes.

        Raises InvalidArgumentError for what no file can be, and UnavailableError where it cannot be read whole: the
        request has to be sent then.
        """
        if _NAME.fullmatch(name) is None:
            raise InvalidArgumentError(f"file.name is {name[:80]!r}; give 1 to 64 letters, digits, - and _")
        if not 0 < size <= self._most_bytes:
            raise InvalidArgumentError(
                f"file.size is {size}, and a request has 1 to {self._most_bytes} bytes (max_message_bytes); send fewer "
                "rows a request, or raise the setting"
            )
        try:
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return _read(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnavailableError(
                f"file {name} of the request cannot be read ({error.strerror or error}); send the request itself"
            ) from None

    def _has_room(self) -> bool:
        try:
            memory = os.statvfs(self._directory)
        except OSError:
            # The service stops.
            return False
        return memory.f_bavail >= _LEAST_FREE * memory.f_blocks

    def _sweep(self) -> None:
        """Removes the files that nobody holds."""
        with suppress(OSError):
            for path in self._directory.iterdir():
                _remove_if_left(path)


def _read(descriptor: int, size: int) -> memoryview:
    """Raises OSError where the file has fewer bytes, or is no file. A size that is only claimed takes no memory."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < size:
        raise OSError(f"it is no file of {size} bytes")
    memory = np.empty(size, np.uint8).data
    done = 0
    while done < size:
        if not (count := os.preadv(descriptor, [memory[done:]], done)):
            raise OSError(f"it has {done} bytes, not {size}")
        done += count
    return memory


def _remove_if_left(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        # Its worker lives.
        return
    finally:
        os.close(descriptor)
