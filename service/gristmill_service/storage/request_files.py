"""Large requests of workers on the same machine, which stand in files of theirs: each is read once, where a connection
would copy it several times.

The directory lies in shared memory and is this process' own, so that nothing outlives it. Workers make the files, write
request after request to them, and hold a lock on each for as long as they live. Nothing is mapped here, and all is
copied before it is looked at: a worker that changes its file, or cuts it off, changes no more than its own request.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gristmill._wire.codecs.submit_codec import MOST_PARTS, Part
from gristmill._wire.shared_files import leaves_room
from gristmill.errors import InvalidArgumentError, UnavailableError

_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_SWEEP_S = 10.0


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

    def read(self, name: str, parts: Sequence[Part]) -> memoryview:
        """A copy of the request of these parts, at a multiple of 8 bytes.

        Raises InvalidArgumentError for what no request can be, and UnavailableError where the file cannot be read: the
        request has to be sent then.
        """
        if _NAME.fullmatch(name) is None:
            raise InvalidArgumentError(f"file.name is {name[:80]!r}; give 1 to 64 letters, digits, - and _")
        self._check(parts)
        try:
            descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return _read(descriptor, parts)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnavailableError(
                f"file {name} of the request cannot be read ({error.strerror or error}); send the request itself"
            ) from None

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

    def _has_room(self) -> bool:
        try:
            return leaves_room(os.statvfs(self._directory))
        except OSError:
            # The service stops.
            return False

    def _sweep(self) -> None:
        """Removes the files that nobody holds."""
        with suppress(OSError):
            for path in self._directory.iterdir():
                _remove_if_left(path)


def _read(descriptor: int, parts: Sequence[Part]) -> memoryview:
    """Raises OSError where the file lacks some of the bytes, or is no file; what is only claimed takes no memory."""
    status = os.fstat(descriptor)
    end = max((sum(part) for part in parts if not isinstance(part, bytes)), default=0)
    if not stat.S_ISREG(status.st_mode) or status.st_size < end:
        raise OSError(f"it is no file of {end} bytes")
    memory = np.empty(sum(map(_size, parts)), np.uint8).data
    at = 0
    for part in parts:
        room = memory[at : at + _size(part)]
        if isinstance(part, bytes):
            room[:] = part
        else:
            _read_part(descriptor, part[0], room)
        at += len(room)
    return memory


def _read_part(descriptor: int, offset: int, room: memoryview) -> None:
    done = 0
    while done < len(room):
        if not (count := os.preadv(descriptor, [room[done:]], offset + done)):
            raise OSError(f"it has {offset + done} bytes, not {offset + len(room)}")
        done += count


def _size(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part[1]


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
