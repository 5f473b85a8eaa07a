"""What lasts of runs beside their shards: configurations, logs of events, and rows.

A ledger has a book for each run. A book knows nothing of what its events mean; it keeps records in order and row tables
by number. Implementations pass the same test class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from gristmill._wire.steps import Steps
from gristmill.errors import UnavailableError

CheckTable = Callable[[int, Steps], bool]
"""Whether a table, given with its number, is what it was when it was put."""


class LogLostError(UnavailableError):
    """What was told to the book and what it holds may differ: it has to be closed, and opened and replayed anew."""


class OwnedElsewhereError(UnavailableError):
    """Another process decides for the run: it can be asked there."""

    def __init__(self, message: str, run: str = "", grpc_address: str = "", http_url: str = "") -> None:
        super().__init__(message)
        self.run, self.grpc_address, self.http_url = run, grpc_address, http_url


class Replay(NamedTuple):
    """What a run's log holds: a snapshot, None where none was made, and the records that were appended after it.

    is_short: whether the log is found shorter than what was promised, or may be; known when all records were read.
    """

    snapshot: bytes | None
    records: Iterable[bytes]
    is_short: Callable[[], bool] = lambda: False


class RunLog(Protocol):
    """One run's. `append` and `compact` are called by one thread at a time; the others by any.

    All raise UnavailableError where the book cannot be written or read for now; the call had no effect then.
    """

    config: bytes
    """As it was given when the run was created."""

    run_id: str
    """Made when the run was created; another run of the same name has another one."""

    maps_rows: bool
    """Whether tables are views of the book's own memory, so that nobody else needs to compact them."""

    reads_rows: bool
    """Whether `get` finds a table again, so that nobody else needs to hold it."""

    @property
    def is_lost(self) -> bool:
        """Whether the book may be somebody else's by now, so that it has to be opened anew."""

    def replay(self) -> Replay:
        """To be read once, before anything is appended."""

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        """Appends a record, which refers to these tables that were put since the last one: with it they are kept.

        Raises LogLostError where the outcome is not known, or where the log is somebody else's by now.
        """

    def sync(self) -> None:
        """Returns when all that was appended and put is as safe as the book is told to make it."""

    def flush(self) -> None:
        """Makes safe what `sync` left for later: called about once a second."""

    @property
    def log_bytes(self) -> int:
        """What replaying reads of records and the snapshot, about."""

    @property
    def lease(self) -> float | None:
        """Seconds for which the book is still ours unless that is renewed; None where it always is."""

    @property
    def is_long(self) -> bool:
        """Whether replaying takes much longer than it would after `compact`."""

    def compact(self, snapshot: bytes) -> None:
        """Replaces all records so far by a snapshot of what they make."""

    def put(self, table: Steps) -> tuple[int, Steps]:
        """Keeps a table of rows, at the latest with the append that refers to it. Returns its number, never used
        before, and the table as it is kept."""

    def get(self, number: int) -> Steps:
        """Raises NotFoundError for a table that was removed or lost."""

    def remove(self, numbers: Collection[int]) -> None:
        """What cannot be removed now is removed when the book is opened again. Never raises."""

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        """After a replay: removes all tables but these. Returns those that are lost, or not what they were."""

    def close(self) -> None:
        """Gives the book back, so that it can be opened again, here or elsewhere."""


class RunStore(Protocol):
    """Thread-safe."""

    is_shared: bool
    """Whether other processes use it, too: a run may appear, or become ours, at any time."""

    def names(self) -> list[str]:
        """Of all runs that there are."""

    def create(self, name: str, config: bytes) -> RunLog:
        """Raises AlreadyExistsError where there is such a run."""

    def open(self, name: str) -> RunLog:
        """Raises NotFoundError where there is no such run, InvalidArgumentError for a newer format, and
        OwnedElsewhereError where another process has it."""

    def delete(self, name: str) -> None:
        """Removes all that is kept of a run, whose book nobody uses any more."""

    def unhealthy_reason(self) -> str:
        """Why nothing can be kept at the moment, for a person; empty when all is well."""

    def unreachable_reason(self) -> str:
        """Why nobody's runs can even be asked for; empty when they can."""

    def close(self) -> None: ...
