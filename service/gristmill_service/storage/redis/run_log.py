"""One run's log in Redis, which is a stream, and its tables of rows.

Only the process with the latest claim can append, because every step includes the claim's token. A step with an unknown
outcome is repeated, which is safe. If repetition fails, the log counts as lost and must be opened again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Self, cast
from zlib import crc32

import msgspec
import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.storage import row_tables
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, outcome_unknown, translated
from gristmill_service.storage.redis.keys import (
    CRC_BYTES,
    KEYS_AT_ONCE,
    VALUE_BYTES,
    RunKeys,
    damaged,
    pieces,
    read_values,
    reading,
    sealed,
    unlink,
    unsealed,
    write_value,
)
from gristmill_service.storage.redis.scripts import (
    APPEND,
    COMPACT,
    FREE,
    NOTE,
    PUBLISH,
    RELEASE,
    Outcome,
    Script,
    Scripts,
)
from gristmill_service.storage.redis.servers import Health
from gristmill_service.storage.row_tables import SIZE_BYTES, Stored
from gristmill_service.storage.run_store import LogLostError, Replay

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


_log = structlog.get_logger(__name__)

# Seconds for which an append with an unknown outcome is repeated.
_RETRY_S = 3.0
_PAUSE_S = 0.1
_ENTRIES_AT_ONCE = 1000
_LEAST_LENGTH = 16 << 20


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot's location. number: the last record that it includes. name: its first key. size: of its value."""

    name: str
    number: int
    size: int

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Decodes the description of a snapshot. Raises ValueError."""
        if (content := unsealed(value)) is None:
            raise ValueError("the description of the snapshot is damaged")
        return msgspec.msgpack.decode(content, type=cls)

    def encode(self) -> bytes:
        return sealed([msgspec.msgpack.encode(self)])

    @property
    def keys(self) -> list[str]:
        return pieces(self.name, self.size)


class Acknowledged(NamedTuple):
    """The last record of a run that a process knows to be in the log. digest: the record's CRC; None: unknown.
    generation: the run's generation at that time; 0: unknown."""

    run_id: str
    number: int
    digest: int | None
    generation: int = 0


class RedisRunLog:
    """Implements `gristmill_service.storage.run_store.RunLog`.

    before: the last record that this process acknowledged in an earlier ownership of the run. compared: the reports of
    former owners that this process has compared with the log; later reports are added.
    """

    reads_rows = is_remote = True

    def __init__(
        self,
        client: Client,
        scripts: Scripts,
        keys: RunKeys,
        health: Health,
        *,
        config: bytes,
        run_id: str,
        token: str,
        claim: int,
        before: Acknowledged | None,
        compared: set[Acknowledged],
    ) -> None:
        self.config, self.run_id, self.keys, self.token, self.claim = config, run_id, keys, token, claim
        self.on_close: Callable[[], None] = lambda: None
        self._client, self._scripts, self._health = client, scripts, health
        self._tables = tables = Tables(client, scripts, keys, run_id, claim)
        self.get, self.get_all, self.remove, self.retain = tables.get, tables.get_all, tables.remove, tables.retain
        self._before, self._compared = before, compared
        self._reported: Acknowledged | None = None
        self._owned_until = 0.0
        self._is_lost = self._is_closed = False
        self._last, self._end = 0, ""
        self._digest: int | None = None
        self._length = 0
        self._generation = self._stored_generation = 0
        self._snapshot: Snapshot | None = None

    # --- Ownership

    @property
    def is_lost(self) -> bool:
        """Whether another process may own the run, or Redis has lost a part of the log."""
        return self._is_lost or time.monotonic() >= self._owned_until

    @property
    def lease(self) -> float | None:
        return 0.0 if self._is_lost else max(0.0, self._owned_until - time.monotonic())

    @property
    def reaches(self) -> int:
        """The number of the last record that the log must contain; 0 if the whole log was lost."""
        return self._last if self._end else 0

    @property
    def acknowledged(self) -> Acknowledged | None:
        """The last acknowledged record. Until the log is read and, if it was short, appended to, this is the record
        from the earlier ownership. A former owner's report that contradicts the log takes precedence."""
        appended = Acknowledged(self.run_id, self._last, self._digest, self._generation) if self._last else None
        return self._reported or self._before or appended

    def renewed(self, until: float) -> None:
        self._owned_until = until

    def lose(self) -> None:
        """Marks the log as lost, so that it must be opened again."""
        self._is_lost = True

    def compare(self, report: bytes) -> None:
        """Compares a former owner's report of its last acknowledged record, if any, with the log. If the log lacks the
        record, marks the log as lost; opening it again then detects that it is short."""
        if not report:
            return
        with reading(self.keys.head):
            acknowledged = msgspec.json.decode(report, type=Acknowledged)
        if acknowledged.run_id != self.run_id or acknowledged in self._compared:
            return
        with translated(self._client):
            if not self._has(acknowledged):
                # A running append checks these.
                self._reported, self._is_lost = acknowledged, True
        self._compared.add(acknowledged)

    def _has(self, acknowledged: Acknowledged) -> bool:
        if acknowledged.number > self._last:
            return False
        entry = f"{acknowledged.number}-0"
        entries = self._entries(entry, entry)
        # A snapshot may have replaced the record.
        return not entries or acknowledged.digest in (None, crc32(self._record(*entries[0])))

    # --- Reading

    def replay(self) -> Replay:
        with translated(self._client):
            promised, snapshot = self._read_head()
            records = self._read_records()
        if self._before is not None and not self._has_before(records):
            promised = max(promised or 0, self._before.number, self._last + 1)
        is_short = promised is None or promised > self._last
        if is_short:
            _log.error(
                "log rolled back",
                run=self.keys.log,
                records_lost=1 if promised is None else promised - self._last,
                records_left=self._last - 1,
                reason="Redis lost confirmed writes, for example in a failover; set redis_min_replicas to prevent that",
            )
        else:
            self._before = None
        return Replay(snapshot, records, lambda: is_short, self._generation)

    def _read_head(self) -> tuple[int | None, bytes | None]:
        """Returns the number of the last appended record (None if the head is lost), and the snapshot."""
        with reading(self.keys.head):
            head = cast(dict[bytes, bytes], self._client.hgetall(self.keys.head))
            self._stored_generation = int(head.get(b"generation", 0))
            promised = _number(head[b"last"]) if b"last" in head else None
            self._snapshot = Snapshot.decode(head[b"snapshot"]) if b"snapshot" in head else None
        self._generation = max(self._stored_generation, 0 if self._before is None else self._before.generation)
        return promised, None if self._snapshot is None else self._read_snapshot(self._snapshot)

    def _read_snapshot(self, snapshot: Snapshot) -> bytes:
        # Read key by key, because each value has some MiB.
        content = unsealed(b"".join(read_values(self._client, [key])[0] or b"" for key in snapshot.keys))
        if content is None:
            raise damaged(snapshot.name, "the snapshot of the run is missing or incomplete")
        return bytes(content)

    def _read_records(self) -> list[bytes]:
        """Returns the records after the snapshot, and sets `_last`, `_end` and `_digest` from the last record."""
        base = self._last = 1 if self._snapshot is None else self._snapshot.number
        records, start = list[bytes](), f"{base}-0"
        with reading(self.keys.log):
            while entries := self._entries(start, "+"):
                for name, fields in entries:
                    # The first entry may be the last record that the snapshot includes.
                    if (number := _number(name)) != base:
                        if number != self._last + 1:
                            raise damaged(self.keys.log, f"the entry {self._last + 1}-0 is missing")
                        records.append(self._record(name, fields))
                        self._last, self._digest = number, crc32(records[-1])
                    self._end = f"{number}-0"
                start = f"({self._end}"
        self._length = sum(map(len, records))
        return records

    def _entries(self, first: str, last: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        entries = self._client.xrange(self.keys.log, first, last, _ENTRIES_AT_ONCE)
        return cast(list[tuple[bytes, dict[bytes, bytes]]], entries)

    def _record(self, name: bytes, fields: dict[bytes, bytes]) -> bytes:
        if (content := unsealed(fields.get(b"r"))) is None:
            raise damaged(self.keys.log, f"the entry {name.decode()} was changed")
        return bytes(content)

    def _has_before(self, records: Sequence[bytes]) -> bool:
        """Returns whether the log has the last record that this process acknowledged in an earlier ownership."""
        assert self._before is not None
        _, number, digest, _ = self._before
        at = number - self._last - 1
        # A snapshot may have replaced the record.
        return self._last >= number and (digest is None or -at > len(records) or crc32(records[at]) == digest)

    @property
    def first_number(self) -> int:
        return self._tables.first_number

    @property
    def log_bytes(self) -> int:
        return self._length + (self._snapshot.size if self._snapshot else 0)

    @property
    def is_long(self) -> bool:
        return self._length > max(_LEAST_LENGTH, 2 * self._snapshot.size if self._snapshot else 0)

    # --- Writing

    def check(self, has_rows: bool = True, row_bytes: int = 0) -> None:
        """See `RunLog.check`. Rows must not use the memory that is reserved for finishing batches."""
        self._health.check(has_rows)

    def note_generation(self, generation: int) -> None:
        self._generation = generation

    def sync(self) -> None:
        """Does nothing, because `append` already stores everything in Redis."""

    def flush(self) -> None:
        """Stores the generation, unless an append has stored it."""
        if self._generation != self._stored_generation and not self.is_lost:
            generation = self._generation
            with self._health.noted():
                self.step(NOTE, "generation", generation)
            self._stored_generation = generation

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        self._health.check(has_rows=False)
        with self._health.noted(), translated(self._client):
            rows, present = self._tables.write(tables)
        generation = self._generation
        self._check(self._append(sealed([record]), generation, rows, present))
        self._last, self._digest, self._before = self._last + 1, crc32(record), None
        self._end, self._stored_generation = f"{self._last}-0", generation
        self._length += len(record)

    def _append(self, record: bytes, generation: int, rows: dict[str, bytes], present: Sequence[str]) -> Outcome:
        deadline, is_unknown = time.monotonic() + _RETRY_S, False
        arguments = (self.token, self._end, f"{self._last + 1}-0", record, generation, *rows.values())
        while True:
            try:
                with self._health.noted(), translated(self._client):
                    outcome = self._scripts.confirmed(APPEND, self.keys, *arguments, more=[*rows, *present])
                if outcome is not Outcome.UNCONFIRMED:
                    return outcome
                is_unknown, reason = True, UnavailableError(self._health.unconfirmed)
            except UnavailableError as error:
                is_unknown, reason = is_unknown or outcome_unknown(error), error
                if not is_unknown:
                    raise
            if time.monotonic() >= deadline:
                self._is_lost = True
                raise LogLostError(f"{reason}; it is unknown whether the last change was made, so retry") from reason
            time.sleep(_PAUSE_S)

    def compact(self, snapshot: bytes) -> None:
        value = sealed([snapshot])
        made = Snapshot(self.keys.snapshot(self.token, self._last), self._last, len(value))
        with translated(self._client):
            try:
                write_value(self._client, made.name, value)
            except BaseException:
                # A full server must not retain a part of it.
                with suppress(*REDIS_ERRORS):
                    unlink(self._client, made.keys)
                raise
            self.step(COMPACT, f"{self._last}-0", made.encode())
            before, self._snapshot, self._length = self._snapshot, made, 0
            if before is not None:
                with suppress(*REDIS_ERRORS):
                    unlink(self._client, before.keys)

    def publish(self, staged: str, batch: str, nonce: str) -> None:
        """Publishes a staged batch. Raises UnavailableError if this process no longer owns the run."""
        self.step(PUBLISH, nonce, more=[staged, batch])

    def free(self, batch: str) -> None:
        """Removes a batch. Raises like `publish`."""
        self.step(FREE, more=[batch])

    def step(self, script: Script, *arguments: object, more: Sequence[str] = ()) -> None:
        """Performs a step (`Scripts.step`). Raises UnavailableError if this process no longer owns the run."""
        with translated(self._client):
            self._check(self._scripts.step(script, self.keys, self.token, *arguments, more=more))

    def _check(self, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            return
        self._is_lost = True
        raise LogLostError(
            "another replica now owns this run; retry"
            if outcome is Outcome.FENCED
            else f"Redis has lost a part of {self.keys.log}; retry after the service has recovered the run"
        )

    # --- The end

    def is_orphan(self, kind: str, *name: str) -> bool:
        """Returns whether a key of the run is from an earlier claim and unreferenced. See `tag_and_parts`."""
        if kind == "rows":
            return self._tables.is_orphan(int(name[1])) or name[0] != self.run_id
        if kind == "snapshot":
            current = self.keys.snapshot(name[0], int(name[1])) == (self._snapshot and self._snapshot.name)
            return self._last > 0 and name[0] != self.token and not current
        return kind == "staged" and int(name[0]) < self.claim

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = self._is_lost = True
        self.on_close()
        # Breaks a reference cycle, so that the log's memory is released at once.
        self.on_close = lambda: None
        if self._health.unreachable_reason:
            # Releasing the lease would only time out, and the lease expires by itself.
            return
        try:
            self._scripts.step(RELEASE, self.keys, self.token)
        except REDIS_ERRORS as error:
            _log.warning("lease not released; it will expire", run=self.keys.log, reason=str(error))


def _number(entry: bytes) -> int:
    """Returns the number of a log's entry. Raises ValueError for another id."""
    number, _, zero = entry.partition(b"-")
    if zero != b"0":
        raise ValueError(f"{entry!r} is no entry of a log")
    return int(number)
