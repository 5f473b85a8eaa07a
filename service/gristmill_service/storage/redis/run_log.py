"""The log of one run in Redis, a stream, and beside it the run's tables of rows.

Only the process that claimed the run last appends: every step names the claim's token. What it cannot be sure of, it
asks again, which is safe; where that does not help, the log is lost and has to be opened anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast
from zlib import crc32

import msgspec
import redis
import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.call_threads import waiting
from gristmill_service.storage.redis import row_values
from gristmill_service.storage.redis.run_tables import RunTables
from gristmill_service.storage.redis.scripts import ControlKeys, Outcome, Scripts
from gristmill_service.storage.redis.servers.connection import Client, outcome_unknown, translated
from gristmill_service.storage.redis.servers.server_health import Health
from gristmill_service.storage.row_tables import Stored
from gristmill_service.storage.run_store import LogLostError, Replay

_log = structlog.get_logger(__name__)

_FORMAT = 1
# An append whose outcome is unknown is asked for again for so long.
_RETRY_S = 3.0
_PAUSE_S = 0.1
_ENTRIES_AT_ONCE = 1000
_LEAST_LENGTH = 16 << 20
# A log begins with an entry of this number, which is no record.
_FIRST = 1


class _Snapshot(msgspec.Struct, frozen=True):
    """number: of the last record that it stands for. name: with which its pieces' keys begin."""

    format: int
    name: str
    number: int
    size: int

    @property
    def keys(self) -> list[str]:
        return [f"{self.name}:{index}" for index in range(-(-self.size // row_values.VALUE_BYTES))]


class Acknowledged(NamedTuple):
    """The last record of a run that this process knows to be in the log. digest: the record's CRC; None: not known.
    generation: the run's then; 0: not known."""

    run_id: str
    number: int
    digest: int | None
    generation: int = 0


class RedisRunLog:
    """See `gristmill_service.storage.run_store.RunLog`.

    before: what this process had acknowledged of the run when it had it last. compared: reports of former owners that
    this process has compared with the log, now or when it had the run before; those to come are added.
    """

    maps_rows = False
    reads_rows = True

    def __init__(
        self,
        client: Client,
        scripts: Scripts,
        keys: ControlKeys,
        tables: RunTables,
        health: Health,
        *,
        config: bytes,
        run_id: str,
        token: str,
        before: Acknowledged | None,
        compared: set[Acknowledged],
    ) -> None:
        self.config, self.run_id, self.token = config, run_id, token
        self.get, self.get_all = tables.get, tables.get_all
        self.remove, self.retain, self.claim = tables.remove, tables.retain, tables.claim
        self.on_close: Callable[[], None] = lambda: None
        self._client, self._scripts, self._keys, self._tables = client, scripts, keys, tables
        self._health, self._before = health, before
        self._compared = compared
        self._reported: Acknowledged | None = None
        self._owned_until = 0.0
        self._is_lost = self._is_closed = False
        self._last = 0
        self._digest: int | None = None
        self._length = 0
        self._generation = 0 if before is None else before.generation
        self._snapshot: _Snapshot | None = None

    @property
    def is_lost(self) -> bool:
        """True where another process may decide for the run by now, or Redis has forgotten a part of the log."""
        return self._is_lost or time.monotonic() >= self._owned_until

    @property
    def lease(self) -> float | None:
        return 0.0 if self._is_lost else max(0.0, self._owned_until - time.monotonic())

    @property
    def last_number(self) -> int:
        """The number of the last record that is known to be in the log."""
        return self._last

    @property
    def acknowledged(self) -> Acknowledged | None:
        """Until the log is read and, where it was found too short, goes on, it is as it was before. One that a former
        owner's report refutes is as that says."""
        own = Acknowledged(self.run_id, self._last, self._digest, self._generation) if self._last else None
        return self._reported or self._before or own

    def renewed(self, until: float) -> None:
        self._owned_until = until

    def lose(self) -> None:
        """From now on the log is to be opened anew."""
        self._is_lost = True

    def check_reported(self) -> None:
        """Reads what a former owner reports to have acknowledged. Where the log lacks that, it is to be opened anew,
        and is found short then."""
        with translated(self._client):
            reported = cast(bytes | None, self._client.getdel(self._keys.acknowledged))
            if reported is None:
                return
            found = msgspec.json.decode(reported, type=Acknowledged)
            if found.run_id != self.run_id or found in self._compared:
                return
            if not self._has(found):
                # An append that is under way does not go on from it.
                self._reported, self._is_lost = found, True
            self._compared.add(found)

    def _has(self, found: Acknowledged) -> bool:
        if found.number > self._last:
            return False
        number = f"{found.number}-0"
        entries = cast(list[tuple[bytes, dict[bytes, bytes]]], self._client.xrange(self._keys.log, number, number))
        # A snapshot may have taken the record's place.
        return not entries or found.digest in (None, crc32(entries[0][1][b"e"]))

    def replay(self) -> Replay:
        with translated(self._client):
            snapshot, self._last, self._length = self._read_snapshot(), _FIRST, 0
            if self._snapshot is not None:
                self._last = self._snapshot.number
            records = list(self._records())
        is_short, generation = self._before is not None, self._generation
        return Replay(snapshot, records, lambda: is_short, generation)

    def _read_snapshot(self) -> bytes | None:
        described = cast(bytes | None, self._client.get(self._keys.snapshot))
        if described is None:
            return None
        found = msgspec.msgpack.decode(described, type=_Snapshot)
        if found.format > _FORMAT:
            raise InvalidArgumentError(
                f"the snapshot of {self._keys.log} has format {found.format} and this version reads up to "
                f"{_FORMAT}; use a newer gristmill"
            )
        pieces = [cast(bytes | None, self._client.get(key)) for key in found.keys]
        if None in pieces:
            raise InvalidArgumentError(f"Redis has lost a part of {self._keys.snapshot}; restore it, or delete the run")
        self._snapshot = found
        return b"".join(cast(list[bytes], pieces))

    def _records(self) -> Iterator[bytes]:
        """The records after number `_last`, which moves with them; once all are read, `_before` stays only where they
        are too few."""
        before, is_other = self._before, False
        while True:
            entries = cast(
                list[tuple[bytes, dict[bytes, bytes]]],
                self._client.xrange(self._keys.log, f"({self._last}-0", "+", _ENTRIES_AT_ONCE),
            )
            for name, fields in entries:
                record = fields[b"e"]
                self._last, self._digest = int(name.partition(b"-")[0]), crc32(record)
                self._length += len(record)
                if before is not None and self._last == before.number:
                    is_other = before.digest not in (None, self._digest)
                yield record
            if len(entries) < _ENTRIES_AT_ONCE:
                break
        if before is None:
            return
        if not is_other and self._last >= before.number:
            self._before = None
        else:
            lost = max(1, before.number - self._last)
            _log.error(
                "log rolled back",
                run=self._keys.log,
                records_lost=lost,
                records_left=self._last - _FIRST,
                reason="Redis lost what it had confirmed, as by a failover; redis_min_replicas prevents that",
            )

    def note_generation(self, generation: int) -> None:
        self._generation = generation

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        self._health.check_replicas()
        with self._health.noted():
            rows, present = self._tables.for_append(tables) if tables else ({}, ())
        outcome = self._append(record, rows, present)
        if outcome is not Outcome.DONE:
            self._is_lost = True
            raise LogLostError(
                "another replica decides for this run by now; ask again"
                if outcome is Outcome.FENCED
                else f"Redis has forgotten a part of {self._keys.log}; the service reads the run again from the rest"
            )
        self._last += 1
        self._digest, self._before = crc32(record), None
        self._length += len(record)
        if tables:
            self._tables.appended(tables)

    def _append(self, record: bytes, rows: dict[str, bytes], present: Sequence[str]) -> Outcome:
        deadline = time.monotonic() + _RETRY_S
        is_unknown = False
        while True:
            try:
                with waiting(), self._health.noted(), translated(self._client):
                    outcome = self._scripts.append(self._keys, self.token, self._last + 1, record, rows, present)
                if outcome is not Outcome.UNCONFIRMED:
                    return outcome
                is_unknown, reason = True, UnavailableError(self._health.unconfirmed)
            except UnavailableError as error:
                is_unknown, reason = is_unknown or outcome_unknown(error), error
                if not is_unknown:
                    raise
            if time.monotonic() >= deadline:
                self._is_lost = True
                raise LogLostError(f"{reason}; whether the last change was made is not known") from reason
            time.sleep(_PAUSE_S)

    def sync(self) -> None:
        """An append is as safe as the settings ask for when it returns."""

    def flush(self) -> None:
        pass

    @property
    def log_bytes(self) -> int:
        return self._length + (self._snapshot.size if self._snapshot else 0)

    @property
    def is_long(self) -> bool:
        return self._length > max(_LEAST_LENGTH, 2 * self._snapshot.size if self._snapshot else 0)

    def compact(self, snapshot: bytes) -> None:
        name = f"{self._keys.snapshot}:{self.token}:{self._last}"
        made = _Snapshot(_FORMAT, name, self._last, len(snapshot))
        with translated(self._client):
            self._write_snapshot(made, snapshot)
            if not self._scripts.compact(self._keys, self.token, self._last, msgspec.msgpack.encode(made)):
                self._is_lost = True
                raise LogLostError("another replica decides for this run by now; ask again")
            before, self._snapshot, self._length = self._snapshot, made, 0
            row_values.unlink(self._client, before.keys if before else [])

    def _write_snapshot(self, made: _Snapshot, snapshot: bytes) -> None:
        try:
            for index, key in enumerate(made.keys):
                part = memoryview(snapshot)[index * row_values.VALUE_BYTES : (index + 1) * row_values.VALUE_BYTES]
                self._client.set(key, cast(Any, part))
        except BaseException:
            # A server that is full must not be left with a part of it.
            with suppress(redis.RedisError, redis.exceptions.RedisClusterException):
                row_values.unlink(self._client, made.keys)
            raise

    def put(self, table: Steps) -> tuple[int, Stored]:
        self._health.check_room()
        with self._health.noted():
            return self._tables.put(table)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = self._is_lost = True
        self.on_close()
        # It refers to the log: without it, the log goes as soon as nobody has it.
        self.on_close = lambda: None
        if self._health.unreachable_reason:
            # It would only wait: the lease runs out by itself.
            return
        try:
            self._scripts.release(self._keys, self.token)
        except (redis.RedisError, redis.exceptions.RedisClusterException) as error:
            _log.warning("lease not given back; it runs out by itself", run=self._keys.log, reason=str(error))
