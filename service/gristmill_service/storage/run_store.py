"""The interface of run stores, which store configurations, logs of events and tables of rows, but not shards.

A run store contains a log per run. It does not interpret events: it stores records in order, and tables by number.
All implementations pass the same tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

import orjson

from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage.row_tables import Stored


class LogLostError(UnavailableError):
    """The log may differ from the appended records. Close it, open it again and replay it."""


class OwnedElsewhereError(UnavailableError):
    """Another process owns the run. secret: sent to that process with forwarded calls."""

    def __init__(
        self, message: str, run: str = "", grpc_address: str = "", http_url: str = "", secret: str = ""
    ) -> None:
        super().__init__(message)
        self.run, self.grpc_address, self.http_url, self.secret = run, grpc_address, http_url, secret


class FullError(UnavailableError):
    """The file system is full."""


CheckNames = Callable[[Collection[str]], None]
"""Called with the names of all other runs before one is created. Raises ResourceExhaustedError for too many."""


def any_names(names: Collection[str]) -> None:
    """Accepts any number of runs."""


class Replay(NamedTuple):
    """A run's log: the pieces of a snapshot (None if there is none) and the records that were appended after it. Pieces
    are read one after the other: their iterator raises InvalidArgumentError if the snapshot is damaged.

    is_short: returns whether confirmed records are, or may be, missing at the end of the log. Call it after all records
    are read. generation: the run's generation at the last confirmed record; 0: unknown. The log may have lost it, too.
    """

    snapshot: Iterable[bytes] | None
    records: Iterable[bytes]
    is_short: Callable[[], bool] = lambda: False
    generation: int = 0


class LogEnd(NamedTuple):
    """The end of a log at one time. number: of its last record. nbytes: the bytes of the records that were read or
    appended since the log was opened."""

    number: int = 0
    nbytes: int = 0


# The bytes of records after which a snapshot is due: twice those of the last snapshot, so that snapshots are a third of
# what is written, within these limits. The upper one is a million records of one row each, which are replayed in 15 s.
_SHORT_TAIL, _LONG_TAIL = 16 << 20, 128 << 20


def is_long_tail(tail: int, snapshot: int) -> bool:
    """Returns whether a log of `tail` bytes after a snapshot of `snapshot` bytes should be replaced by a snapshot."""
    return tail > min(max(_SHORT_TAIL, 2 * snapshot), _LONG_TAIL)


class RunLog(Protocol):
    """One run's log and tables of rows.

    Methods may block, and are called from threads: `append`, `compact` and `flush` by one thread each, at the same
    time, `get`, `get_all` and `remove` by any thread. Properties, `check` and `note_generation` neither block nor lock,
    because the event loop uses them.

    Methods raise UnavailableError if the log cannot be written or read now, or was closed. After a failed `append`, the
    run is reopened from the log, which determines whether the operation happened.
    """

    config: bytes
    """The configuration with which the run was created, as JSON."""

    run_id: str
    """A unique id; another run of the same name has a different id."""

    reads_rows: bool
    """Whether `get` returns appended tables, so that they can be released from memory."""

    is_remote: bool
    """Whether `get` takes a round trip. If so, rows also stay in memory until their batch is published."""

    @property
    def is_lost(self) -> bool:
        """Whether the log must be opened again: another process may own it, or it could not be made durable."""

    @property
    def first_number(self) -> int:
        """The first number for new tables: no table ever had this or a larger number. Valid after `retain`."""

    def check(self, has_rows: bool = True, row_bytes: int = 0) -> None:
        """Raises UnavailableError if an append would fail now, for example because of too few replicas. has_rows:
        whether it contains rows, which are rejected first when the store is nearly full. row_bytes: the size of its
        tables and of those that are queued; 0: unknown."""

    def replay(self) -> Replay:
        """Reads the log. Called once, before any append. Raises InvalidArgumentError if the log is damaged, or of a
        newer format."""

    def note_generation(self, generation: int) -> None:
        """Records the run's generation, after it is in the log. For stores that record confirmations outside of it."""

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        """Appends a record and the tables that it refers to, by number, atomically. Returns when they are as durable as
        the settings require. Raises LogLostError if the outcome is unknown, or another process owns the log."""

    def sync(self) -> None:
        """Makes earlier appends durable. Called every second, also during a long `flush`."""

    def flush(self) -> None:
        """Makes earlier appends durable, and performs other deferred work. Called about once a second."""

    @property
    def log_bytes(self) -> int:
        """The approximate number of bytes that a replay reads: the snapshot and the records."""

    @property
    def lease(self) -> float | None:
        """Seconds until this process's ownership of the log expires without a renewal; None if it never expires."""

    @property
    def is_long(self) -> bool:
        """Whether `compact` would make a replay much faster."""

    @property
    def end(self) -> LogEnd:
        """The end of the log. Valid while no append is running."""

    def compact(self, end: LogEnd, snapshot: Iterable[bytes]) -> None:
        """Replaces the records up to `end` by the pieces of a snapshot of the state after them, while others are
        appended. After any error, the log has the records, or the snapshot; it is lost only after a LogLostError."""

    def get(self, number: int) -> Stored:
        """Returns a table. Raises NotFoundError if it was removed or lost. A damaged table is either lost, or returned:
        the caller knows the digests of its rows."""

    def get_all(self, numbers: Collection[int]) -> Mapping[int, Stored]:
        """Returns these tables by number, in few round trips if the store is remote. Raises like `get`."""

    def remove(self, numbers: Collection[int]) -> None:
        """Removes tables that no record needs any more. Called after the event that frees them is durable. Never
        raises: a table that cannot be removed now is removed when the log is opened again."""

    def retain(self, numbers: Collection[int]) -> set[int]:
        """Removes all other tables. Called once, after `replay`. Returns the missing ones among these tables. Reads no
        table as a whole, because that would delay the opening of the run."""

    def close(self) -> None:
        """Releases the run, so that any process can open it. A second call does nothing."""


class RunStore(Protocol):
    """A store of all runs. Thread-safe."""

    is_shared: bool
    """Whether other processes use the store, too: runs may appear, or change their owner, at any time."""

    def names(self) -> list[str]:
        """Returns the names of all runs, including those that `open` cannot open. Raises UnavailableError."""

    def create(self, name: str, config: bytes, check: CheckNames = any_names) -> RunLog:
        """Creates a run. Raises AlreadyExistsError if the name is in use, InvalidArgumentError for a configuration that
        cannot be stored exactly, and UnavailableError. After an error, the run does not exist.

        check: a shared store calls it such that no other process adds a run between the check and the addition. Other
            stores do not call it, because their process counts its runs itself.
        """

    def open(self, name: str) -> RunLog:
        """Opens a run. Raises NotFoundError if it does not exist, InvalidArgumentError if it is damaged or of a newer
        format, OwnedElsewhereError if another process owns it, and UnavailableError."""

    def delete(self, name: str) -> None:
        """Removes all data of a run. Raises UnavailableError."""

    def set_dormant(self, name: str, description: bytes) -> None:
        """Marks a run, until it is opened again, as one that is opened only for a call. The caller, which owns the run,
        closes its log. Raises UnavailableError."""

    def dormant(self) -> Collection[str]:
        """Returns the names of the marked runs. Raises UnavailableError."""

    def descriptions(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Returns the descriptions of the marked runs among these. Raises UnavailableError."""

    def unhealthy_reason(self) -> str:
        """Returns a readable reason why nothing can be stored now; empty if it can. Never raises."""

    def unreachable_reason(self) -> str:
        """Returns why runs cannot be looked up; empty if they can. Never raises."""

    def close(self) -> None: ...


def check_config(name: str, config: bytes) -> None:
    """Raises InvalidArgumentError for a configuration that would change when it is written and read."""
    try:
        # orjson rejects integers beyond 64 bits, and json reads them exactly.
        orjson.dumps(json.loads(config))
        orjson.loads(config)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"run {name!r}: the configuration cannot be stored as JSON: {error}; use finite numbers, and integers of "
            "at most 64 bits"
        ) from None
