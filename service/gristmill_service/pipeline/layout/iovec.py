"""Byte ranges of memory, as the kernel's `iovec`: an int64 array (ranges, 2) of addresses and lengths in bytes.

`writev` writes such a file without assembling it, and NumPy creates the description without a Python object per range.
The creator of a description must keep the memory alive. Only `Region` creates addresses, and checks that every range
is within its buffer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Iovec = NDArray[np.int64]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.writev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_libc.writev.restype = ctypes.c_ssize_t

# A view of memory at an address; the last argument is PyBUF_READ.
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_READ = 0x100

# The maximum number of ranges per writev on Linux (IOV_MAX).
_RANGES_AT_ONCE = 1024

# The size in bytes of a range's description.
_RANGE_BYTES = 16


class Region:
    """A buffer that contains ranges. It must exist as long as they are used."""

    def __init__(self, buffer: NDArray[Any] | bytes) -> None:
        array = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else np.ascontiguousarray(buffer)
        self.array, self._address, self._size = array, int(array.__array_interface__["data"][0]), array.nbytes

    def ranges(self, starts: NDArray[np.int64] | int, lengths: NDArray[np.int64]) -> Iovec:
        """Returns ranges of `lengths` bytes at `starts`. Raises IndexError for a range that exceeds the buffer."""
        starts = np.asarray(starts)
        if len(lengths) and (starts.min() < 0 or lengths.min() < 0 or (starts + lengths).max() > self._size):
            raise IndexError(f"a range is outside of its buffer of {self._size} bytes")
        iovec = np.empty((len(lengths), 2), np.int64)
        np.add(starts, self._address, out=iovec[:, 0])
        iovec[:, 1] = lengths
        return iovec

    def contains(self, iovec: Iovec) -> NDArray[np.bool_]:
        """Returns whether each range that is not empty is of this buffer; bool (ranges,)."""
        offsets = iovec[:, 0] - self._address
        return (offsets >= 0) & (offsets < self._size)

    def whole(self) -> Iovec:
        return np.array([[self._address, self._size]], np.int64)


def coalesced(iovec: Iovec) -> Iovec:
    """Returns the same bytes in as few ranges as possible: without empty ones, and with adjacent ones joined."""
    iovec = iovec[iovec[:, 1] > 0]
    if not len(iovec):
        return iovec
    begins = np.flatnonzero(np.append(True, iovec[:-1].sum(axis=1) != iovec[1:, 0]))
    return np.stack([iovec[begins, 0], np.add.reduceat(iovec[:, 1], begins)], axis=1)


def cut(iovec: Iovec, nbytes: int) -> Iterator[Iovec]:
    """Yields the ranges in groups of exactly `nbytes` bytes. The last group contains the rest."""
    ends = np.cumsum(iovec[:, 1])
    done, total = 0, int(ends[-1]) if len(ends) else 0
    while done < total:
        upto = min(done + nbytes, total)
        first = int(np.searchsorted(ends, done, "right"))
        last = int(np.searchsorted(ends, upto, "left"))
        group = iovec[first : last + 1].copy()
        group[-1, 1] -= ends[last] - upto
        skipped = done - (int(ends[first - 1]) if first else 0)
        group[0] += (skipped, -skipped)
        yield group
        done = upto


def join(iovec: Iovec) -> bytes:
    """Returns the bytes of all ranges, concatenated."""
    return b"".join([_view(address, length, _READ) for address, length in iovec.tolist()])


def write(descriptor: int, iovec: Iovec) -> None:
    """Writes all ranges in order. Blocks, without holding the GIL. Raises OSError."""
    while len(iovec):
        iovec = _written(descriptor, np.ascontiguousarray(iovec))


def _written(descriptor: int, iovec: Iovec) -> Iovec:
    """Writes the ranges until a short write. Returns the unwritten rest."""
    address, begins = int(iovec.__array_interface__["data"][0]), np.arange(0, len(iovec), _RANGES_AT_ONCE)
    sizes = np.add.reduceat(iovec[:, 1], begins)
    for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
        count = min(_RANGES_AT_ONCE, len(iovec) - begin)
        written = _libc.writev(descriptor, address + _RANGE_BYTES * begin, count)
        if written < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if written < size:
            # Caused by a signal, or by more than 2 GiB at once. This is rare, so finding the rest may be slow.
            return _rest(iovec[begin:], written)
    return iovec[:0]


def _rest(iovec: Iovec, written: int) -> Iovec:
    """Returns the ranges without their first `written` bytes."""
    ends = np.cumsum(iovec[:, 1])
    first = int(np.searchsorted(ends, written, side="right"))
    rest = iovec[first:].copy()
    skipped = written - (int(ends[first - 1]) if first else 0)
    rest[0] += (skipped, -skipped)
    return rest
