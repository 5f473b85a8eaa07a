"""The contract of run stores, which store configurations, logs of events and tables of rows; shards have their own.

A run store has a log for each run. It does not interpret events: it stores records in order, and tables by number.
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
    """The log may differ from what was appended: it has to be closed, opened again and replayed."""


class OwnedElsewhereError(UnavailableError):
    """Another process owns the run. secret: to present there, with calls that are passed on."""

    def __init__(
        self, message: str, run: str = "", grpc_address: str = "", http_url: str = "", secret: str = ""
    ) -> None:
        super().__init__(message)
        self.run, self.grpc_address, self.http_url, self.secret = run, grpc_address, http_url, secret


class FullError(UnavailableError):
    """The file system is full."""


CheckTable = Callable[[int, Steps], bool]
"""Takes a table's number and the table; returns whether it is as it was appended."""


class Replay(NamedTuple):
    """A run's log: a snapshot, None if none was made, and the records that were appended after it.

    is_short: returns whether the log is, or may be, shorter than was confirmed; known when all records were read.
    generation: the run's when that was confirmed; 0: not known. The log may have lost that, too.
    """

    snapshot: bytes | None
    records: Iterable[bytes]
    is_short: Callable[[], bool] = lambda: False
    generation: int = 0


class RunLog(Protocol):
    """One run's log and tables of rows.

    Every method may block, and is called from a thread: `append` and `compact` by one thread at a time, `flush` by
    another one at the same time, `get`, `get_all` and `remove` by any. Properties, `check` and `note_generation`
    neither
    block nor lock: the event loop uses them.

    Methods raise UnavailableError if the log cannot be written or read for now, or was closed. After a failed `append`
    or `compact`, the run is opened again from the log, which then decides what happened.
    """

    config: bytes
    """The configuration that the run was created with, as JSON."""

    run_id: str
    """Unique: another run of the same name has another one."""

    reads_rows: bool
    """Whether `get` returns appended tables, so that they need not stay in memory."""

    is_remote: bool
    """Whether `get` takes a round trip: then rows stay in memory, too, until their batch is published."""

    @property
    def is_lost(self) -> bool:
        """Whether another process may own the log by now, or it could not be made durable: it has to be opened
        again."""

    @property
    def first_number(self) -> int:
        """The number from which the run numbers its tables: no table ever had it or a larger one. Known when `retain`
        has returned."""

    def check(self, has_rows: bool = True) -> None:
        """Raises UnavailableError if an append would be refused now, as with too few replicas. has_rows: whether it has
        rows, which a full disk refuses first."""

    def replay(self) -> Replay:
        """Reads the log; called once, before anything is appended. Raises InvalidArgumentError if it is damaged, or of
        a newer format."""

    def note_generation(self, generation: int) -> None:
        """Notes the run's generation, once the log has it, in stores that record outside of the log what was
        confirmed."""

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        """Appends a record and the tables that it refers to, by their numbers, atomically. Returns when they are as
        durable as the settings ask. Raises LogLostError if the outcome is not known, or another process owns the log by
        now."""

    def sync(self) -> None:
        """Makes appends durable that `append` left for later; called each second, also while `flush` takes long."""

    def flush(self) -> None:
        """Does what `sync` does, and what else `append` left for later; called about once a second."""

    @property
    def log_bytes(self) -> int:
        """Approximately the bytes that a replay reads: the snapshot and the records."""

    @property
    def lease(self) -> float | None:
        """Seconds for which this process still owns the log without renewal; None if it always does."""

    @property
    def is_long(self) -> bool:
        """Whether a replay takes much longer than it would after `compact`."""

    def compact(self, snapshot: bytes) -> None:
        """Replaces all records so far by a snapshot of the resulting state."""

    def get(self, number: int) -> Stored:
        """Returns a table. Raises NotFoundError for one that was removed or lost."""

    def get_all(self, numbers: Collection[int]) -> Mapping[int, Stored]:
        """Returns these tables by their numbers, in few round trips if the store is remote. Raises as `get`."""

    def remove(self, numbers: Collection[int]) -> None:
        """Removes tables that no record needs any more; called when the record that says so is durable. Never raises: a
        table that cannot be removed now is removed when the log is opened again."""

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        """Removes all tables except these; called once, after `replay`. Returns which of these are lost or fail the
        check."""

    def close(self) -> None:
        """Releases the run, so that it can be opened again, here or elsewhere. A second call does nothing."""


class RunStore(Protocol):
    """A store of all runs. Thread-safe."""

    is_shared: bool
    """Whether other processes use it, too: a run may appear, or this process may come to own it, at any time."""

    def names(self) -> list[str]:
        """Returns the names of all runs, also of runs that `open` refuses. Raises UnavailableError."""

    def create(self, name: str, config: bytes) -> RunLog:
        """Creates a run. Raises AlreadyExistsError if the name is taken, InvalidArgumentError for a configuration that
        could not be read again, and UnavailableError. After an error there is no such run."""

    def open(self, name: str) -> RunLog:
        """Opens a run. Raises NotFoundError if there is none, InvalidArgumentError if it is damaged or of a newer
        format, OwnedElsewhereError if another process owns it, and UnavailableError."""

    def delete(self, name: str) -> None:
        """Removes all that is stored of a run. Raises UnavailableError."""

    def unhealthy_reason(self) -> str:
        """Returns why nothing can be stored at the moment, for people; empty when it can. Never raises."""

    def unreachable_reason(self) -> str:
        """Returns why runs cannot even be looked up; empty when they can. Never raises."""

    def close(self) -> None: ...


def check_config(name: str, config: bytes) -> None:
    """Raises InvalidArgumentError for a configuration that would differ after it is written and read again."""
    try:
        # The first refuses integers beyond 64 bits, which the second would read as something else.
        orjson.dumps(json.loads(config))
        orjson.loads(config)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"run {name!r}: its configuration cannot be stored as JSON: {error}; integers have at most 64 bits, and "
            "numbers are finite"
        ) from None
