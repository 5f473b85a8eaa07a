"""Writing to the journal's files, and what goes wrong with that."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gristmill.errors import UnavailableError

# The most buffers that one pwritev takes on Linux (IOV_MAX).
_BUFFERS_AT_ONCE = 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PAGE = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)


class FullError(UnavailableError):
    """The file system has no room."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the operating system's errors into UnavailableError, naming the file and the remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, UnavailableError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(
                f"the journal cannot be written: the file system of {path.parent} is full; give it more room, or "
                "lower max_row_bytes or max_buffered_batches; it goes on by itself when there is room"
            ) from None
        raise UnavailableError(
            f"the journal cannot be written: {path}: {error.strerror}; it goes on by itself when the file system does"
        ) from None


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
    start, end = -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if start < end:
        _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, end - start)


def sync_directory(path: Path) -> None:
    """Makes names that were added or removed safe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
