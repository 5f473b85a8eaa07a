"""One run's log in Redis, which is a stream.

Only the process with the latest claim can append, because every step includes the claim's token. A step with an unknown
outcome is repeated, which is safe. If repetition fails, the log counts as lost and must be opened again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Self, cast
from zlib import crc32

import msgspec
import structlog
from msgspec import structs

from gristmill._wire.steps import Steps
from gristmill.errors import UnavailableError
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, outcome_unknown, translated
from gristmill_service.storage.redis.keys import (
    RunKeys,
    damaged,
    read_values,
    reading,
    sealed,
    unlink,
    unsealed,
)
from gristmill_service.storage.redis.scripts import (
    APPEND,
    COMPACT,
    FREE,
    NOTE,
    PUBLISH,
    RELEASE,
    TRIM,
    TRIMMED_AT_ONCE,
    Outcome,
    Script,
    Scripts,
)
from gristmill_service.storage.redis.servers import Health
from gristmill_service.storage.redis.tables import Tables
from gristmill_service.storage.run_store import LogEnd, LogLostError, Replay, is_long_tail

_log = structlog.get_logger(__name__)

# Seconds for which an append with an unknown outcome is repeated.
_RETRY_S = 3.0
_PAUSE_S = 0.1
_ENTRIES_AT_ONCE = 1000


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot's location. number: the last record that it includes. name: begins its keys, of which each piece has
    one. size: of all pieces."""

    name: str
    number: int
    pieces: int
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
        return [f"{self.name}:{index}" for index in range(self.pieces)]


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
        # The bytes of all records that were read or appended, and of those among them that the snapshot includes.
        self._length = self._compacted = 0
        self._snapshots = 0
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

    def _read_head(self) -> tuple[int | None, Iterator[bytes] | None]:
        """Returns the number of the last appended record (None if the head is lost), and the snapshot."""
        with reading(self.keys.head):
            head = cast(dict[bytes, bytes], self._client.hgetall(self.keys.head))
            self._stored_generation = int(head.get(b"generation", 0))
            promised = _number(head[b"last"]) if b"last" in head else None
            self._snapshot = Snapshot.decode(head[b"snapshot"]) if b"snapshot" in head else None
        self._generation = max(self._stored_generation, 0 if self._before is None else self._before.generation)
        return promised, None if self._snapshot is None else self._read_snapshot(self._snapshot)

    def _read_snapshot(self, snapshot: Snapshot) -> Iterator[bytes]:
        for key in snapshot.keys:
            with translated(self._client):
                content = unsealed(read_values(self._client, [key])[0])
            if content is None:
                raise damaged(key, "a piece of the run's snapshot is missing or incomplete")
            yield bytes(content)

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
        return self._length - self._compacted + self._snapshot_bytes

    @property
    def is_long(self) -> bool:
        return is_long_tail(self._length - self._compacted, self._snapshot_bytes)

    @property
    def _snapshot_bytes(self) -> int:
        return self._snapshot.size if self._snapshot else 0

    @property
    def end(self) -> LogEnd:
        return LogEnd(self._last, self._length)

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

    def compact(self, end: LogEnd, snapshot: Iterable[bytes]) -> None:
        self._snapshots += 1
        made = Snapshot(self.keys.snapshot(self.token, self._snapshots), end.number, 0, 0)
        with translated(self._client):
            try:
                for piece in snapshot:
                    self._check_open()
                    self._client.set(f"{made.name}:{made.pieces}", sealed([piece]))
                    made = structs.replace(made, pieces=made.pieces + 1, size=made.size + len(piece))
            except BaseException:
                # A full server must not retain a part of it.
                with suppress(*REDIS_ERRORS):
                    unlink(self._client, structs.replace(made, pieces=made.pieces + 1).keys)
                raise
            self.step(COMPACT, made.encode(), more=made.keys)
            before, self._snapshot, self._compacted = self._snapshot, made, end.nbytes
            # Removes records in parts, so that Redis answers others in between.
            first = before.number if before else 0
            for _ in range(first, end.number, TRIMMED_AT_ONCE):
                self.step(TRIM, made.encode(), f"{end.number}-0", "~")
            self.step(TRIM, made.encode(), f"{end.number}-0", "=", more=before.keys if before else ())

    def _check_open(self) -> None:
        """Raises UnavailableError if a snapshot cannot be written, because of too little memory, or another owner."""
        self._health.check(has_rows=True)
        if self.is_lost:
            raise LogLostError(f"{self.keys.log} is being recovered; retry")

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
