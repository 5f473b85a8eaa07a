"""The event log as a file of checksummed records, one after another; a new file begins with a snapshot.

file     "gristmill log" padded to 16 bytes with its format version in the last two; then records
record   bytes of the payload (u32), CRC-32 of number + 1 and payload (u32), number within the file (u64), payload
record 0 the snapshot; empty in the first file
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from gristmill.errors import InvalidArgumentError
from gristmill_service.storage.errors import LogLostError
from gristmill_service.storage.journal.files import explained, numbered_files, sync_directory, write_at
from gristmill_service.storage.journal.open_file import OpenFile
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
    """The newest `events-*.log` of a directory.

    One thread at a time calls `append` and `compact`, and `sync` not while `compact` runs; `close` is for any thread.
    After `close` the others raise UnavailableError.
    """

    def __init__(self, directory: Path) -> None:
        """Raises InvalidArgumentError where there is no log, and UnavailableError where it cannot be opened."""
        self._directory = directory
        found = numbered_files(directory, "events", ".log")
        if not found:
            raise InvalidArgumentError(f"{directory} has no event log; restore it, or remove the run")
        *old, (self._file_number, self._path) = found
        with explained(self._path, "read"):
            # An unfinished compaction left them.
            for path in (*(path for _, path in old), *directory.glob("events-*.draft")):
                path.unlink()
            self._file = OpenFile(self._path, os.open(self._path, os.O_RDWR | os.O_CLOEXEC))
        self._numbers = self._base = self._end = 0

    @staticmethod
    def create(directory: Path) -> None:
        """Creates an empty log. Raises UnavailableError."""
        path = directory / _name(0)
        with explained(path):
            _begin(path, b"").close()

    def replay(self) -> Replay:
        """Reads the whole file; a torn tail is cut and makes the replay short. Raises InvalidArgumentError for a newer
        format, for a file without its snapshot, and for damage that whole records follow: a machine's death leaves no
        such thing."""
        data, self._numbers = self._read(), 0
        records = list(self._scan(memoryview(data)))
        if not records:
            raise InvalidArgumentError(f"{self._path} is damaged at its beginning; restore it, or remove the run")
        torn = len(data) - self._end
        if torn:
            if self._continues(data):
                raise InvalidArgumentError(
                    f"{self._path} is damaged at byte {self._end}, and whole records follow, of which none may be left "
                    "out; restore the file, or remove the run"
                )
            _log.warning("torn tail cut", file=str(self._path), at=self._end, bytes=torn, records=self._numbers)
            with self._file.use() as descriptor, explained(self._path):
                os.ftruncate(descriptor, self._end)
        return Replay(records[0] or None, records[1:], lambda: torn > 0)

    def _read(self) -> bytes:
        # By the descriptor: the path may be another run's by now.
        with (
            self._file.use() as descriptor,
            explained(self._path, "read"),
            open(descriptor, "rb", buffering=0, closefd=False) as file,
        ):
            file.seek(0)
            return file.read()

    def _scan(self, data: memoryview) -> Iterator[bytes]:
        if bytes(data[: len(_MAGIC)]) != _MAGIC:
            raise InvalidArgumentError(f"{self._path} is no event log of gristmill; restore it, or remove the run")
        version = int.from_bytes(data[len(_MAGIC) : len(_FILE_HEADER)], "little")
        if version > _FORMAT:
            raise InvalidArgumentError(
                f"{self._path} has format {version} and this version reads up to {_FORMAT}; use a newer gristmill"
            )
        offset = len(_FILE_HEADER)
        while (found := _record_at(data, offset, self._numbers)) is not None:
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
                if _record_at(memoryview(data), at - (_RECORD.size - 8), number) is not None:
                    return True
        return False

    def append(self, payload: bytes) -> None:
        """Raises UnavailableError; nothing is appended then."""
        assert self._end, "replayed first"
        with self._file.use() as descriptor, explained(self._path):
            try:
                write_at(descriptor, [_header(self._numbers, payload), payload], self._end)
            except OSError:
                # The part of the record that was written is no record.
                with suppress(OSError):
                    os.ftruncate(descriptor, self._end)
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
        path = self._directory / _name(self._file_number + 1)
        with self._file.use(), explained(path):
            file = _begin(path, snapshot)
        old_file, old_path = self._file, self._path
        self._file, self._path, self._file_number, self._numbers = file, path, self._file_number + 1, 1
        self._base = self._end = len(_FILE_HEADER) + _RECORD.size + len(snapshot)
        old_file.close()
        # A file that stays is removed when the log is opened again.
        with suppress(OSError):
            old_path.unlink()

    def sync(self) -> None:
        """Returns when all that was appended is on the disk. Raises OSError."""
        with self._file.use() as descriptor:
            os.fdatasync(descriptor)

    def close(self) -> None:
        self._file.close()


def _name(number: int) -> str:
    return f"events-{number:06d}.log"


def _begin(path: Path, snapshot: bytes) -> OpenFile:
    """Creates a file with its first record; it is there as a whole or not at all.

    Raises OSError, and LogLostError where it could neither be made safe nor removed again.
    """
    draft = path.with_suffix(".draft")
    file = OpenFile(path, os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        with file.use() as descriptor:
            write_at(descriptor, [_FILE_HEADER, _header(0, snapshot), *([snapshot] if snapshot else [])], 0)
            os.fsync(descriptor)
        draft.rename(path)
        sync_directory(path.parent)
    except BaseException:
        file.close()
        try:
            draft.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LogLostError(f"the journal cannot be written: {path}: {error.strerror}; it is read anew") from error
        raise
    return file


def _header(number: int, payload: bytes) -> bytes:
    return _RECORD.pack(len(payload), _checksum(number, payload), number)


def _checksum(number: int, payload: bytes | memoryview) -> int:
    # One more than the number, so that zeros, which a failing disk may leave, are no record.
    return zlib.crc32(payload, (number + 1) & 0xFFFFFFFF)


def _record_at(data: memoryview, offset: int, expected: int) -> bytes | None:
    """The record at the offset, None where there is none that is whole."""
    if offset + _RECORD.size > len(data):
        return None
    length, checksum, number = _RECORD.unpack_from(data, offset)
    start = offset + _RECORD.size
    if number != expected or start + length > len(data):
        return None
    payload = bytes(data[start : start + length])
    return payload if _checksum(number, payload) == checksum else None
