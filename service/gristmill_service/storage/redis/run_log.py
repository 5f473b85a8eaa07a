"""One run in Redis: its log as a stream, and its tables of rows.

Only the process that claimed the run last appends: every step names the claim's token. What it cannot be sure of, it
asks again, which is safe; when that does not settle it, the book is lost and has to be opened anew.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import msgspec
import redis
import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage.redis import row_values
from gristmill_service.storage.redis.connection import Client, outcome_unknown, translated
from gristmill_service.storage.redis.row_values import RowKeys
from gristmill_service.storage.redis.scripts import Appended, ControlKeys, Scripts
from gristmill_service.storage.redis.server_health import Health
from gristmill_service.storage.run_store import CheckTable, LogLostError, Replay

_log = structlog.get_logger(__name__)

_FORMAT = 1
# An append whose outcome is unknown is asked for again for so long, with the run's lock held.
_PATIENCE_S = 3.0
_PAUSE_S = 0.1
_ENTRIES_AT_ONCE = 1000
_LEAST_LENGTH = 16 << 20


class _Snapshot(msgspec.Struct, frozen=True):
    """number: of the last record that it stands for. name: what its pieces' keys begin with."""

    format: int
    name: str
    number: int
    size: int

    @property
    def keys(self) -> list[str]:
        return [f"{self.name}:{index}" for index in range(-(-self.size // row_values.VALUE_BYTES))]


class RedisRunLog:
    """See `gristmill_service.storage.run_store.RunLog`. claim: how often the run was claimed, with this."""

    maps_rows = False
    reads_rows = True

    def __init__(
        self,
        client: Client,
        scripts: Scripts,
        keys: ControlKeys,
        row_keys: RowKeys,
        config: bytes,
        token: str,
        claim: int,
        health: Health,
    ) -> None:
        self.config, self.token, self.run_id = config, token, ""
        self.owned_until = 0.0
        self.on_close: Callable[[], None] = lambda: None
        self._client, self._scripts, self._keys, self._row_keys = client, scripts, keys, row_keys
        self.claim, self._health = claim, health
        self._numbers = itertools.count(claim << 32)
        self._sizes: dict[int, int] = {}
        self._sizes_lock = threading.Lock()
        self._last = 0
        self._length = 0
        self._snapshot: _Snapshot | None = None
        self._is_closed = False

    @property
    def is_lost(self) -> bool:
        """Whether another process may decide for the run by now."""
        return time.monotonic() >= self.owned_until

    def replay(self) -> Replay:
        with translated(self._client):
            described = cast(bytes | None, self._client.get(self._keys.snapshot))
            if described is None:
                self._last = 1
                return Replay(None, list(self._records()))
            found = msgspec.msgpack.decode(described, type=_Snapshot)
            if found.format > _FORMAT:
                raise InvalidArgumentError(
                    f"the snapshot of {self._keys.log} has format {found.format} and this version reads up to "
                    f"{_FORMAT}; use a newer gristmill"
                )
            pieces = [cast(bytes | None, self._client.get(key)) for key in found.keys]
            if None in pieces:
                raise InvalidArgumentError(f"Redis has lost a part of {self._keys.snapshot}; the run cannot be read")
            self._last, self._snapshot = found.number, found
            return Replay(b"".join(cast(list[bytes], pieces)), list(self._records()))

    def _records(self) -> Iterator[bytes]:
        """What the log has after the record `_last`, which moves with it."""
        while True:
            entries = cast(
                list[tuple[bytes, dict[bytes, bytes]]],
                self._client.xrange(self._keys.log, f"({self._last}-0", "+", _ENTRIES_AT_ONCE),
            )
            for name, fields in entries:
                self._last = int(name.partition(b"-")[0])
                self._length += len(fields[b"e"])
                yield fields[b"e"]
            if len(entries) < _ENTRIES_AT_ONCE:
                return

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        appended = self._append(record)
        if appended is not Appended.DONE:
            self.owned_until = 0.0
            raise LogLostError(
                "another replica decides for this run by now; ask again"
                if appended is Appended.FENCED
                else f"Redis has forgotten a part of {self._keys.log}; the run is read anew from what it has"
            )
        self._last += 1
        self._length += len(record)

    def _append(self, record: bytes) -> Appended:
        deadline = time.monotonic() + _PATIENCE_S
        is_unknown = False
        while True:
            try:
                with self._health.noted(), translated(self._client):
                    return self._scripts.append(self._keys, self.token, self._last + 1, record)
            except UnavailableError as error:
                is_unknown = is_unknown or outcome_unknown(error)
                if not is_unknown:
                    raise
                if time.monotonic() >= deadline:
                    self.owned_until = 0.0
                    raise LogLostError(f"{error}; whether the last change was made is not known") from error
                time.sleep(_PAUSE_S)

    def sync(self) -> None:
        """As safe as the server's `appendfsync` makes it, which is its own."""

    def flush(self) -> None:
        pass

    @property
    def log_bytes(self) -> int:
        return self._length + (self._snapshot.size if self._snapshot else 0)

    @property
    def lease(self) -> float | None:
        return max(0.0, self.owned_until - time.monotonic())

    @property
    def is_long(self) -> bool:
        return self._length > max(_LEAST_LENGTH, 2 * self._snapshot.size if self._snapshot else 0)

    def compact(self, snapshot: bytes) -> None:
        name = f"{self._keys.snapshot}:{self.token}:{self._last}"
        made = _Snapshot(_FORMAT, name, self._last, len(snapshot))
        with translated(self._client):
            for index, key in enumerate(made.keys):
                part = memoryview(snapshot)[index * row_values.VALUE_BYTES : (index + 1) * row_values.VALUE_BYTES]
                self._client.set(key, cast(Any, part))
            if not self._scripts.compact(self._keys, self.token, self._last, msgspec.msgpack.encode(made)):
                self.owned_until = 0.0
                raise LogLostError("another replica decides for this run by now; ask again")
            before, self._snapshot, self._length = self._snapshot, made, 0
            row_values.unlink(self._client, before.keys if before else [])

    def put(self, table: Steps) -> tuple[int, Steps]:
        self._health.check_room()
        number = next(self._numbers)
        with self._health.noted(), translated(self._client):
            size = row_values.write(self._client, self._row_keys, number, table)
        with self._sizes_lock:
            self._sizes[number] = size
        return number, table

    def get(self, number: int) -> Steps:
        with translated(self._client):
            return row_values.read(self._client, self._row_keys, number)

    def remove(self, numbers: Collection[int]) -> None:
        with self._sizes_lock:
            sizes = {number: self._sizes.pop(number) for number in numbers if number in self._sizes}
        try:
            row_values.remove(self._client, self._row_keys, sizes)
        except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
            # They go with the next sweep, or with the run.
            _log.warning("rows could not be removed", tables=len(sizes), reason=str(error))

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        """Tables are looked for, not read: gigabytes would take longer than a takeover may."""
        with translated(self._client):
            self._sizes = row_values.sizes(self._client, self._row_keys, numbers)
        threading.Thread(target=self._sweep, args=(set(numbers),), name="gristmill-sweep", daemon=True).start()
        return set(numbers) - self._sizes.keys()

    def _sweep(self, kept: set[int]) -> None:
        try:
            count = row_values.sweep(self._client, self._row_keys, kept, self.claim)
            if count:
                _log.info("orphaned rows removed", run=self._keys.log, values=count)
        except Exception as error:  # noqa: BLE001 - what is left goes with the run
            _log.warning("orphaned rows not removed", run=self._keys.log, reason=str(error))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.owned_until = 0.0
        self.on_close()
        if self._health.silence:
            # It would only wait: the lease runs out by itself.
            return
        try:
            self._scripts.release(self._keys, self.token)
        except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
            _log.warning("lease not given back; it runs out by itself", run=self._keys.log, reason=str(error))
