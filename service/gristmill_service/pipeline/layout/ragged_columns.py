"""Lays out ragged columns (specification, section 8), which have any number of values per token.

A cell is an element of the dense tensor that the column's scope would have. A ragged column has the values of all
cells, one after another, and the index at which each cell's begin. Values stay where they were received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Int64s, Ragged, starts_of
from gristmill._wire.steps import Extra, Steps
from gristmill_service.pipeline.layout.columns import Block, Geometry, Placement, Scope, safetensors_name
from gristmill_service.pipeline.layout.extra_columns import Cut, ShardTensor, pieces_of
from gristmill_service.pipeline.layout.iovec import Region, coalesced
from gristmill_service.pipeline.rows.joins import NONE
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.row_values import extra_of


def ragged_tensors(
    specs: Sequence[ColumnSpec], steps: Steps, rows: Rows, geometry: Geometry
) -> Iterator[RaggedOffsets | RaggedValues]:
    """Yields the tensors of ragged columns, two of each."""
    for spec in specs:
        if spec.is_ragged:
            values = extra_of(spec.values_column, steps).values
            cells = _Cells(_lists(spec, values, steps, rows, geometry), geometry, _scope(spec))
            yield RaggedOffsets(spec, cells)
            yield RaggedValues(spec, cells, values)


def _scope(spec: ColumnSpec) -> Scope:
    return "response" if spec.scope == "response" else "sequence"


class _Lists(NamedTuple):
    """Where the values of each row's cells begin in the column's values, and how many they are. Both int64 (cells,)."""

    begins: Int64s
    counts: Int64s


class _Runs(NamedTuple):
    """Adjacent cells that have the lists of adjacent tokens of one step. All int64 (runs,).

    cells: the first cell. steps: the step. firsts: the first token, counted from the step's first that has a list.
    lengths: the number of tokens.
    """

    cells: Int64s
    steps: Int64s
    firsts: Int64s
    lengths: Int64s


def _lists(spec: ColumnSpec, values: Ragged, steps: Steps, rows: Rows, geometry: Geometry) -> _Lists:
    """Returns the lists of the cells of all rows, then those of the padding row, which are empty."""
    offsets = extra_of(spec.offsets_column, steps)
    lists = Extra(Ragged(offsets.values.values, offsets.values.starts, offsets.values.lengths - 1), offsets.given)
    edges = np.cumsum(geometry.of(_scope(spec)))
    runs = _runs(spec, lists, steps, rows)
    begins, counts = np.zeros((2, int(edges[-1])), np.int64)
    cells, at = _spread(runs.cells, runs.lengths), _spread(lists.values.starts[runs.steps] + runs.firsts, runs.lengths)
    begins[cells] = np.repeat(values.starts[runs.steps], runs.lengths) + lists.values.values[at]
    counts[cells] = lists.values.values[at + 1] - lists.values.values[at]
    return _Lists(begins, counts)


def _runs(spec: ColumnSpec, lists: Extra, steps: Steps, rows: Rows) -> _Runs:
    """Returns the cells of each piece of a row that has its lists from one step."""
    pieces = pieces_of(spec, lists, steps, rows)
    lengths = pieces.ends - pieces.begins
    has = (pieces.steps != NONE) & lists.given[pieces.steps]
    of_steps = pieces.steps[has]
    # The pieces of a row are all of its cells.
    return _Runs(starts_of(lengths)[has], of_steps, pieces.begins[has] - pieces.starts[of_steps], lengths[has])


def _spread(begins: Int64s, lengths: Int64s) -> Int64s:
    """Returns the indices `begins[i]`, `begins[i] + 1` and so on, `lengths[i]` of each; one after another."""
    indices: Int64s = np.arange(lengths.sum()) + np.repeat(begins - starts_of(lengths), lengths)
    return indices


class _Cells:
    """The cells of a ragged column, and which of them a block has."""

    def __init__(self, lists: _Lists, geometry: Geometry, scope: Scope) -> None:
        self._lists, self._scope = lists, scope
        # The padding row's is the last.
        self._ends = np.cumsum(geometry.of(scope))

    def lists(self, placement: Placement, block: Block) -> _Lists:
        """Returns the lists of the rows' own cells, in order."""
        own = placement.own[self._scope][block.begin : block.end]
        cells = _spread(self._ends[placement.rows[block.begin : block.end]] - own, own)
        return _Lists(self._lists.begins[cells], self._lists.counts[cells])

    def offsets(self, placement: Placement, block: Block) -> Int64s:
        """Returns where the values of each cell begin, those of fill included, and the end of the last ones."""
        part = slice(block.begin, block.end)
        left_out, own = placement.left_out(self._scope), placement.own[self._scope][part]
        sizes = placement.leads[self._scope][part] + placement.lengths[self._scope][part]
        sizes = sizes if left_out is None else sizes - left_out[part]
        tails = np.zeros_like(sizes) if placement.tails is None else placement.tails[part]
        counts = np.zeros(int((sizes + tails).sum()) + 1, np.int64)
        # A row's own cells are its last ones, before the fill.
        counts[1 + _spread(np.cumsum(sizes + tails) - tails - own, own)] = self.lists(placement, block).counts
        return np.cumsum(counts)


class RaggedValues(ShardTensor):
    """The values of a block's cells, one after another."""

    def __init__(self, spec: ColumnSpec, cells: _Cells, values: Ragged) -> None:
        self.name = self.column = spec.name
        self.dtype, self.itemsize = safetensors_name(spec.storage), spec.storage.itemsize
        self._cells, self._values = cells, Region(values.values)

    def cuts(self, placement: Placement, blocks: Sequence[Block]) -> Iterator[Cut]:
        for block in blocks:
            begins, counts = self._cells.lists(placement, block)
            iovec = coalesced(self._values.ranges(self.itemsize * begins, self.itemsize * counts))
            yield Cut(block.prefix + self.name, self, [int(counts.sum())], iovec)


class RaggedOffsets(ShardTensor):
    """The index of the first value of each of a block's cells, and the end of the last cell's."""

    dtype, itemsize = "I64", 8

    def __init__(self, spec: ColumnSpec, cells: _Cells) -> None:
        self.name, self.column, self._cells = spec.offsets_column.name, spec.name, cells

    def cuts(self, placement: Placement, blocks: Sequence[Block]) -> Iterator[Cut]:
        for block in blocks:
            memory = Region(self._cells.offsets(placement, block))
            yield Cut(block.prefix + self.name, self, [len(memory.array)], memory.whole(), memory)
