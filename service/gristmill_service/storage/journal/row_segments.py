"""Rows as records in files that are mapped: the files are the row buffer, so that a row is held once.

A table's number says where it stands: in which segment, and from which byte on. Threads write tables in parallel, each
to a range of its own. The memory of a removed table is given back at once; a segment goes with its last table, to be
written anew by whoever needs a segment next.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from bisect import bisect
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal.files import explained, numbered_files, punch, sync_directory, write_at
from gristmill_service.storage.journal.open_file import OpenFile, closed_error
from gristmill_service.storage.journal.spare_segments import KEPT_S, WORTH_KEEPING, SpareSegments
from gristmill_service.storage.run_store import CheckTable

_log = structlog.get_logger(__name__)

_SEGMENT_BYTES = 64 << 20
_OFFSET_BITS = 40
_ALIGNMENT = 8
# Before each table: its size, and the CRC-32 of that size. Rows are checked by the digests that are logged for them,
# also since others may have been there before.
_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"rows"


@dataclass(slots=True)
class Segment:
    """A file of rows. tables: the end of each table by its start. New tables go to the active segment. is_used_again:
    whether there may be former rows behind its end. used_at: when a table was last put."""

    path: Path
    file: OpenFile
    memory: mmap.mmap
    end: int = 0
    tables: dict[int, int] = field(default_factory=dict)
    is_active: bool = True
    is_dirty: bool = False
    is_used_again: bool = False
    used_at: float = 0.0

    def table(self, start: int) -> memoryview:
        """The bytes of a table that is there."""
        return memoryview(self.memory)[start + _HEADER.size : self.tables[start]]


class RowSegments:
    """The `rows-*.seg` of a directory. Thread-safe.

    After `close`, `remove` does nothing and the others raise UnavailableError; views that are held stay valid.
    """

    def __init__(self, directory: Path, spares: SpareSegments, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._directory, self._spares, self._segment_bytes = directory, spares, segment_bytes
        self._found = numbered_files(directory, "rows", ".seg")
        self._next = self._found[-1][0] + 1 if self._found else 0
        # Guards what follows, the segments' tables, and every change of the directory, which `close` ends.
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._active: int | None = None
        self._has_new_file = self._is_closed = False

    def put(self, table: Steps) -> tuple[int, memoryview]:
        """Returns its number, and its bytes in the file. Raises UnavailableError; nothing of the table is stored then.
        A write that `close` overtakes is finished."""
        encoded = row_tables.encode(table)
        with self._lock:
            number, segment, start = self._reserve(_HEADER.size + encoded.size)
            # Viewed before it is written: what is viewed is nobody else's, also after `close`.
            stored = segment.table(start)
        try:
            with segment.file.use() as descriptor, explained(segment.path):
                write_at(descriptor, [_header(encoded.size), *encoded.buffers], start)
        except BaseException:
            self.remove([number])
            raise
        segment.is_dirty = True
        return number, stored

    def get(self, number: int) -> memoryview:
        index, start = _place(number)
        with self._lock:
            self._check_open()
            segment = self._segments.get(index)
            if segment is None or start not in segment.tables:
                raise NotFoundError(f"table {number:#x} of rows is not in {self._directory}")
            return segment.table(start)

    def remove(self, numbers: Collection[int]) -> None:
        """Never raises. What cannot be given back now is given back when the rows are opened again."""
        for index, starts in _by_segment(numbers).items():
            with self._lock:
                segment = self._segments.get(index)
                if segment is None:
                    continue
                gaps = _free(segment, starts)
                if not segment.tables and (not segment.is_active or segment.end >= WORTH_KEEPING):
                    self._discard(index)
                    continue
            with suppress(UnavailableError), segment.file.use() as descriptor:
                for start, end in gaps:
                    punch(descriptor, start, end)

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        """Removes all tables that were found but these. Returns those of these that are not there, or fail the check.

        Called once, before any other method. Raises UnavailableError where a file cannot be read.
        """
        wanted = _by_segment(sorted(numbers))
        lost: set[int] = set()
        for index, path in self._found:
            starts = wanted.pop(index, [])
            with explained(path, "read"):
                lost |= self._recover(index, path, starts, check)
        self._found = []
        return lost | {_number(index, start) for index, starts in wanted.items() for start in starts}

    def sync(self) -> None:
        """Returns when all tables that were put are on the disk. Raises OSError."""
        with ExitStack() as using:
            with self._lock:
                self._check_open()
                dirty = [
                    (segment, using.enter_context(segment.file.use()))
                    for segment in self._segments.values()
                    if segment.is_dirty
                ]
                for segment, _ in dirty:
                    segment.is_dirty = False
                has_new_file, self._has_new_file = self._has_new_file, False
            for segment, descriptor in dirty:
                try:
                    os.fdatasync(descriptor)
                except OSError:
                    segment.is_dirty = True
                    raise
            if has_new_file:
                sync_directory(self._directory)

    def give_back_former(self) -> None:
        """Gives back what the active segment has of former rows, where no table was put for some time. Raises
        UnavailableError."""
        with self._lock:
            segment = None if self._active is None else self._segments[self._active]
            if segment and segment.is_used_again and segment.used_at < self._spares.clock() - KEPT_S:
                self._retire()

    def close(self) -> list[Segment]:
        """Returns the segments, with their files closed; none at a second call."""
        with self._lock:
            self._is_closed = True
            closed = [*self._segments.values()]
            for segment in closed:
                segment.file.close()
            self._segments.clear()
            self._active = None
            return closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error(self._directory)

    def _reserve(self, size: int) -> tuple[int, Segment, int]:
        """A range of this size: its number, its segment and where it starts."""
        self._check_open()
        segment = None if self._active is None else self._segments[self._active]
        if segment is None or segment.end + size > len(segment.memory):
            self._retire()
            segment = self._open_segment(size)
        assert self._active is not None
        start = segment.end
        segment.end += -(-size // _ALIGNMENT) * _ALIGNMENT
        segment.tables[start] = start + size
        segment.used_at = self._spares.clock()
        return _number(self._active, start), segment, start

    def _open_segment(self, size: int) -> Segment:
        path = self._directory / f"rows-{self._next:06d}.seg"
        size = max(self._segment_bytes, -(-size // _ALIGNMENT) * _ALIGNMENT)
        is_used_again = self._spares.take(path)
        with explained(path):
            flags = 0 if is_used_again else os.O_CREAT | os.O_EXCL
            file = OpenFile(path, os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600))
            try:
                with file.use() as descriptor:
                    # A hole, or former rows and a hole: memory comes as it is written.
                    os.ftruncate(descriptor, size)
                    memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
            except BaseException:
                path.unlink()
                file.close()
                raise
        self._active, self._next = self._next, self._next + 1
        self._has_new_file = True
        segment = self._segments[self._active] = Segment(path, file, memory, is_used_again=is_used_again)
        return segment

    def _retire(self) -> None:
        """Nothing is put into the active segment any more."""
        if self._active is None:
            return
        segment = self._segments[self._active]
        if not segment.tables:
            self._discard(self._active)
            return
        segment.is_active, self._active = False, None
        if segment.is_used_again:
            with segment.file.use() as descriptor:
                punch(descriptor, segment.end, len(segment.memory))

    def _discard(self, index: int) -> None:
        """Lets a segment without tables go."""
        segment = self._segments.pop(index)
        if index == self._active:
            self._active = None
        self._spares.offer(segment.path, segment.file, segment.memory)

    def _recover(self, index: int, path: Path, starts: list[int], check: CheckTable) -> set[int]:
        """Opens a file of an earlier process with the tables that start here; gives back what lies between them.
        Returns the numbers of those that are lost. Raises OSError."""
        size = path.stat().st_size
        if not starts or not size:
            path.unlink()
            return {_number(index, start) for start in starts}
        file = OpenFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        try:
            with file.use() as descriptor:
                memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
                # It may hold what the process before did not sync any more.
                segment = Segment(path, file, memory, end=size, is_active=False, is_dirty=True)
                segment.tables = _whole_tables(segment, index, starts, check)
                edges = [0, *chain.from_iterable(segment.tables.items()), size]
                for begin, end in zip(edges[::2], edges[1::2], strict=True):
                    punch(descriptor, begin, end)
            with self._lock:
                self._check_open()
                if segment.tables:
                    self._segments[index] = segment
                else:
                    _remove(segment)
        except BaseException:
            file.close()
            raise
        return {_number(index, start) for start in starts if start not in segment.tables}


def _number(index: int, start: int) -> int:
    return index << _OFFSET_BITS | start


def _place(number: int) -> tuple[int, int]:
    """The segment of a table and where it starts there."""
    return number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1)


def _by_segment(numbers: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, start in map(_place, numbers):
        found.setdefault(index, []).append(start)
    return found


def _header(size: int) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(size.to_bytes(8, "little")), size)


def _free(segment: Segment, starts: list[int]) -> set[tuple[int, int]]:
    """Removes these tables. Returns the ranges that are free around them, as wide as they are: tables share pages."""
    for start in starts:
        segment.tables.pop(start, None)
    # Tables are added in the order in which they stand.
    left = [*segment.tables]
    gaps = set()
    for start in starts:
        following = bisect(left, start)
        begin = segment.tables[left[following - 1]] if following else 0
        gaps.add((begin, left[following] if following < len(left) else segment.end))
    return gaps


def _end(segment: Segment, start: int) -> int | None:
    """Where the table at `start` ends, None where there is none."""
    if start + _HEADER.size > len(segment.memory):
        return None
    magic, checksum, size = _HEADER.unpack_from(segment.memory, start)
    end: int = start + _HEADER.size + size
    is_ours = magic == _MAGIC and checksum == zlib.crc32(size.to_bytes(8, "little"))
    return end if is_ours and end <= len(segment.memory) else None


def _whole_tables(segment: Segment, index: int, starts: list[int], check: CheckTable) -> dict[int, int]:
    """The ends of those tables that are there and pass the check, by their starts."""
    found = {}
    for start in starts:
        end = _end(segment, start)
        if end is not None and _is_whole(segment, start, end, _number(index, start), check):
            found[start] = end
    return found


def _is_whole(segment: Segment, start: int, end: int, number: int, check: CheckTable) -> bool:
    try:
        return check(number, row_tables.decode(memoryview(segment.memory)[start + _HEADER.size : end]))
    except (GristmillError, ValueError, IndexError, UnicodeError):
        _log.warning("a table of rows is damaged", file=str(segment.path), at=start)
        return False


def _remove(segment: Segment) -> None:
    """Removes the file; views of it stay valid. One that cannot be removed now goes when the rows are opened again."""
    with suppress(OSError):
        segment.path.unlink()
    segment.file.close()
