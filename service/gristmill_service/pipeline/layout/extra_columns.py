"""Lays out the columns that a run declares (specification, section 8): per token, per row, or as items.

As with built-in columns, values stay where they were received: tensors are slices of the batch's own buffers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire import extras
from gristmill._wire.column_spec import ColumnSpec, of_column
from gristmill._wire.columns import Array, Int64s, Ragged
from gristmill._wire.extras import starts_of
from gristmill._wire.steps import Extra, Steps
from gristmill_service.pipeline.layout.columns import (
    Block,
    ByteRanges,
    Column,
    Geometry,
    Placement,
    StepTokens,
    safetensors_name,
)
from gristmill_service.pipeline.layout.iovec import Iovec, Region
from gristmill_service.pipeline.rows.joins import NONE, common_prefix
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.row_values import (
    any_given,
    extra_of,
    last_given,
    row_values,
    visits_with_value,
)

# Elements of rows with more bytes than this are not copied.
_GATHERED_BYTES = 4096


def token_columns(
    specs: Sequence[ColumnSpec], steps: Steps, rows: Rows, geometry: Geometry, longest: int
) -> list[Column]:
    """Returns the tensors with an element per token or response token. longest: elements of the widest row."""
    columns: list[Column] = []
    for spec in specs:
        if spec.is_ragged:
            continue
        extra = extra_of(spec, steps)
        if spec.scope == "response" and not spec.partial:
            values, given = rows.standing(extra.values), extra.given[rows.steps]
            columns.append(StepTokens(spec.name, values, geometry, _fill(spec, longest), given))
        elif spec.scope in ("response", "token"):
            columns.append(
                TokenValues(spec, extra, pieces_of(spec, extra, steps, rows), geometry, _fill(spec, longest))
            )
    return columns


def shard_tensors(specs: Sequence[ColumnSpec], steps: Steps, rows: Rows) -> list[ShardTensor]:
    """Returns the tensors that a shard has once, whatever its micro-batches are."""
    tensors: list[ShardTensor] = []
    for spec in specs:
        extra = extra_of(spec, steps)
        given = extra.given[rows.steps]
        if spec.scope == "row" and spec.element_bytes > _GATHERED_BYTES and spec.merge != "sum":
            tensors.append(LargeRowValues(spec, extra.values, visits_with_value(spec, given, rows), rows))
        elif spec.scope == "row":
            tensors.append(RowValues(spec.name, spec.name, row_values(spec, extra.values, given, rows)))
        elif spec.scope == "items":
            items = Items(spec, extra, last_given(given, rows) if spec.merge != "concat" else None, rows)
            tensors += [items, ItemOffsets(items)]
        if not spec.required:
            of_rows = np.append(any_given(given, rows), False).astype(np.uint8)
            tensors.append(RowValues(f"{spec.name}_given", spec.name, of_rows))
    return tensors


def _fill(spec: ColumnSpec, longest: int) -> Region:
    numbers = longest * math.prod(spec.value_shape)
    if spec.fill_value.tobytes().strip(b"\0"):
        return Region(np.full(numbers, spec.fill_value, spec.storage))
    # Zeros that are never written take no memory.
    return Region(np.zeros(numbers, spec.storage))


class TokenValues(Column):
    """An element per token of a row, or of its response, each from one of the steps on its path."""

    def __init__(self, spec: ColumnSpec, extra: Extra, pieces: _Pieces, geometry: Geometry, fill: Region) -> None:
        self.scope = "response" if spec.scope == "response" else "sequence"
        self.name, self.dtype, self.itemsize = spec.name, safetensors_name(spec.storage), spec.storage.itemsize
        self.shape, self._unit, self.fill = spec.value_shape, spec.element_bytes, fill
        self._values = Region(extra.values.values)
        self.partial_values = self._values if spec.partial else None
        lengths = self._unit * (pieces.ends - pieces.begins)
        of_padding = self._unit * geometry.of(self.scope)[-1:]
        self._pieces = np.concatenate([fill.ranges(0, lengths), fill.ranges(0, of_padding)])
        given = np.append(extra.given[pieces.steps] & (pieces.steps != NONE), False)
        of_given = pieces.steps[given[:-1]]
        starts = extra.values.starts[of_given] + pieces.begins[given[:-1]] - pieces.starts[of_given]
        self._pieces[given] = self._values.ranges(self._unit * starts, lengths[given[:-1]])
        # The padding row's is the last.
        self._begins, self._counts = pieces.edges, np.append(np.diff(pieces.edges), 1)

    def ranges(self, placement: Placement) -> ByteRanges:
        counts = self._counts[placement.rows]
        ends = np.cumsum(counts)
        edges = np.append(0, ends + np.arange(1, len(ends) + 1))
        iovec = np.empty((edges[-1], 2), np.int64)
        is_piece = np.ones(len(iovec), np.bool_)
        is_piece[edges[:-1]] = False
        iovec[edges[:-1]] = self.fill.ranges(0, self._unit * placement.leads[self.scope])
        from_first = np.repeat(self._begins[placement.rows] - (ends - counts), counts)
        iovec[is_piece] = self._pieces[np.arange(len(from_first)) + from_first]
        return ByteRanges(iovec, edges, (self._values, self.fill))


class _Pieces(NamedTuple):
    """The steps from which rows take their values: row r has the pieces `edges[r]:edges[r + 1]`, and piece p is the
    tokens `begins[p]:ends[p]` of step `steps[p]`, or as many of no step if that is NONE. Together the pieces are all
    tokens of the row, or with scope `response` of its response, and count the tokens of responses. `starts` has the
    token of each step's first value. All int64."""

    edges: Int64s
    steps: Int64s
    begins: Int64s
    ends: Int64s
    starts: Int64s


def pieces_of(spec: ColumnSpec, extra: Extra, steps: Steps, rows: Rows) -> _Pieces:
    if spec.scope == "response":
        return _response_pieces(rows, starts_of(spec, steps), extra.values.lengths)
    if spec.partial:
        return _given_pieces(steps, rows, starts_of(spec, steps), extra.values.lengths, is_first=spec.merge == "first")
    missing = extras.left_out_of(spec, extra, steps)
    return _first_pieces(rows, missing) if spec.merge == "first" else _last_pieces(rows, missing)


def _response_pieces(rows: Rows, starts: Int64s, counts: Int64s) -> _Pieces:
    """Returns three pieces of each visit: without values, the observation before it and the first tokens of its step;
    the kept tokens with values; and those after them. Arguments: as for `_given_pieces`."""
    firsts = np.minimum(starts[rows.steps], rows.kept)
    lasts = np.clip((starts + counts)[rows.steps], firsts, rows.kept)
    none = np.full(len(rows.steps), NONE)
    of_steps = np.stack([none, np.where(firsts < lasts, rows.steps, NONE), none], axis=1)
    edges = np.stack([-rows.observed, firsts, lasts, rows.kept], axis=1)
    return _Pieces(3 * rows.edges, of_steps.ravel(), edges[:, :-1].ravel(), edges[:, 1:].ravel(), starts)


def _given_pieces(steps: Steps, rows: Rows, starts: Int64s, counts: Int64s, *, is_first: bool) -> _Pieces:
    """Returns pieces in which each token has the value of the first, or last, step of the row that gave one; else of
    the first, or last, earlier step of the trajectory that gave one and begins with the row's tokens up to this one. An
    engine omits what it has of a cached prefix, and in a fork another row has the step that gave it (vLLM #57966).

    starts, counts: int64 (steps,), each step's first token with a value, and how many have one.
    """
    after = starts + counts
    # A step's tokens after its end, of which a later step has others, are not the row's.
    highs = np.minimum(after[rows.steps], rows.per_visit(rows.prompt_lengths) + rows.ends)
    visits = list(zip(rows.steps.tolist(), starts[rows.steps].tolist(), highs.tolist(), strict=True))
    edges, made, order = [0], list[tuple[int, int, int]](), 1 if is_first else -1
    prefixes = _CommonPrefixes(steps.tokens)
    for row, (length, last) in enumerate(zip(rows.lengths.tolist(), rows.last.tolist(), strict=True)):
        path = visits[rows.edges[row] : rows.edges[row + 1]]
        pieces, gaps = _covered(path[::order], [(0, length)])
        first = last - int(steps.steps[last])
        if gaps and len(path) <= last - first:
            earlier = np.setdiff1d(np.arange(first, last), [step for step, _, _ in path])[::order]
            common = np.minimum(after[earlier], prefixes.of(first, last)[earlier - first])
            sources = zip(earlier.tolist(), starts[earlier].tolist(), common.tolist(), strict=True)
            more, gaps = _covered(sources, gaps)
            pieces += more
        made += sorted([*pieces, *((NONE, begin, end) for begin, end in gaps)], key=itemgetter(1))
        edges.append(len(made))
    of_steps, begins, ends = np.array(made, np.int64).reshape(-1, 3).T
    return _Pieces(np.array(edges), of_steps, begins, ends, starts)


def _covered(
    sources: Iterable[tuple[int, int, int]], gaps: list[tuple[int, int]]
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Returns the pieces (step, begin, end) of the gaps that sources have values for, and the gaps that remain.

    sources: each step's range of values (step, begin, end); the first that has a token gives its value.
    """
    pieces = list[tuple[int, int, int]]()
    for step, low, high in sources:
        open_gaps = []
        for begin, end in gaps:
            first, last = max(begin, low), min(end, high)
            if first >= last:
                open_gaps.append((begin, end))
                continue
            pieces.append((step, first, last))
            open_gaps += [gap for gap in ((begin, first), (last, end)) if gap[0] < gap[1]]
        gaps = open_gaps
    return pieces, gaps


class _CommonPrefixes:
    """How many first tokens the steps of a trajectory have in common, one trajectory after another."""

    def __init__(self, tokens: Ragged) -> None:
        self._tokens, self._first = tokens, NONE
        self._of_steps: list[Int64s] = []

    def of(self, first: int, step: int) -> Int64s:
        """Returns how many tokens a step has in common with each earlier one. first: the trajectory's first step."""
        if first != self._first:
            self._first, self._of_steps = first, [np.empty(0, np.int64)]
        for at in range(first + len(self._of_steps), step + 1):
            before, shared = self._of_steps[-1], self._common(at - 1, at, 0)
            commons = np.append(np.minimum(before, shared), shared)
            # What the step before has in common with an earlier one decides, unless it ends where the two differ.
            for other in np.flatnonzero(before == shared).tolist():
                commons[other] += self._common(first + other, at, shared)
            self._of_steps.append(commons)
        return self._of_steps[step - first]

    def _common(self, one: int, other: int, begin: int) -> int:
        return common_prefix(self._tokens[one][begin:], self._tokens[other][begin:])


def _last_pieces(rows: Rows, missing: Int64s) -> _Pieces:
    return _Pieces(np.arange(len(rows) + 1), rows.last, np.zeros(len(rows), np.int64), rows.lengths, missing)


def _first_pieces(rows: Rows, missing: Int64s) -> _Pieces:
    """Returns pieces in which each visit contributes the tokens after the end of the visit before.

    missing: int64 (steps,), how many of a step's first tokens have their values from the step before.
    """
    ends = rows.per_visit(rows.prompt_lengths) + rows.ends
    begins = np.append(0, ends[:-1])[: len(ends)]
    begins[rows.edges[:-1]] = 0
    inherited = np.flatnonzero(begins < missing[rows.steps])
    if not len(inherited):
        return _Pieces(rows.edges, rows.steps, begins, ends, missing)
    return _with_inherited(_Pieces(rows.edges, rows.steps, begins, ends, missing), inherited.tolist())


def _with_inherited(pieces: _Pieces, inherited: Sequence[int]) -> _Pieces:
    """Replaces tokens that a step inherits from the step before by pieces of that step. Few rows need it: the rows that
    begin with a later step."""
    counts = np.ones(len(pieces.steps), np.int64)
    made: list[NDArray[np.int64]] = []
    at = 0
    flat = np.stack(pieces[1:4], axis=1)
    for piece in inherited:
        step, begin, end = flat[piece].tolist()
        parts = _chain(step, begin, end, pieces.starts)
        made += [flat[at:piece], np.array(parts, np.int64).reshape(-1, 3)]
        counts[piece], at = len(parts), piece + 1
    steps, begins, ends = np.concatenate([*made, flat[at:]]).T
    edges = np.append(0, np.cumsum(counts))[pieces.edges]
    return _Pieces(edges, steps, begins, ends, pieces.starts)


def _chain(step: int, begin: int, end: int, missing: Int64s) -> list[tuple[int, int, int]]:
    parts = []
    while begin < end:
        inherited = max(begin, min(int(missing[step]), end))
        if inherited < end:
            parts.append((step, inherited, end))
        step, end = step - 1, inherited
    return parts[::-1]


class Cut(NamedTuple):
    """A tensor's part of one shard or block. name: in the file. memory: kept alive with its byte ranges."""

    name: str
    tensor: ShardTensor
    shape: list[int]
    iovec: Iovec
    memory: Region | None = None


class ShardTensor(ABC):
    """A tensor that is no line of elements per row: a shard has it once, or each of its blocks. name, dtype, itemsize:
    as `Column` has them. column: the declared column."""

    name: str
    column: str
    dtype: str
    itemsize: int

    @abstractmethod
    def cuts(self, placement: Placement, blocks: Sequence[Block]) -> Iterator[Cut]:
        """Yields the parts of the shard with these blocks, in file order."""


class ValuePieces(ShardTensor):
    """Which bytes of a partial column's tensor are values of steps; the others are fill. Each of its lines is a run of
    bytes: -1 for values in the shard, the first byte in the tensor, the number of bytes, and the first byte again."""

    dtype, itemsize = "I64", 8

    def __init__(self, column: str, values: Region, ranges: ByteRanges) -> None:
        """values: the memory of the column's values. ranges: the whole column, as it is laid out."""
        self.name, self.column = of_column(column)[2], column
        self._values, self._ranges = values, ranges

    def cuts(self, placement: Placement, blocks: Sequence[Block]) -> Iterator[Cut]:
        for block in blocks:
            pieces = self._pieces(self._ranges.of(block.begin, block.end))
            memory = Region(pieces)
            yield Cut(block.prefix + self.name, self, list(pieces.shape), memory.whole(), memory)

    def _pieces(self, iovec: Iovec) -> NDArray[np.int64]:
        iovec = iovec[iovec[:, 1] > 0]
        changes = np.flatnonzero(np.diff(self._values.contains(iovec), prepend=False, append=False))
        begins, ends = np.append(0, np.cumsum(iovec[:, 1]))[changes].reshape(-1, 2).T
        return np.stack([np.full_like(begins, -1), begins, ends - begins, begins], axis=1)


class OfShard(ShardTensor):
    """A tensor that a shard has once, whatever its blocks are."""

    def cuts(self, placement: Placement, blocks: Sequence[Block]) -> Iterator[Cut]:
        yield self.cut(placement.rows[blocks[0].begin : blocks[-1].end])

    @abstractmethod
    def cut(self, rows: Int64s) -> Cut:
        """Returns the part of the shard with these rows. rows: -1 is a padding row."""


class RowValues(OfShard):
    """An element per row. values: (rows + 1, *shape), the padding row's last."""

    def __init__(self, name: str, column: str, values: Array) -> None:
        self.name, self.column, self._values = name, column, values
        self.dtype, self.itemsize = safetensors_name(values.dtype), values.itemsize

    def cut(self, rows: Int64s) -> Cut:
        values = self._values[rows]
        memory = Region(values)
        return Cut(self.name, self, list(values.shape), memory.whole(), memory)


class LargeRowValues(OfShard):
    """The same for large elements, which are not copied. visits: (rows,) the visit with each row's element, -1 for
    none."""

    def __init__(self, spec: ColumnSpec, values: Ragged, visits: Int64s, rows: Rows) -> None:
        self.name = self.column = spec.name
        self.dtype, self.itemsize = safetensors_name(spec.storage), spec.storage.itemsize
        self._shape, unit = list(spec.value_shape), spec.element_bytes
        self._values, self._fill = (
            Region(values.values),
            Region(np.full(spec.value_shape, spec.fill_value, spec.storage)),
        )
        has = visits >= 0
        units = np.full(len(rows) + 1, unit)
        # The padding row's is the last.
        self._ranges = self._fill.ranges(0, units)
        self._ranges[:-1][has] = self._values.ranges(unit * values.starts[rows.steps[visits[has]]], units[:-1][has])

    def cut(self, rows: Int64s) -> Cut:
        return Cut(self.name, self, [len(rows), *self._shape], self._ranges[rows])


class Items(OfShard):
    """The rows' items, one row after another. visits: (rows,) the visit with each row's items, -1 for none; None: a row
    has those of all its visits."""

    def __init__(self, spec: ColumnSpec, extra: Extra, visits: Int64s | None, rows: Rows) -> None:
        self.name = self.column = spec.name
        self.dtype, self.itemsize = safetensors_name(spec.storage), spec.storage.itemsize
        self._shape, self._unit = list(spec.value_shape), spec.element_bytes
        self._values = Region(extra.values.values)
        of_visit = extra.values.take(rows.steps)
        lengths = of_visit.lengths
        if visits is None:
            self._edges, self._lengths, starts = rows.edges, lengths, of_visit.starts
        else:
            self._edges = np.arange(len(rows) + 1)
            self._lengths, starts = np.where(visits < 0, 0, lengths[visits]), of_visit.starts[visits]
        self._ranges = self._values.ranges(self._unit * starts, self._unit * self._lengths)
        totals = np.append(0, np.cumsum(self._lengths))[self._edges]
        self.counts = np.append(np.diff(totals), 0)
        """Each row's number of items; int64 (rows + 1,), the padding row's last."""

    def cut(self, rows: Int64s) -> Cut:
        real = rows[rows >= 0]
        parts = [self._ranges[self._edges[row] : self._edges[row + 1]] for row in real.tolist()]
        iovec = np.concatenate(parts) if parts else self._ranges[:0]
        return Cut(self.name, self, [int(self.counts[rows].sum()), *self._shape], iovec)


class ItemOffsets(OfShard):
    """The index of each row's first item in the shard, and the end of the last row's."""

    dtype, itemsize = "I64", 8

    def __init__(self, items: Items) -> None:
        self.name, self.column, self._items = f"{items.name}_offsets", items.name, items

    def cut(self, rows: Int64s) -> Cut:
        memory = Region(np.append(0, np.cumsum(self._items.counts[rows])))
        return Cut(self.name, self, [len(rows) + 1], memory.whole(), memory)
