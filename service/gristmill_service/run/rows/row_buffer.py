"""The rows that a run holds until their batch is freed: the requests' tables, kept while a row is needed.

Guarded by the run's lock, but for the functions, which read what cannot change: work per token needs no lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Extra, Steps
from gristmill_service.run.machine.events import COLUMNS, RowName, RowRef, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.storage.row_tables import Stored

_Name = tuple[int, int, int]
"""What a `RowName` has. As a key it is as good, and made in a tenth of the time."""


@dataclass(slots=True)
class _Table:
    """stored: None where the log alone has them. rows: how many it has. places: where each row that is needed is in it,
    by its number in the request; None where all are needed, and where they were."""

    stored: Stored | None
    rows: int
    places: dict[int, int] | None

    @property
    def live(self) -> dict[int, int]:
        return {row: row for row in range(self.rows)} if self.places is None else self.places

    @property
    def is_sparse(self) -> bool:
        return self.stored is not None and self.places is not None and 2 * len(self.places) <= self.rows


class PickedRow(msgspec.Struct):
    """A row, the table that it is in, and its place there. stored: None where the log has to be asked. parent: the row
    with whose tokens it begins, where the table lacks them. tag: of its group.

    A struct, which takes a sixth of the time to make that a named tuple does: there is one for each row of a batch."""

    table: int
    stored: Stored | None
    at: int
    row: StoredRow
    parent: PickedRow | None = None
    tag: str = ""


def not_held(picked: Iterable[PickedRow]) -> set[int]:
    """The tables that the log has to be asked for, of these rows and those with which they begin."""
    found, seen = set[int](), set[int]()
    for row in picked:
        one: PickedRow | None = row
        # Rows share those that they begin with.
        while one is not None and id(one) not in seen:
            seen.add(id(one))
            if one.stored is None:
                found.add(one.table)
            one = one.parent
    return found


class RowBuffer:
    """Rows by reference. A table goes when the last of its rows is released; one that only the heap holds shrinks
    before that. compacts: whether they do. needed: how many rows are needed."""

    def __init__(self, compacts: bool) -> None:
        self.needed = 0
        self._tables: dict[int, _Table] = {}
        self._compacts = compacts
        self._sparse: set[int] = set()
        self._empty: list[int] = []

    def __len__(self) -> int:
        """Rows of all tables that are held, needed or not."""
        return sum(len(table.live) if table.stored is None else table.rows for table in self._tables.values())

    def add(self, number: int, stored: Stored | None, size: int, rows: Collection[int]) -> None:
        """Keeps a request's table of so many rows, of which these are referenced."""
        is_whole = len(rows) == size and COLUMNS not in rows
        places = None if is_whole else {row: row for row in rows}
        self.needed += len(rows) - (COLUMNS in rows)
        added = self._tables[number] = _Table(stored, size, places)
        if added.is_sparse:
            self._sparse.add(number)

    def release(self, refs: Iterable[RowRef]) -> None:
        for ref in refs:
            table = self._tables[ref.table]
            table.places = table.live
            del table.places[ref.row]
            self.needed -= ref.row != COLUMNS
            if not table.places:
                self.drop(ref.table)
                self._empty.append(ref.table)
            elif table.is_sparse:
                self._sparse.add(ref.table)

    def drop(self, number: int) -> None:
        """Holds the table no more."""
        del self._tables[number]
        self._sparse.discard(number)

    def unload(self, numbers: Iterable[int]) -> None:
        """Leaves these tables to the log, as far as they are held."""
        for number in numbers:
            table = self._tables.get(number)
            if table is None or table.stored is None:
                continue
            table.stored, table.places = None, None if table.places is None else {row: row for row in table.places}
            self._sparse.discard(number)

    def pick(self, groups: Iterable[tuple[Group, Iterable[StoredRow]]]) -> list[PickedRow]:
        """What `gather` needs of these rows of groups, to be read after the lock is given back."""
        found = []
        for group, rows in groups:
            picked: dict[_Name, PickedRow] = {}
            found += [self._pick(group, row, picked) for row in rows]
        return found

    def _pick(self, group: Group, row: StoredRow, picked: dict[_Name, PickedRow]) -> PickedRow:
        """picked: those of the group so far; the row and those with which it begins are added."""
        name, parent = (row.trajectory.sample, row.attempt, row.step), row.parent
        if (found := picked.get(name)) is None:
            before = None if parent is None else picked.get(parent)
            if parent is None or before is not None:
                found = picked[name] = self._picked(row, before, group.tag)
            else:
                found = self._pick_path(group, row, picked)
        return found

    def _pick_path(self, group: Group, row: StoredRow, picked: dict[_Name, PickedRow]) -> PickedRow:
        """A row of which others come first, none of which is picked yet, or not all."""
        name, path = row.name, list[tuple[RowName, StoredRow]]()
        while (found := picked.get(name)) is None:
            one = group.find(name) if path else row
            path.append((name, one))
            if one.parent is None:
                break
            name = one.parent
        for name, one in reversed(path):
            found = picked[name] = self._picked(one, found, group.tag)
        assert found is not None, "the path has a row"
        return found

    def _picked(self, row: StoredRow, before: PickedRow | None, tag: str) -> PickedRow:
        number, at = row.ref
        table = self._tables[number]
        return PickedRow(number, table.stored, at if table.places is None else table.places[at], row, before, tag)

    def table(self, number: int) -> Stored | None:
        """A table that is held; None where the log has to be asked."""
        return self._tables[number].stored

    def take_empty(self) -> list[int]:
        """Tables that are needed no more since this was last asked."""
        empty, self._empty = self._empty, []
        return empty

    def take_sparse(self) -> list[tuple[int, Stored, dict[int, int]]]:
        """Tables at most half of which is needed, so that they hold more memory than is accounted for."""
        if not self._compacts:
            return []
        sparse, self._sparse = self._sparse, set()
        return [
            (number, table.stored, dict(table.live))
            for number in sparse
            if (table := self._tables.get(number)) and table.stored is not None
        ]

    def replace(self, number: int, before: Stored, after: Stored, index: dict[int, int]) -> None:
        """Holds `after` in place of `before`, unless that is gone meanwhile. index: where each row is in it."""
        table = self._tables.get(number)
        if table is not None and table.stored is before:
            table.stored, table.rows = after, len(index)
            table.places = {row: index[row] for row in table.live}


def compacted(steps: Steps, live: dict[int, int]) -> tuple[Steps, dict[int, int]]:
    """A copy of these rows of the table alone, and where each of them is in it."""
    table = steps.take(np.fromiter(live.values(), np.int64, len(live)))
    copies: dict[str, Any] = {
        field.name: _copied(column)
        for field in fields(table)
        if isinstance(column := getattr(table, field.name), Ragged)
    }
    copies["extras"] = {name: Extra(_copied(extra.values), extra.given) for name, extra in table.extras.items()}
    return replace(table, **copies), {row: index for index, row in enumerate(live)}


def _copied(column: Ragged) -> Ragged:
    return Ragged.from_arrays(column.arrays(), column.values.dtype)
