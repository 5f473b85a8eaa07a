"""A run's tables in Redis. A small one is held here until the append that refers to it, and travels with that."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection

import redis
import structlog
from redis.exceptions import RedisClusterException

from gristmill._wire.steps import Steps
from gristmill_service.storage import row_tables
from gristmill_service.storage.redis import row_values
from gristmill_service.storage.redis.row_values import RowKeys
from gristmill_service.storage.redis.servers.connection import Client, translated
from gristmill_service.storage.redis.servers.durability import SERVER_ALONE, Durability
from gristmill_service.storage.run_store import CheckTable

_log = structlog.get_logger(__name__)

# A larger table is sent when it is put, so that an append stays short.
_HELD_BYTES = 256 << 10


class RunTables:
    """Thread-safe. claim: this process's claim of the run, which its tables' numbers begin with."""

    def __init__(self, client: Client, keys: RowKeys, claim: int, durability: Durability) -> None:
        self._client, self._keys, self.claim, self._durability = client, keys, claim, durability
        self._is_cluster = isinstance(client, redis.RedisCluster)
        self._numbers = itertools.count(claim << 32)
        self._held: dict[int, bytes] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    def put(self, table: Steps) -> tuple[int, bytes]:
        number, data = next(self._numbers), row_tables.encode(table).joined()
        if len(data) <= _HELD_BYTES:
            self._held[number] = data
        else:
            self._send({number: data})
        return number, data

    def for_append(self, numbers: Collection[int]) -> tuple[dict[str, bytes], list[str]]:
        """The rows to write with a record that refers to these tables, and the keys that must be there by then.

        Rows that cannot go with the record, or would make it too long, are written at once.
        """
        with self._lock:
            held = {number: self._held[number] for number in numbers if number in self._held}
        if held and (self._is_cluster or sum(map(len, held.values())) > row_values.VALUE_BYTES):
            self._send(held)
            held = {}
        if self._is_cluster:
            # Rows and the log are on different servers.
            return {}, []
        with self._lock:
            sizes = [(number, self._sizes[number]) for number in numbers if number in self._sizes]
        rows = {self._keys.piece(number, 0): data for number, data in held.items()}
        # A table's last value was written last.
        return rows, [self._keys.pieces(number, size)[-1] for number, size in sizes]

    def appended(self, numbers: Collection[int]) -> None:
        """Says that the record, and with it the tables that were held for it, are in Redis now."""
        with self._lock:
            for number in numbers:
                if (data := self._held.pop(number, None)) is not None:
                    self._sizes[number] = len(data)

    def get(self, number: int) -> bytes:
        if (data := self._held.get(number)) is not None:
            return data
        with translated(self._client):
            return row_values.read(self._client, self._keys, number)

    def get_all(self, numbers: Collection[int]) -> dict[int, bytes]:
        with self._lock:
            found = {number: self._held[number] for number in numbers if number in self._held}
            sizes = {number: self._sizes.get(number, 0) for number in numbers if number not in found}
        with translated(self._client):
            return found | row_values.read_all(self._client, self._keys, sizes)

    def remove(self, numbers: Collection[int]) -> None:
        with self._lock:
            for number in numbers:
                self._held.pop(number, None)
            sizes = {number: self._sizes.pop(number) for number in numbers if number in self._sizes}
        try:
            row_values.remove(self._client, self._keys, sizes)
        except (redis.RedisError, RedisClusterException) as error:
            # They go with the next sweep, or with the run.
            _log.warning("rows could not be removed", tables=len(sizes), reason=str(error))

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        """Only the first value of each table is read: gigabytes would take longer than a takeover may."""
        with translated(self._client):
            self._sizes = row_values.sizes(self._client, self._keys, numbers)
        threading.Thread(target=self._sweep, args=(set(numbers),), name="gristmill-sweep", daemon=True).start()
        return set(numbers) - self._sizes.keys()

    def _send(self, tables: dict[int, bytes]) -> None:
        with translated(self._client):
            row_values.write(self._client, self._keys, tables, self._written)
        with self._lock:
            self._sizes |= {number: len(data) for number, data in tables.items()}
            for number in tables:
                self._held.pop(number, None)

    @property
    def _written(self) -> Durability:
        """Where rows and log share a server, waiting for the record's copies is waiting for those of all before it."""
        return self._durability if self._is_cluster else SERVER_ALONE

    def _sweep(self, wanted: set[int]) -> None:
        try:
            count = row_values.sweep(self._client, self._keys, wanted, self.claim)
            if count:
                _log.info("orphaned rows removed", rows=self._keys.pattern, values=count)
        except Exception as error:  # noqa: BLE001 - what is left goes with the run
            _log.warning("orphaned rows not removed", rows=self._keys.pattern, reason=str(error))
