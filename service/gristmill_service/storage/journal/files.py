"""Files of the journal: writing to them, their names, and what the operating system's errors mean."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from gristmill.errors import UnavailableError
from gristmill_service.storage.errors import FullError

# The most buffers that one pwritev takes on Linux (IOV_MAX).
_BUFFERS_AT_ONCE = 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


@contextmanager
def explained(path: Path, action: Literal["written", "read"] = "written") -> Iterator[None]:
    """Turns the operating system's errors into UnavailableError, naming the file and the remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UnavailableError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(
                f"the journal cannot be {action}: the file system of {path.parent} is full; give it more room, or "
                "lower max_row_bytes or max_buffered_batches; it goes on by itself when there is room"
            ) from None
        raise UnavailableError(
            f"the journal cannot be {action}: {path}: {error.strerror}; it goes on when the file system works again"
        ) from None


def numbered_files(directory: Path, stem: str, suffix: str) -> list[tuple[int, Path]]:
    """The files `<stem>-<number><suffix>` of a directory with their numbers, in order."""
    pattern = re.compile(rf"{re.escape(stem)}-(\d+){re.escape(suffix)}")
    with explained(directory, "read"):
        found = [(pattern.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def create_file(path: Path, data: bytes) -> None:
    """Creates a file that only its owner may read, and returns when it is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        write_at(descriptor, [data], 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Writes all buffers from the offset on. Raises OSError; some may be written then."""
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        written = os.pwritev(descriptor, left[:_BUFFERS_AT_ONCE], offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def punch(descriptor: int, start: int, end: int) -> None:
    """Gives the memory of whole pages between the offsets back; they read as zeros. Where the file system cannot, it
    is given back with the file."""
    start, end = -(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
    if start < end:
        _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)


def sync_directory(path: Path) -> None:
    """Returns when names that were added or removed are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
