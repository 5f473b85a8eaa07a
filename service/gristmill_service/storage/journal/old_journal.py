"""Converts journals of format 1, which did not use SQLite.

run-<name>/run.json            the run's description
run-<name>/boot-id             the machine's boot, while records may be in its memory only
run-<name>/events-000003.log   16 bytes of header, then records, of which the first is a snapshot: bytes of the payload
                               (u32), CRC-32 of number + 1 and payload (u32), number (u64), payload
run-<name>/rows-000017.seg     tables of rows: "rows", CRC-32 of the size (u32), size (u64), table. A table's number has
                               the file's from bit 40 on, and the byte at which the table begins below that
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from gristmill.errors import InvalidArgumentError
from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.database import Description, Entry, damaged, explained

_DESCRIPTION = "run.json"
_LOG_HEADER = b"gristmill log\0\1\0"
_RECORD, _TABLE = struct.Struct("<IIQ"), struct.Struct("<4sIQ")
_OFFSET_BITS = 40
# A number that no old table has: its file would be the two millionth.
_NEXT_TABLE = 1 << 61


def is_old(directory: Path) -> bool:
    return (directory / _DESCRIPTION).exists()


def read_name(directory: Path) -> str:
    """Returns the name of a directory's run. Raises InvalidArgumentError if its description is damaged."""
    return _description(directory).name


def convert(directory: Path, name: str, draft: Path) -> None:
    """Creates the database of an old run atomically, first in the directory `draft`. Rows stay in their files until
    `tables` reads them. Raises InvalidArgumentError if the run is damaged or has another name, and UnavailableError."""
    path = directory / database.FILE_NAME
    with explained(directory):
        if not path.exists():
            _create(directory, name, draft)
            (draft / path.name).rename(path)
            database.sync_directory(directory)
        # run.json is removed last: while it exists, the conversion is repeated.
        for left in (*directory.glob("events-*"), directory / "boot-id", directory / _DESCRIPTION):
            left.unlink(missing_ok=True)


def tables(directory: Path, numbers: Collection[int]) -> Iterator[tuple[Path, dict[int, memoryview]]]:
    """Yields each file of rows with the tables of `numbers` that it contains. Raises UnavailableError."""
    for path in sorted(directory.glob("rows-*.seg")):
        with explained(path):
            data = memoryview(path.read_bytes())
        ours = (number for number in numbers if number >> _OFFSET_BITS == int(path.stem.removeprefix("rows-")))
        stored = {number: _table_at(data, number & ((1 << _OFFSET_BITS) - 1)) for number in ours}
        yield path, {number: table for number, table in stored.items() if table is not None}


class _OldDescription(NamedTuple):
    name: str
    run_id: str
    config: bytes


def _create(directory: Path, name: str, draft: Path) -> None:
    old, mark = _description(directory), directory / "boot-id"
    if old.name != name:
        raise database.misplaced(directory, old.name, name)
    snapshot, *records = _records(directory)
    run = Description(old.run_id, old.config, mark.read_text().strip() if mark.exists() else None)
    events = [Entry.of(number, _NEXT_TABLE, record) for number, record in enumerate(records, 1)]
    database.create(draft, name, run, Entry.of(0, _NEXT_TABLE, snapshot) if snapshot else None, events)


def _description(directory: Path) -> _OldDescription:
    path = directory / _DESCRIPTION
    try:
        document = orjson.loads(path.read_bytes())
        if document["format"] != 1:
            raise ValueError(f"format {document['format']}")
        return _OldDescription(str(document["run"]), str(document["id"]), orjson.dumps(document["config"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from None


def _records(directory: Path) -> list[bytes]:
    """Returns the payloads of the newest log. Raises InvalidArgumentError if its last record is incomplete."""
    path = max(directory.glob("events-*.log"), default=None)
    if path is None:
        raise InvalidArgumentError(f"{directory} has no event log; restore it, or delete the run")
    data, records, at = path.read_bytes(), list[bytes](), len(_LOG_HEADER)
    if data[:at] != _LOG_HEADER:
        raise damaged(path, "the header of the log is invalid")
    while at < len(data) or not records:
        end = at + _RECORD.size
        length, checksum, number = _RECORD.unpack(data[at:end].ljust(_RECORD.size, b"\0"))
        record = data[end : end + length]
        is_whole = number == len(records) and checksum == zlib.crc32(record, (number + 1) & 0xFFFFFFFF)
        if len(record) < length or not is_whole:
            raise damaged(path, f"there is no complete record at byte {at}; try the version that wrote it")
        records.append(record)
        at = end + length
    return records


def _table_at(data: memoryview, start: int) -> memoryview | None:
    """Returns the bytes of the table at an offset; None if there is none."""
    if start + _TABLE.size > len(data):
        return None
    magic, checksum, size = _TABLE.unpack_from(data, start)
    table = data[start + _TABLE.size : start + _TABLE.size + size]
    is_whole = magic == b"rows" and checksum == zlib.crc32(size.to_bytes(8, "little")) and len(table) == size
    return table if is_whole else None
