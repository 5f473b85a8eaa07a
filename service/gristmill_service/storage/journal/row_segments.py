"""Rows as records in files that are mapped: the files are the row buffer, so that a row is held once.

A table's number tells where it stands: which segment, and from which byte on. Tables are written in parallel, each to
a range of its own. The memory of a removed table is given back at once; a segment goes with its last table.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from bisect import bisect
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import GristmillError, NotFoundError
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal.files import explained, punch, write_at
from gristmill_service.storage.run_store import CheckTable

_log = structlog.get_logger(__name__)

_SEGMENT_BYTES = 256 << 20
_OFFSET_BITS = 40
_ALIGNMENT = 64
# Tables are checked by what was logged of each row; this only tells where a table ends: size, and its own CRC-32.
_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"rows"


@dataclass(slots=True)
class _Segment:
    """tables: the ends of those that are kept, by their starts. An active segment is written to."""

    path: Path
    descriptor: int
    memory: mmap.mmap
    end: int = 0
    tables: dict[int, int] = field(default_factory=dict)
    is_active: bool = True
    is_dirty: bool = False


class RowSegments:
    """The `rows-*.seg` of a directory. Thread-safe."""

    def __init__(self, directory: Path, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._directory, self._segment_bytes = directory, segment_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._found = sorted(directory.glob("rows-*.seg"))
        self._next = 1 + max((int(path.stem.rpartition("-")[2]) for path in self._found), default=-1)
        self._active: int | None = None

    def put(self, table: Steps) -> tuple[int, Steps]:
        """Raises UnavailableError; nothing of the table is kept then."""
        encoded = row_tables.encode(table)
        number, segment, start = self._reserve(_HEADER.size + encoded.size)
        header = _header(encoded.size)
        try:
            with explained(segment.path):
                write_at(segment.descriptor, [header, *encoded.buffers], start)
        except BaseException:
            self.remove([number])
            raise
        segment.is_dirty = True
        return number, _view(segment, start)

    def get(self, number: int) -> Steps:
        index, start = number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1)
        with self._lock:
            segment = self._segments.get(index)
            if segment is None or start not in segment.tables:
                raise NotFoundError(f"table {number:#x} of rows is not in {self._directory}")
        return _view(segment, start)

    def remove(self, numbers: Collection[int]) -> None:
        removed: dict[int, list[int]] = {}
        for number in numbers:
            removed.setdefault(number >> _OFFSET_BITS, []).append(number & ((1 << _OFFSET_BITS) - 1))
        for index, starts in removed.items():
            with self._lock:
                segment = self._segments.get(index)
                if segment is None:
                    continue
                gaps = _free(segment, starts)
                if not segment.tables and not segment.is_active:
                    _discard(self._segments.pop(index))
                    continue
                descriptor = os.dup(segment.descriptor)
            with open(descriptor, "rb", buffering=0):
                for start, end in gaps:
                    punch(descriptor, start, end)

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        wanted: dict[int, list[int]] = {}
        for number in sorted(numbers):
            wanted.setdefault(number >> _OFFSET_BITS, []).append(number & ((1 << _OFFSET_BITS) - 1))
        lost: set[int] = set()
        for path in self._found:
            index = int(path.stem.rpartition("-")[2])
            starts = wanted.pop(index, [])
            if starts:
                lost |= self._recover(index, path, starts, check)
            else:
                path.unlink()
        lost |= {index << _OFFSET_BITS | start for index, starts in wanted.items() for start in starts}
        self._found = []
        return lost

    def _recover(self, index: int, path: Path, starts: list[int], check: CheckTable) -> set[int]:
        """Opens a segment of before for reading, with these tables; gives back what lies between them."""
        lost: set[int] = set()
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        segment = _Segment(path, descriptor, memory, end=size, is_active=False)
        for start in starts:
            number = index << _OFFSET_BITS | start
            end = _end(segment, start)
            if end is not None and _is_whole(segment, start, number, check):
                segment.tables[start] = end
            else:
                lost.add(number)
        edges = [0, *chain.from_iterable(segment.tables.items()), size]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            punch(descriptor, begin, end)
        if segment.tables:
            with self._lock:
                self._segments[index] = segment
        else:
            _discard(segment)
        return lost

    def sync(self) -> None:
        """Raises OSError."""
        with self._lock:
            dirty = [(segment, os.dup(segment.descriptor)) for segment in self._segments.values() if segment.is_dirty]
            for segment, _ in dirty:
                segment.is_dirty = False
        for segment, descriptor in dirty:
            with open(descriptor, "rb", buffering=0):
                try:
                    os.fdatasync(descriptor)
                except OSError:
                    segment.is_dirty = True
                    raise

    def close(self) -> None:
        """Views that are held stay valid."""
        with self._lock:
            for segment in self._segments.values():
                os.close(segment.descriptor)
            self._segments.clear()

    def _reserve(self, size: int) -> tuple[int, _Segment, int]:
        """A range of this size: its number, its segment and where it starts."""
        with self._lock:
            segment = None if self._active is None else self._segments[self._active]
            if segment is None or segment.end + size > len(segment.memory):
                self._retire()
                segment = self._open_segment(size)
            assert self._active is not None
            start = segment.end
            segment.end += -(-size // _ALIGNMENT) * _ALIGNMENT
            segment.tables[start] = start + size
            return self._active << _OFFSET_BITS | start, segment, start

    def _open_segment(self, size: int) -> _Segment:
        path = self._directory / f"rows-{self._next:06d}.seg"
        size = max(self._segment_bytes, -(-size // _ALIGNMENT) * _ALIGNMENT)
        with explained(path):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            # A hole: memory comes as it is written.
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        self._active, self._next = self._next, self._next + 1
        segment = self._segments[self._active] = _Segment(path, descriptor, memory)
        return segment

    def _retire(self) -> None:
        """The active segment is full."""
        if self._active is not None:
            segment = self._segments[self._active]
            segment.is_active = False
            if not segment.tables:
                _discard(self._segments.pop(self._active))
            self._active = None


def _header(size: int) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(size.to_bytes(8, "little")), size)


def _free(segment: _Segment, starts: list[int]) -> set[tuple[int, int]]:
    """Forgets these tables. Returns the ranges that are free around them, as wide as they are: tables share pages."""
    for start in starts:
        segment.tables.pop(start, None)
    # Tables are added in the order in which they stand.
    kept = [*segment.tables]
    gaps = set()
    for start in starts:
        following = bisect(kept, start)
        begin = segment.tables[kept[following - 1]] if following else 0
        gaps.add((begin, kept[following] if following < len(kept) else segment.end))
    return gaps


def _end(segment: _Segment, start: int) -> int | None:
    """Where the table at `start` ends, None where there is none."""
    if start + _HEADER.size > len(segment.memory):
        return None
    magic, checksum, size = _HEADER.unpack_from(segment.memory, start)
    end: int = start + _HEADER.size + size
    is_ours = magic == _MAGIC and checksum == zlib.crc32(size.to_bytes(8, "little"))
    return end if is_ours and end <= len(segment.memory) else None


def _view(segment: _Segment, start: int) -> Steps:
    end = _end(segment, start)
    assert end is not None, "it was written, or checked"
    return row_tables.decode(memoryview(segment.memory)[start + _HEADER.size : end])


def _is_whole(segment: _Segment, start: int, number: int, check: CheckTable) -> bool:
    try:
        return check(number, _view(segment, start))
    except (GristmillError, ValueError, IndexError, UnicodeError):
        _log.warning("a table of rows is damaged", file=str(segment.path), at=start)
        return False


def _discard(segment: _Segment) -> None:
    """Removes the file; views of it stay valid."""
    segment.path.unlink(missing_ok=True)
    os.close(segment.descriptor)
