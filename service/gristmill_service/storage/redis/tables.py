"""One run's tables of rows in Redis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError
from gristmill_service.storage import row_tables
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, translated
from gristmill_service.storage.redis.keys import (
    CRC_BYTES,
    KEYS_AT_ONCE,
    VALUE_BYTES,
    RunKeys,
    pieces,
    read_values,
    sealed,
    unlink,
    unsealed,
    write_value,
)
from gristmill_service.storage.redis.scripts import Scripts
from gristmill_service.storage.row_tables import SIZE_BYTES, Stored

_log = structlog.get_logger(__name__)

_SMALL_BYTES = 256 << 10
# The limit of a size, because a damaged head may contain any number.
_MOST_BYTES = 1 << 36


class Tables:
    """The tables of a run. Small tables are written with the record that refers to them, large tables before it. One
    thread at a time writes; any thread reads and removes.

    claim: the number of this process's claim, which is in the upper bits of its tables' numbers.
    """

    def __init__(self, client: Client, scripts: Scripts, keys: RunKeys, run_id: str, claim: int) -> None:
        self._client, self._scripts, self._claim = client, scripts, claim
        self._name = partial(keys.rows, run_id)
        # The size of each table's value in bytes.
        self._sizes: dict[int, int] = {}
        self._wanted: frozenset[int] | None = None

    @property
    def first_number(self) -> int:
        return self._claim << 32

    def write(self, tables: Mapping[int, Steps]) -> tuple[dict[str, bytes], list[str]]:
        """Writes the large tables of an append. Returns the values to write with the record, and the keys that must
        exist before: the last key of each large table, which is written last. Waiting for the record's copies also
        waits for the tables' copies."""
        rows, present, left = dict[str, bytes](), list[str](), VALUE_BYTES
        for number, table in tables.items():
            value = sealed(row_tables.encode(table).buffers)
            if len(value) > min(left, _SMALL_BYTES):
                present.append(write_value(self._client, self._name(number), value)[-1])
            else:
                rows[self._name(number)] = value
                left -= len(value)
            self._sizes[number] = len(value)
        return rows, present

    def get(self, number: int) -> Stored:
        return self.get_all([number])[number]

    def get_all(self, numbers: Collection[int]) -> dict[int, Stored]:
        """Returns tables by number. Raises NotFoundError if one is missing or damaged."""
        values = dict[str, bytes | None]()
        with translated(self._client):
            for names in self._parcels(numbers):
                values |= zip(names, read_values(self._client, names), strict=True)
        return {number: self._table(number, values) for number in numbers}

    def _parcels(self, numbers: Collection[int]) -> Iterator[list[str]]:
        """Yields lists of keys of the tables' pieces, each for at most some MiB."""
        parcel, left = list[str](), VALUE_BYTES
        for number in numbers:
            rest = self._sizes.get(number, 0)
            for name in pieces(self._name(number), rest):
                size, rest = min(rest, VALUE_BYTES), rest - VALUE_BYTES
                if parcel and (size > left or len(parcel) == KEYS_AT_ONCE):
                    yield parcel
                    parcel, left = [], VALUE_BYTES
                parcel.append(name)
                left -= size
        if parcel:
            yield parcel

    def _table(self, number: int, values: dict[str, bytes | None]) -> Stored:
        parts = [values[name] for name in pieces(self._name(number), self._sizes.get(number, 0))]
        table = unsealed(parts[0] if len(parts) == 1 else b"".join(part or b"" for part in parts))
        if table is None:
            raise NotFoundError(f"table {number:#x} of rows is missing or damaged in Redis; restore it")
        return table

    def remove(self, numbers: Collection[int]) -> None:
        """Removes tables. Never raises: keys that cannot be removed now are removed by `sweep`."""
        names = [name for number in numbers for name in pieces(self._name(number), self._sizes.pop(number, 0))]
        try:
            unlink(self._client, names)
        except REDIS_ERRORS as error:
            _log.warning("rows could not be removed", tables=len(numbers), reason=str(error))

    def retain(self, numbers: Collection[int]) -> set[int]:
        """Returns the missing tables among these. Reads only their heads."""
        names = {self._name(number): number for number in numbers}
        with translated(self._client):
            heads = self._scripts.heads([*names], SIZE_BYTES)
        for number, (head, length) in zip(names.values(), heads, strict=True):
            size = int.from_bytes(head, "little") + CRC_BYTES
            if length == min(size, VALUE_BYTES) and size < _MOST_BYTES:
                self._sizes[number] = size
        self._wanted = frozenset(numbers)
        return {number for number in numbers if number not in self._sizes}

    def is_orphan(self, number: int) -> bool:
        """Returns whether a table is from an earlier claim, and was not retained when the run was opened."""
        return self._wanted is not None and number < self.first_number and number not in self._wanted
