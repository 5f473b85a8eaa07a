"""Gathers the rows of a batch from their stored tables into one table.

Steps that omit the tokens of the step before share memory with it in the result: where each step extends the whole step
before, the result stores only the longest one, and the others are views of its first tokens. A row that shares only a
part of another gets a copy of that part, because each row is contiguous.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import add, mul, sub
from typing import Any, NamedTuple

import numpy as np

from gristmill._wire.columns import Array, Int64s, Ragged
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine.events import RowRef, StoredRow
from gristmill_service.run.rows.row_buffer import PickedRow
from gristmill_service.storage.row_tables import (
    NUMBERS,
    OF_RESPONSES,
    OF_SOME,
    PLAIN,
    Column,
    Header,
    Opened,
    OpenedRow,
    Stored,
    opened,
    steps_from,
)

Load = Callable[[int], Stored]
"""Loads a table by its number."""

_ITEM = 4
"""Bytes of a token."""

# Larger columns get a mapping of their own, whose pages are allocated when written and freed with the last view.
_LEAST_BYTES = 256 << 10
# Tables are released in at most this many parts, each of at least this size.
_PART_BYTES, _MOST_PARTS = 16 << 20, 5


def gather(
    picked: Sequence[PickedRow], token_rewards: bool, load: Load, on_copied: Callable[[], None] | None = None
) -> Steps:
    """Returns the rows as one table, in this order, with their late rewards and their groups' tags.

    Token data is copied once. on_copied: called after each part of a large batch is copied; from then on, `gather`
    refers to none of that part's tables and does not read `picked`. Raises InvalidArgumentError if tables contradict
    the state's description of their rows.
    """
    tables, stored = Tables(load), [one.row for one in picked]
    rows = [tables.row(one) for one in picked]
    numbers, parts = _numbers(stored), [len(rows)] if on_copied is None else _parts(rows, stored)
    # Most rows have the same columns.
    copying, kinds = _Copying(), [*{id(row.columns): row.columns for row in rows}.values()]
    ragged = {"tokens": _tokens(picked, rows, tables, copying)} | _of_responses(rows, kinds, numbers, copying)
    if token_rewards:
        ragged["token_rewards"] = _token_rewards(rows, stored)
    stored_strings = {name for row in {id(row.strings): row for row in rows}.values() for name in row.strings}
    strings = {name: [row.text(name) for row in rows] for name in stored_strings}
    # A group's tag may have come with another row.
    strings["tags"] = [one.tag for one in picked]
    columns_of_text = {name: values for name, values in strings.items() if any(values)}
    uids = [one.trajectory.uid for one in stored]
    extras = _extras(rows, kinds, copying)
    del tables, rows
    for end in parts:
        copying.go_on(end)
        if on_copied is not None and len(parts) > 1:
            on_copied()
    return steps_from(uids, columns_of_text, numbers, ragged, extras)


def tokens_of(row: PickedRow, count: int, tables: Tables) -> list[memoryview]:
    """Returns the first `count` int32 tokens of a row, or all if it has fewer, as pieces of several tables."""
    return [piece.cast("i") for piece in _pieces(row, min(count, row.row.tokens), tables)]


def columns_of(row: PickedRow, tables: Tables) -> frozenset[str]:
    """Returns the declared columns that a row has."""
    opened = tables.row(row)
    return frozenset(name for name, column in opened.columns.items() if column.counts and column.counts[opened.at] >= 0)


class _Table:
    """A table of several rows, which are opened one by one."""

    def __init__(self, table: Opened) -> None:
        header, self._columns = table.header, table.columns
        edges = [[0, *accumulate(_sizes(column, header))] for column in self._columns.values()]
        self._memory = [(name, table.memory[name], of_rows) for name, of_rows in zip(self._columns, edges, strict=True)]
        self._strings = header.strings
        self._rows: list[OpenedRow | None] = [None] * len(header.uids)

    def row(self, at: int) -> OpenedRow:
        """Returns the row; the same object each time, because other rows may share its tokens."""
        row = self._rows[at]
        if row is None:
            memory = {name: whole[edges[at] : edges[at + 1]] for name, whole, edges in self._memory}
            row = self._rows[at] = OpenedRow(self._columns, memory, self._strings, at)
        return row


def _sizes(column: Column, header: Header) -> Iterator[int]:
    """Yields the size of each row's values of a column, in bytes."""
    rows, numbers = len(header.uids), header.numbers
    if column.counts is not None:
        counts: Iterable[int] = (max(0, count) for count in column.counts)
    else:
        counts = numbers.response_lengths or repeat(0, rows)
        if column.name == "tokens":
            prompts, prefixes = numbers.prompt_lengths or repeat(0), numbers.prefix_lengths or repeat(0)
            counts = map(sub, map(add, counts, prompts), prefixes)
    return map(mul, counts, repeat(column.element_bytes))


class Tables:
    """Opens each table once. load: loads a table by its number."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tables: dict[int, _Table | OpenedRow] = {}

    def row(self, picked: PickedRow) -> OpenedRow:
        table = self._tables.get(picked.table)
        if table is None:
            table = self._tables[picked.table] = self._open(picked)
        return table if isinstance(table, OpenedRow) else table.row(picked.at)

    def _open(self, picked: PickedRow) -> _Table | OpenedRow:
        """Opens the table. Returns its only row if it has one, as most do, so that the description is freed."""
        table = opened(self._load(picked.table) if picked.stored is None else picked.stored)
        if len(table.header.uids) > 1:
            return _Table(table)
        return OpenedRow(table.columns, table.memory, table.header.strings)


def _pieces(row: PickedRow, count: int, tables: Tables) -> list[memoryview]:
    """Returns the first `count` tokens of a row, from its own table and those of its parents."""
    pieces: list[memoryview] = []
    one: PickedRow | None = row
    while one is not None and count:
        stored = tables.row(one).memory["tokens"]
        prefix = one.row.tokens - len(stored) // _ITEM
        if count > prefix:
            pieces.append(stored[: _ITEM * (count - prefix)])
            count = prefix
        one = one.parent
    return pieces[::-1]


class _Copy(NamedTuple):
    """A column that is copied in parts.

    pieces: the values in order; each piece is released once it is copied. ends: for each row, the number of pieces up
    to the last piece of the row. memory: the destination.
    """

    pieces: list[bytes | memoryview]
    ends: Sequence[int]
    memory: mmap.mmap


class _Copying:
    """Copies the values of columns in parts."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._copied = 0

    def values(self, column: Column, pieces: list[bytes | memoryview], ends: Sequence[int], count: int) -> Array:
        """Returns the concatenated values of these pieces. A large column is filled only by later calls of `go_on`.
        count: the expected number of values. pieces, ends: as in `_Copy`."""
        stored = (size := sum(map(len, pieces))) // column.element_bytes
        if stored != count:
            raise InvalidArgumentError(
                f"the stored rows have {stored} values of {column.name} instead of {count}, because the store has "
                "lost or changed rows; restore it, or delete the run"
            )
        if size < _LEAST_BYTES:
            return column.values(b"".join(pieces))
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._copies.append(_Copy(pieces, ends, memory))
        return column.values(memoryview(memory).toreadonly())

    def go_on(self, end: int) -> None:
        """Copies the next part, up to but not including row `end`."""
        for pieces, ends, memory in self._copies:
            first, last, write = ends[self._copied - 1] if self._copied else 0, ends[end - 1], memory.write
            for piece in pieces[first:last]:
                write(piece)
            pieces[first:last] = repeat(b"", last - first)
        self._copied = end


def _parts(rows: Sequence[OpenedRow], stored: Sequence[StoredRow]) -> list[int]:
    """Returns the ends of the parts in which tables are released. Parts are whole groups, whose rows share tables."""
    sizes = [sum(map(len, row.memory.values())) for row in rows]
    ends, size, least = list[int](), 0, max(_PART_BYTES, sum(sizes) // _MOST_PARTS)
    for at, (nbytes, one) in enumerate(zip(sizes, stored, strict=True)):
        if size >= least and one.group != stored[at - 1].group:
            ends.append(at)
            size = 0
        size += nbytes
    return [*ends, len(rows)]


def _tokens(picked: Sequence[PickedRow], rows: Sequence[OpenedRow], tables: Tables, copying: _Copying) -> Ragged:
    """Returns the tokens of all rows. Rows that extend each other form a line, whose tokens are stored once."""
    lines: list[list[memoryview]] = []
    sizes: list[int] = []
    line_of = list[int]()
    # For each row, the number of lines up to it.
    lines_at = list[int]()
    # Maps the last row of each line to the line.
    ends: dict[RowRef, int] = {}
    for one, row in zip(picked, rows, strict=True):
        parent, stored, count = one.parent, row.memory["tokens"], one.row.tokens
        line = None
        if parent is not None and count - len(stored) // _ITEM == parent.row.tokens:
            line = ends.pop(parent.row.ref, None)
        if line is None:
            line = len(lines)
            lines.append(_pieces(one, count, tables))
            sizes.append(count)
        else:
            lines[line].append(stored)
            sizes[line] = count
        ends[one.row.ref] = line
        line_of.append(line)
        lines_at.append(len(lines))
    pieces_at = [0, *accumulate(map(len, lines))]
    pieces: list[bytes | memoryview] = [*chain.from_iterable(lines)]
    values = copying.values(Column("tokens", "<i4"), pieces, [pieces_at[at] for at in lines_at], sum(sizes))
    starts = Ragged.from_lengths(values, np.array(sizes, np.int64)).starts
    return Ragged(values, starts[line_of], np.array([one.row.tokens for one in picked], np.int64))


def _column(column: Column, pieces: list[bytes | memoryview], lengths: Int64s, copying: _Copying) -> Ragged:
    """Returns a column with one piece per row. lengths: int64 (rows,), the expected length of each piece."""
    values = copying.values(column, pieces, range(1, len(pieces) + 1), int(lengths.sum()))
    return Ragged.from_lengths(values, lengths)


def _numbers(stored: Sequence[StoredRow]) -> dict[str, Array]:
    """Returns the state's description of the rows as columns of a table."""
    columns: dict[str, list[Any]] = {
        "rounds": [row.trajectory.round for row in stored],
        "samples": [row.trajectory.sample for row in stored],
        "steps": [row.step for row in stored],
        "attempts": [row.attempt for row in stored],
        "is_last_steps": [row.is_last for row in stored],
        "policy_versions": [row.version for row in stored],
        "prompt_lengths": [row.tokens - row.response_length for row in stored],
        "response_lengths": [row.response_length for row in stored],
        "rewards": [row.reward for row in stored],
        "rewards_pending": [False] * len(stored),
    }
    numbers = {name: np.array(values, NUMBERS[name][0]) for name, values in columns.items()}
    if stored and stored[0].advantage is not None:
        numbers["advantages"] = np.array([row.advantage for row in stored], OF_SOME["advantages"])
    return numbers


def _of_responses(
    rows: Sequence[OpenedRow], kinds: Sequence[Mapping[str, Column]], numbers: dict[str, Array], copying: _Copying
) -> dict[str, Ragged]:
    """Returns the columns with one value per response token, except rewards. kinds: the sets of columns of rows."""
    lengths = numbers["response_lengths"]
    columns: dict[str, Ragged] = {}
    for name in OF_RESPONSES:
        some = next((one[name] for one in kinds if name in one), None)
        if some is None or name == "token_rewards":
            continue
        stored = [row.memory.get(name) for row in rows]
        memory = [_stand_in(name, numbers, at) if one is None else one for at, one in enumerate(stored)]
        columns[name] = _column(some, memory, lengths, copying)
    return columns


def _stand_in(name: str, numbers: dict[str, Array], row: int) -> bytes:
    """Returns the default values of a column for a row whose table does not have it, although other rows do."""
    length = int(numbers["response_lengths"][row])
    if name == "loss_mask":
        return b"\1" * length
    if name == "token_versions":
        return np.full(length, numbers["policy_versions"][row], np.int32).tobytes()
    field = PLAIN.get(name)
    if field is not None and field.fill is not None:
        return np.full(length, field.fill, field.dtype).tobytes()
    raise InvalidArgumentError(f"some rows have {name} and others do not; send them in all rows of a run, or in none")


def _token_rewards(rows: Sequence[OpenedRow], stored: Sequence[StoredRow]) -> Ragged:
    values: list[Array] = []
    for row, one in zip(rows, stored, strict=True):
        if one.late_rewards:
            values.append(np.frombuffer(one.late_rewards, np.float64))
        else:
            column = row.columns.get("token_rewards")
            assert column is not None, "a row without a later reward brought its own"
            values.append(column.values(row.memory["token_rewards"]))
    return Ragged.from_arrays(values, np.float64)


def _extras(rows: Sequence[OpenedRow], kinds: Sequence[Mapping[str, Column]], copying: _Copying) -> dict[str, Extra]:
    """Returns the declared columns that at least one of the tables has."""
    declared = {name: column for columns in kinds for name, column in columns.items() if column.counts is not None}
    extras: dict[str, Extra] = {}
    for name, column in declared.items():
        of_rows = ((row.at, row.columns.get(name)) for row in rows)
        counts: Int64s = np.array(
            [-1 if some is None or some.counts is None else some.counts[at] for at, some in of_rows], np.int64
        )
        memory: list[bytes | memoryview] = [row.memory.get(name, b"") for row in rows]
        extras[name] = Extra(_column(column, memory, np.maximum(counts, 0), copying), counts >= 0)
    return extras
