"""The event log as a file of checksummed records, one after another; a new file begins with a snapshot.

file     "gristmill log" padded to 16 bytes with its format version in the last two; then records
record   bytes of the payload (u32), CRC-32 of number and payload (u32), number within the file (u64), payload
record 0 the snapshot; empty in the first file
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import structlog

from gristmill.errors import InvalidArgumentError
from gristmill_service.storage.journal.files import explained, punch, sync_directory, write_at
from gristmill_service.storage.run_store import Replay

_log = structlog.get_logger(__name__)

_FORMAT = 1
_MAGIC = b"gristmill log\0"
_FILE_HEADER = _MAGIC + _FORMAT.to_bytes(2, "little")
_RECORD = struct.Struct("<IIQ")
# Shorter logs are not worth a snapshot.
_LEAST_LENGTH = 16 << 20
_RECORDS_SOUGHT = 3


class EventLog:
    """The newest `events-*.log` of a directory. Not thread-safe, but for `sync`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        files = sorted(directory.glob("events-*.log"))
        self._path = files[-1] if files else directory / _name(0)
        self._numbers = 0
        self._base = 0
        if files:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            # What a compaction left that did not end.
            for old in files[:-1]:
                old.unlink()
        else:
            with explained(self._path):
                self._descriptor = _begin(self._path, b"")
        for draft in directory.glob("events-*.draft"):
            draft.unlink()
        self._end = 0

    def replay(self) -> Replay:
        """Reads the whole file; a torn tail is cut and told. Raises InvalidArgumentError for a newer format, for a file
        without its snapshot, and for damage that whole records follow: a machine's death leaves no such thing."""
        data, self._numbers = self._path.read_bytes(), 0
        records = list(self._scan(memoryview(data)))
        if len(data) > self._end:
            torn = len(data) - self._end
            if self._continues(data):
                raise InvalidArgumentError(
                    f"{self._path} is damaged at byte {self._end}, and whole records follow, of which none may be left "
                    "out; restore the file, or remove the run"
                )
            _log.warning("torn tail cut", file=str(self._path), at=self._end, bytes=torn, records=self._numbers)
            os.ftruncate(self._descriptor, self._end)
        if not records:
            raise InvalidArgumentError(f"{self._path} is damaged at its beginning; restore it, or remove the run")
        return Replay(records[0] or None, records[1:])

    def _scan(self, data: memoryview) -> Iterator[bytes]:
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise InvalidArgumentError(f"{self._path} is no event log of gristmill; restore it, or remove the run")
        version = int.from_bytes(data[len(_MAGIC) : len(_FILE_HEADER)], "little")
        if version > _FORMAT:
            raise InvalidArgumentError(
                f"{self._path} has format {version} and this version reads up to {_FORMAT}; use a newer gristmill"
            )
        offset = len(_FILE_HEADER)
        while (found := _read(data, offset, self._numbers)) is not None:
            self._numbers += 1
            offset += _RECORD.size + len(found)
            if self._numbers == 1:
                self._base = offset
            self._end = offset
            yield found

    def _continues(self, data: bytes) -> bool:
        """Whether one of the next records is somewhere behind where the last whole one ends."""
        for number in range(self._numbers + 1, self._numbers + 1 + _RECORDS_SOUGHT):
            sought, at = number.to_bytes(8, "little"), self._end
            while (at := data.find(sought, at + 1)) >= 0:
                if _read(memoryview(data), at - (_RECORD.size - 8), number) is not None:
                    return True
        return False

    def append(self, payload: bytes) -> None:
        """Raises UnavailableError; nothing is appended then."""
        assert self._end, "replayed first"
        with explained(self._path):
            try:
                write_at(self._descriptor, [_header(self._numbers, payload), payload], self._end)
            except OSError:
                # What was written of it is not of any record: it is given back, and overwritten by the next.
                punch(self._descriptor, self._end, self._end + _RECORD.size + len(payload))
                raise
        self._numbers += 1
        self._end += _RECORD.size + len(payload)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    @property
    def is_long(self) -> bool:
        return self._end - self._base > max(_LEAST_LENGTH, 2 * self._base)

    def compact(self, snapshot: bytes) -> None:
        """Goes on in a new file. Raises UnavailableError where that cannot be written: the old one stays."""
        path = self._directory / _name(int(self._path.stem.rpartition("-")[2]) + 1)
        with explained(path):
            descriptor = _begin(path, snapshot)
        before, old = self._descriptor, self._path
        self._descriptor, self._path, self._numbers = descriptor, path, 1
        self._base = self._end = len(_FILE_HEADER) + _RECORD.size + len(snapshot)
        os.close(before)
        old.unlink()

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _name(number: int) -> str:
    return f"events-{number:06d}.log"


def _begin(path: Path, snapshot: bytes) -> int:
    """A new file with its first record, there as a whole or not at all."""
    draft = path.with_suffix(".draft")
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        write_at(descriptor, [_FILE_HEADER, _header(0, snapshot), *([snapshot] if snapshot else [])], 0)
        os.fsync(descriptor)
        draft.rename(path)
        sync_directory(path.parent)
    except BaseException:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
        raise
    return descriptor


def _header(number: int, payload: bytes) -> bytes:
    return _RECORD.pack(len(payload), _checksum(number, payload), number)


def _checksum(number: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, number & 0xFFFFFFFF)


def _read(data: memoryview, offset: int, expected: int) -> bytes | None:
    """The record at the offset, None where there is none that is whole."""
    if offset + _RECORD.size > len(data):
        return None
    length, checksum, number = _RECORD.unpack_from(data, offset)
    start = offset + _RECORD.size
    if number != expected or start + length > len(data):
        return None
    payload = bytes(data[start : start + length])
    return payload if _checksum(number, payload) == checksum else None
