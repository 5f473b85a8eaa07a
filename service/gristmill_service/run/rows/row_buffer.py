"""References to the rows that a run needs until their batch is freed, by the table that their request brought."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Extra, Steps
from gristmill_service.run.machine.events import COLUMNS, RowRef, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.storage.row_tables import Stored

_Name = tuple[int, int, int]
"""The fields of a `RowName` as a plain tuple: an equal key that is ten times cheaper to create."""


@dataclass(slots=True)
class _Table:
    """A table with rows that are still needed.

    stored: None if only the log has the table. rows: the number of its rows. places: maps each needed row's number in
    the request to its index in the table; None if all rows are needed and none has moved.
    """

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
    """A row of a batch, with the number of its table and its index in it.

    stored: the table; None if it has to be loaded from the log. parent: the row whose first tokens this row omits.
    tag: the tag of its group. A struct, because creating one takes a sixth of the time of a named tuple.
    """

    table: int
    stored: Stored | None
    at: int
    row: StoredRow
    parent: PickedRow | None = None
    tag: str = ""


def not_held(picked: Iterable[PickedRow]) -> set[int]:
    """Returns the tables that have to be loaded from the log for these rows and for their parents."""
    tables, seen = set[int](), set[int]()
    for row in picked:
        one: PickedRow | None = row
        # Many rows have the same parent.
        while one is not None and id(one) not in seen:
            seen.add(id(one))
            if one.stored is None:
                tables.add(one.table)
            one = one.parent
    return tables


class RowBuffer:
    """Stores tables of rows until the last needed row of each is released.

    needed: the number of needed rows. empty, sparse: the tables for `take_empty` and `take_sparse`.
    """

    def __init__(self) -> None:
        self.needed = 0
        self._tables: dict[int, _Table] = {}
        self.sparse: set[int] = set()
        self.empty: list[int] = []

    def __len__(self) -> int:
        """The number of rows in all tables. For tables in memory, it includes rows that are not needed."""
        return sum(len(table.live) if table.stored is None else table.rows for table in self._tables.values())

    def add(self, number: int, stored: Stored | None, size: int, rows: Collection[int]) -> None:
        """Adds a request's table of `size` rows, of which only `rows` are needed."""
        is_whole = len(rows) == size and COLUMNS not in rows
        places = None if is_whole else {row: row for row in rows}
        self.needed += len(rows) - (COLUMNS in rows)
        added = self._tables[number] = _Table(stored, size, places)
        if places is not None and added.is_sparse:
            self.sparse.add(number)

    def release(self, refs: Iterable[RowRef]) -> None:
        for ref in refs:
            table = self._tables[ref.table]
            table.places = table.live
            del table.places[ref.row]
            self.needed -= ref.row != COLUMNS
            if not table.places:
                self.drop(ref.table)
                self.empty.append(ref.table)
            elif table.is_sparse:
                self.sparse.add(ref.table)

    def drop(self, number: int) -> None:
        """Removes the table."""
        del self._tables[number]
        self.sparse.discard(number)

    def unload(self, numbers: Iterable[int]) -> None:
        """Drops these tables from memory; the log still has them."""
        for number in numbers:
            table = self._tables.get(number)
            if table is None or table.stored is None:
                continue
            table.stored, table.places = None, None if table.places is None else {row: row for row in table.places}
            self.sparse.discard(number)

    def pick(self, groups: Iterable[tuple[Group, Iterable[StoredRow]]]) -> list[PickedRow]:
        """Returns these rows of groups for `gather`, which any thread may call."""
        all_picked = []
        for group, rows in groups:
            picked: dict[_Name, PickedRow] = {}
            all_picked += [self._pick(group, row, picked) for row in rows]
        return all_picked

    def _pick(self, group: Group, row: StoredRow, picked: dict[_Name, PickedRow]) -> PickedRow:
        """Adds the row and its parents to the picked rows of the group. Returns the picked row."""
        name, path = (row.trajectory.sample, row.attempt, row.step), list[tuple[_Name, StoredRow]]()
        while (before := picked.get(name)) is None:
            path.append((name, row))
            if row.parent is None:
                break
            name = row.parent
            if name not in picked:
                row = group.find(row.parent)
        for name, one in reversed(path):
            before = picked[name] = self._picked(one, before, group.tag)
        assert before is not None, "the path has a row"
        return before

    def _picked(self, row: StoredRow, before: PickedRow | None, tag: str) -> PickedRow:
        number, at = row.ref
        table = self._tables[number]
        return PickedRow(number, table.stored, at if table.places is None else table.places[at], row, before, tag)

    def has(self, picked: Iterable[PickedRow]) -> bool:
        """Returns whether all these rows are still needed."""
        tables = ((self._tables.get(one.table), one.row.ref.row) for one in picked)
        return all(table is not None and (table.places is None or row in table.places) for table, row in tables)

    def table(self, number: int) -> Stored | None:
        """Returns the table; None if it has to be loaded from the log."""
        return self._tables[number].stored

    def take_empty(self) -> list[int]:
        """Returns the tables that became empty since the last call."""
        empty, self.empty = self.empty, []
        return empty

    def take_sparse(self) -> list[tuple[int, Stored, dict[int, int]]]:
        """Returns the tables in memory of which at most half the rows are needed: they use more memory than the run
        counts for them."""
        sparse, self.sparse = self.sparse, set()
        return [
            (number, table.stored, dict(table.live))
            for number in sparse
            if (table := self._tables.get(number)) and table.stored is not None
        ]

    def replace(self, number: int, before: Stored, after: Stored, index: dict[int, int]) -> None:
        """Replaces table `before` by `after`, unless it is gone already. index: the index of each row in `after`."""
        table = self._tables.get(number)
        if table is not None and table.stored is before:
            table.stored, table.rows = after, len(index)
            table.places = {row: index[row] for row in table.live}


def compacted(steps: Steps, live: dict[int, int]) -> tuple[Steps, dict[int, int]]:
    """Returns a copy of only these rows of the table, and the index of each row in the copy."""
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
