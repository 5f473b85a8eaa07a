"""A run's tables of rows in Redis: small ones travel with the record that refers to them, large ones before it."""

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
# A damaged head may say anything.
_MOST_BYTES = 1 << 36


class Tables:
    """One thread at a time writes, any reads and removes. claim: this process's claim of the run, with which the
    numbers of its tables begin."""

    def __init__(self, client: Client, scripts: Scripts, keys: RunKeys, run_id: str, claim: int) -> None:
        self._client, self._scripts, self._claim = client, scripts, claim
        self._name = partial(keys.rows, run_id)
        # The bytes of each table's value.
        self._sizes: dict[int, int] = {}
        self._wanted: frozenset[int] | None = None

    @property
    def first_number(self) -> int:
        return self._claim << 32

    def write(self, tables: Mapping[int, Steps]) -> tuple[dict[str, bytes], list[str]]:
        """Writes the large tables of an append. Returns the values to write with the record, and the keys that must be
        there by then: of each large table the last, which was written last. Whoever waits for the record's copies waits
        for theirs, too."""
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
        """Raises NotFoundError for a table that is missing or damaged."""
        found = dict[str, bytes | None]()
        with translated(self._client):
            for names in self._parcels(numbers):
                found |= zip(names, read_values(self._client, names), strict=True)
        return {number: self._table(number, found) for number in numbers}

    def _parcels(self, numbers: Collection[int]) -> Iterator[list[str]]:
        """The keys of the tables' pieces, some MiB at once."""
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

    def _table(self, number: int, found: dict[str, bytes | None]) -> Stored:
        parts = [found[name] for name in pieces(self._name(number), self._sizes.get(number, 0))]
        table = unsealed(parts[0] if len(parts) == 1 else b"".join(part or b"" for part in parts))
        if table is None:
            raise NotFoundError(f"table {number:#x} of rows is not in Redis, or damaged there")
        return table

    def remove(self, numbers: Collection[int]) -> None:
        """Never raises: what cannot be removed now goes when the run is swept."""
        names = [name for number in numbers for name in pieces(self._name(number), self._sizes.pop(number, 0))]
        try:
            unlink(self._client, names)
        except REDIS_ERRORS as error:
            _log.warning("rows could not be removed", tables=len(numbers), reason=str(error))

    def retain(self, numbers: Collection[int]) -> set[int]:
        """Returns those that are lost. Only the heads of tables are read: gigabytes would take longer than a takeover
        may."""
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
        """Whether a table is of an earlier claim, and was not wanted when the run was opened."""
        return self._wanted is not None and number < self.first_number and number not in self._wanted
