"""Where runs are stored beside their shards: configurations, logs of events, and tables of rows.

A run store has a log for each run. It does not know what events mean: it stores records in order, and tables by number.
Implementations pass the same tests.
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
    """What was appended and what the log holds may differ: it has to be closed, and opened and replayed anew."""


class OwnedElsewhereError(UnavailableError):
    """Another process decides for the run: it can be asked there. secret: what it wants to be shown then."""

    def __init__(
        self, message: str, run: str = "", grpc_address: str = "", http_url: str = "", secret: str = ""
    ) -> None:
        super().__init__(message)
        self.run, self.grpc_address, self.http_url, self.secret = run, grpc_address, http_url, secret


class FullError(UnavailableError):
    """The file system has no room."""


CheckTable = Callable[[int, Steps], bool]
"""Takes a table's number and the table; returns whether it is what it was when it was put."""


class Replay(NamedTuple):
    """A run's log: a snapshot, None where none was made, and the records that were appended after it.

    is_short: whether the log is found shorter than what was promised, or may be; known when all records were read.
    generation: the one in which the run was when that was promised; 0: not known. The log may have lost that, too.
    """

    snapshot: bytes | None
    records: Iterable[bytes]
    is_short: Callable[[], bool] = lambda: False
    generation: int = 0


class RunLog(Protocol):
    """One run's log and tables of rows.

    Every method may block, and is called from a thread: `append` and `compact` by one thread at a time, `flush` by
    another one beside them, `get`, `get_all` and `remove` by any. Properties, `check` and `note_generation` neither
    block nor lock, so that the event loop uses them.

    Methods raise UnavailableError where the log cannot be written or read for now, or was closed. After an `append` or
    `compact` that failed, the run is opened again from the log: what it holds then is what happened.
    """

    config: bytes
    """The configuration that the run was created with, as JSON."""

    run_id: str
    """Made when the run was created; another run of the same name has another one."""

    reads_rows: bool
    """Whether `get` returns a table that was appended, so that no memory needs to hold it."""

    is_remote: bool
    """Whether `get` takes a round trip: then rows are held in memory, too, until their batch is published."""

    @property
    def is_lost(self) -> bool:
        """Whether the log may be another process's by now, or could not be made safe: it has to be opened again."""

    @property
    def first_number(self) -> int:
        """The least number that no table ever had; known when `retain` has returned. The run numbers its tables from
        there."""

    def check(self, has_rows: bool = True) -> None:
        """Raises UnavailableError where an append would be refused now, as with too few replicas. has_rows: whether it
        has rows, too, which a full disk refuses first."""

    def replay(self) -> Replay:
        """Reads the log; called once, before anything is appended. Raises InvalidArgumentError where it is damaged, or
        of a newer format."""

    def note_generation(self, generation: int) -> None:
        """Notes the run's generation, once the log has it, where it is known outside of the log what was promised."""

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        """Appends a record and the tables that it refers to, by their numbers: all of it or nothing. Returns when it is
        as safe as the settings ask. Raises LogLostError where the outcome is not known, or where the log belongs to
        another process by now."""

    def flush(self) -> None:
        """Makes safe what `append` left for later; called about once a second."""

    @property
    def log_bytes(self) -> int:
        """About the bytes that a replay reads: the snapshot and the records."""

    @property
    def lease(self) -> float | None:
        """Seconds for which the log is still this process's unless that is renewed; None where it always is."""

    @property
    def is_long(self) -> bool:
        """Whether a replay takes much longer than it would after `compact`."""

    def compact(self, snapshot: bytes) -> None:
        """Replaces all records so far by a snapshot of the state that they make."""

    def get(self, number: int) -> Stored:
        """Raises NotFoundError for a table that was removed or lost."""

    def get_all(self, numbers: Collection[int]) -> Mapping[int, Stored]:
        """Returns these tables by their numbers, in few round trips where the store is remote. Raises as `get`."""

    def remove(self, numbers: Collection[int]) -> None:
        """Removes tables that no record needs any more; called when the record that says so is safe. Never raises: one
        that cannot be removed now is removed when the log is opened again."""

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        """Removes all tables but these; called once, after `replay`. Returns those of these that are lost, or that fail
        the check."""

    def close(self) -> None:
        """Gives the run back, so that it can be opened again, here or elsewhere. A second call does nothing."""


class RunStore(Protocol):
    """Thread-safe."""

    is_shared: bool
    """Whether other processes use it, too: a run may appear, or become this process's, at any time."""

    def names(self) -> list[str]:
        """The names of all runs, also of those that `open` refuses. Raises UnavailableError."""

    def create(self, name: str, config: bytes) -> RunLog:
        """Raises AlreadyExistsError where there is such a run, InvalidArgumentError for a configuration that could not
        be read again, and UnavailableError. On an error there is no such run."""

    def open(self, name: str) -> RunLog:
        """Raises NotFoundError where there is no such run, InvalidArgumentError where it is damaged or of a newer
        format, OwnedElsewhereError where another process has it, and UnavailableError."""

    def delete(self, name: str) -> None:
        """Removes all that is stored of a run. Raises UnavailableError."""

    def unhealthy_reason(self) -> str:
        """Why nothing can be stored at the moment, for a person; empty when all is well. Never raises."""

    def unreachable_reason(self) -> str:
        """Why no run can even be looked for; empty when runs can be. Never raises."""

    def close(self) -> None: ...


def check_config(name: str, config: bytes) -> None:
    """Raises InvalidArgumentError for a configuration that could not be read again."""
    try:
        # The one refuses integers beyond 64 bits, which the other would read as something else.
        orjson.dumps(json.loads(config))
        orjson.loads(config)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(
            f"run {name!r}: its configuration cannot be stored as JSON: {error}; integers have at most 64 bits, and "
            "numbers are finite"
        ) from None
