"""Reads a run's tables of rows from its log.

A table from before the run was opened is checked when it is read for the first time: its rows must have the digests
that the state has of them. Checking all tables when the run is opened would delay the opening, and tables that this
process wrote need no check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from gristmill.errors import GristmillError, NotFoundError
from gristmill_service.run.machine.described_rows import NONE, row_digests
from gristmill_service.run.machine.events import COLUMNS
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State
from gristmill_service.storage.row_tables import Stored, decode
from gristmill_service.storage.run_store import RunLog

_log = structlog.get_logger(__name__)

CHECKED_AT_ONCE = 8
"""The number of tables that a check reads at once. A table has the size of a request."""

Digests = Mapping[int, bytes]
"""The digest of each needed row of a table, by its index; of a table of a written column, that of `COLUMNS`."""


class CheckedTables:
    """The tables of a run's log. `lost`, `get` and `get_all` block; any thread may call them, several at a time.

    unchecked: the digests of the needed rows of each table that was not read since the run was opened. repeated: as in
    `row_digests`.
    """

    def __init__(self, log: RunLog, unchecked: Mapping[int, Digests], repeated: Mapping[str, bool] = NONE) -> None:
        self._log, self._repeated = log, repeated
        self._unchecked = dict(unchecked)

    def unchecked(self, groups: Iterable[Group]) -> list[int]:
        """Returns the tables of these groups that were not checked yet."""
        if not self._unchecked:
            return []
        return [*{ref.table: None for group in groups for ref in group.refs() if ref.table in self._unchecked}]

    def get(self, number: int) -> Stored:
        """Returns a table. Raises NotFoundError if it is missing or damaged, and UnavailableError."""
        return self._checked(number, self._log.get(number))

    def get_all(self, numbers: Collection[int]) -> dict[int, Stored]:
        """Returns these tables by number, in few round trips. Raises like `get`."""
        return {number: self._checked(number, stored) for number, stored in self._log.get_all(numbers).items()}

    def lost(self, numbers: Sequence[int]) -> set[int]:
        """Reads those of these tables that were not checked yet. Returns those that are missing or damaged. Raises
        UnavailableError."""
        lost = set[int]()
        for first in range(0, len(numbers), CHECKED_AT_ONCE):
            some = [number for number in numbers[first : first + CHECKED_AT_ONCE] if number in self._unchecked]
            try:
                self.get_all(some)
            except NotFoundError:
                lost.update(filter(self._is_lost, some))
        if lost:
            _log.error("tables of rows lost", run_id=self._log.run_id, tables=len(lost), first=min(lost))
        return lost

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops the digests of tables that are removed."""
        for number in numbers:
            self._unchecked.pop(number, None)

    def _is_lost(self, number: int) -> bool:
        try:
            self.get(number)
        except NotFoundError:
            return True
        return False

    def _checked(self, number: int, stored: Stored) -> Stored:
        digests = self._unchecked.get(number)
        if digests is not None:
            if not _is_whole(stored, digests, self._repeated):
                raise NotFoundError(f"table {number} of rows is damaged; restore it")
            self.forget([number])
        return stored


def needed_rows(state: State) -> dict[int, dict[int, bytes]]:
    """Returns the digests of the rows that a state refers to, by table."""
    tables: dict[int, dict[int, bytes]] = {}
    for group in (*state.open.values(), *(group for batch in state.batches.values() for group in batch.groups)):
        for row in group.stored_rows():
            tables.setdefault(row.ref.table, {})[row.ref.row] = row.check or row.digest
    for batch in state.batches.values():
        tables |= {column.table: {COLUMNS: column.check} for column in batch.written.values()}
    return tables


def _is_whole(stored: Stored, digests: Digests, repeated: Mapping[str, bool]) -> bool:
    """Returns whether the table contains the rows that were accepted, unchanged."""
    try:
        steps = decode(stored) if isinstance(stored, bytes | memoryview) else stored
        actual = row_digests(steps, repeated) if len(steps) > max(digests) else []
    except (GristmillError, ValueError, IndexError, UnicodeError):
        return False
    return bool(actual) and all(actual[row] == digest for row, digest in digests.items())
