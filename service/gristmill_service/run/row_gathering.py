"""The rows of a batch as one table: of many tables that are held as bytes, and of tokens that rows share.

Tokens that rows share stand once: of rows of which each goes on with all of the one before it, the longest stands in
the table, and the others are its first tokens. What else begins as another row, such as the samples of a prompt, has a
copy of that beginning, for every row is one run of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from gristmill._wire.columns import Array, Int64s, Ragged, bytes_of
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine.events import RowRef, StoredRow
from gristmill_service.run.row_buffer import PickedRow
from gristmill_service.storage.row_tables import NUMBERS, OF_RESPONSES, Column, Stored, opened, steps_from

Load = Callable[[int], Stored]
"""Gives a table, by its number, that nobody holds."""

_ITEM = 4
"""Bytes of a token."""


def gather(picked: Sequence[PickedRow], token_rewards: bool, load: Load) -> Steps:
    """The rows as one table, in this order, with the rewards that came later and their groups' tags. Token data is
    copied once."""
    tables = _Tables(load)
    rows = [tables.row(one) for one in picked]
    numbers = _numbers(rows)
    numbers["rewards"] = np.array([one.row.reward for one in picked], np.float64)
    numbers["rewards_pending"] = np.zeros(len(picked), np.bool_)
    ragged = {"tokens": _tokens(picked, tables)} | _of_responses(rows, numbers)
    if token_rewards:
        ragged["token_rewards"] = _token_rewards(rows, [one.row for one in picked])
    strings = {"tags": [one.tag for one in picked], "stop_reasons": [row.stop_reason for row in rows]}
    given = {name: values for name, values in strings.items() if any(values)}
    uids = [one.row.trajectory.uid for one in picked]
    return steps_from(uids, given, numbers, ragged, _extras(rows))


def tokens_of(row: PickedRow, load: Load) -> list[Array]:
    """All tokens of a row, in pieces that stand in several tables; int32 each."""
    return [np.frombuffer(piece, np.int32) for piece in _pieces(row, row.row.tokens, _Tables(load))]


def columns_of(row: PickedRow, load: Load) -> frozenset[str]:
    """The declared columns that a row has."""
    found = _Tables(load).row(row)
    columns = (column for column in found.table.header.columns if column.counts is not None)
    return frozenset(column.name for column in columns if found.table.count(column, found.at) >= 0)


class _Table:
    """An opened table, whose rows are read one by one."""

    __slots__ = ("_ends", "_index", "_memory", "header", "rows")

    def __init__(self, stored: Stored) -> None:
        self.header, self._memory = opened(stored)
        self.rows = len(self.header.uids)
        self._index = {column.name: at for at, column in enumerate(self.header.columns)}
        self._ends: dict[str, list[int]] = {}

    def column(self, name: str) -> Column | None:
        at = self._index.get(name)
        return None if at is None else self.header.columns[at]

    def count(self, column: Column, at: int) -> int:
        """How many values the row at this place has; -1 where it has not got the column."""
        if column.counts is not None:
            return column.counts[at]
        responses = self.number("response_lengths", at, 0)
        if column.name != "tokens":
            return int(responses)
        return int(responses + self.number("prompt_lengths", at, 0) - self.number("prefix_lengths", at, 0))

    def number(self, name: str, at: int, default: float) -> float:
        values = self.header.numbers.get(name)
        return default if values is None else values[at]

    def memory(self, name: str, at: int) -> memoryview:
        """The bytes of a column that the row at this place has."""
        index = self._index[name]
        if self.rows == 1:
            return self._memory[index]
        if (ends := self._ends.get(name)) is None:
            column = self.header.columns[index]
            sizes = (column.element_bytes * max(0, self.count(column, row)) for row in range(self.rows))
            ends = self._ends[name] = [0, *accumulate(sizes)]
        return self._memory[index][ends[at] : ends[at + 1]]


class _Row:
    """A row's place in an opened table."""

    __slots__ = ("at", "table")

    def __init__(self, table: _Table, at: int) -> None:
        self.table, self.at = table, at

    @property
    def stop_reason(self) -> str:
        reasons = self.table.header.strings.get("stop_reasons")
        return reasons[self.at] if reasons else ""

    def memory(self, name: str) -> memoryview | None:
        """The row's bytes of this column, None where its table has not got it."""
        return None if self.table.column(name) is None else self.table.memory(name, self.at)


class _Tables:
    """Opens each table once."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tables: dict[int, _Table] = {}

    def row(self, picked: PickedRow) -> _Row:
        table = self._tables.get(picked.table)
        if table is None:
            stored = self._load(picked.table) if picked.stored is None else picked.stored
            table = self._tables[picked.table] = _Table(stored)
        return _Row(table, picked.at)

    def own_tokens(self, picked: PickedRow) -> memoryview:
        """Those of the row's tokens that its table has."""
        row = self.row(picked)
        return row.table.memory("tokens", row.at)


def _pieces(row: PickedRow, count: int, tables: _Tables) -> list[memoryview]:
    """The first `count` tokens of a row, as they stand in its table and in those of the rows with which it begins."""
    found: list[memoryview] = []
    one: PickedRow | None = row
    while one is not None and count:
        own = tables.own_tokens(one)
        prefix = one.row.tokens - len(own) // _ITEM
        if count > prefix:
            found.append(own[: _ITEM * (count - prefix)])
            count = prefix
        one = one.parent
    return found[::-1]


def _tokens(picked: Sequence[PickedRow], tables: _Tables) -> Ragged:
    """All rows' tokens, those in which one goes on with another once."""
    sizes: list[int] = []
    line_of, begins_line = list[int](), list[bool]()
    # The last row of each line so far.
    ends: dict[RowRef, int] = {}
    own = [tables.own_tokens(one) for one in picked]
    for one, memory in zip(picked, own, strict=True):
        line = None
        if one.parent is not None and one.row.tokens - len(memory) // _ITEM == one.parent.row.tokens:
            line = ends.pop(one.parent.row.ref, None)
        begins_line.append(line is None)
        if line is None:
            line = len(sizes)
            sizes.append(0)
        sizes[line] = one.row.tokens
        ends[one.row.ref] = line
        line_of.append(line)
    begins = [0, *accumulate(sizes)]
    values = np.empty(begins[-1], np.int32)
    if len(values):
        data = bytes_of(values)
        for one, memory, line, is_first in zip(picked, own, line_of, begins_line, strict=True):
            at = _ITEM * begins[line]
            for piece in _pieces(one, one.row.tokens, tables) if is_first else ():
                data[at : at + len(piece)] = piece
                at += len(piece)
            if not is_first:
                end = _ITEM * (begins[line] + one.row.tokens)
                data[end - len(memory) : end] = memory
    starts = np.array([begins[line] for line in line_of], np.int64)
    return Ragged(values, starts, np.array([one.row.tokens for one in picked], np.int64))


def _numbers(rows: Sequence[_Row]) -> dict[str, Array]:
    names = dict.fromkeys(name for row in rows for name in row.table.header.numbers)
    found: dict[str, Array] = {}
    for name, (dtype, default) in NUMBERS.items():
        if name in names:
            found[name] = np.array([row.table.number(name, row.at, default) for row in rows], dtype)
        else:
            found[name] = np.full(len(rows), default, dtype)
    if "advantages" in names:
        found["advantages"] = np.array([row.table.header.numbers["advantages"][row.at] for row in rows], np.float64)
    return found


def _of_responses(rows: Sequence[_Row], numbers: dict[str, Array]) -> dict[str, Ragged]:
    """The columns with a value a response token, but rewards."""
    lengths = numbers["response_lengths"]
    found: dict[str, Ragged] = {}
    for name in OF_RESPONSES:
        some = next((column for row in rows if (column := row.table.column(name)) is not None), None)
        if some is None or name == "token_rewards":
            continue
        own = [row.memory(name) for row in rows]
        memory = [_stand_in(name, numbers, at) if one is None else one for at, one in enumerate(own)]
        found[name] = Ragged.from_lengths(some.values(b"".join(memory)), lengths)
    return found


def _stand_in(name: str, numbers: dict[str, Array], row: int) -> bytes:
    """The bytes of a row whose table has not got the column while others have."""
    length = int(numbers["response_lengths"][row])
    if name == "loss_mask":
        return b"\1" * length
    if name == "token_versions":
        return np.full(length, numbers["policy_versions"][row], np.int32).tobytes()
    raise InvalidArgumentError(f"some rows have {name} and others do not; all rows of a run have them, or none has")


def _token_rewards(rows: Sequence[_Row], stored: Sequence[StoredRow]) -> Ragged:
    values: list[Array] = []
    for row, one in zip(rows, stored, strict=True):
        if one.late_rewards:
            values.append(np.frombuffer(one.late_rewards, np.float64))
        else:
            column = row.table.column("token_rewards")
            assert column is not None, "a row without a later reward brought its own"
            values.append(column.values(row.table.memory("token_rewards", row.at)))
    return Ragged.from_arrays(values, np.float64)


def _extras(rows: Sequence[_Row]) -> dict[str, Extra]:
    """The declared columns that any of the rows' tables has."""
    columns = {column.name: column for row in rows for column in row.table.header.columns if column.counts is not None}
    found: dict[str, Extra] = {}
    for name, some in columns.items():
        own = [row.table.column(name) for row in rows]
        counts: Int64s = np.array(
            [-1 if column is None else row.table.count(column, row.at) for row, column in zip(rows, own, strict=True)],
            np.int64,
        )
        values = some.values(b"".join(row.memory(name) or b"" for row in rows))
        found[name] = Extra(Ragged.from_lengths(values, np.maximum(counts, 0)), counts >= 0)
    return found
