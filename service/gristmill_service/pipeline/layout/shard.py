"""Lays out shards from a plan and columns. Each shard is a safetensors file, described by ranges of memory.

A shard is never copied together: its `iovec` lists slices of the batch's buffers and of constants, in file order. The
same input gives the same bytes. Layouts: `left_padded` (SkyRL #1285), `packed`, and `prefix_tree`, which is packed and
omits the tokens that a row shares with the previous row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill._wire.column_spec import BUILT_IN
from gristmill._wire.columns import Int64s, starts_of
from gristmill._wire.context_parallel import load_ratio
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.layout.columns import (
    SCOPES,
    Block,
    ByteRanges,
    Column,
    Geometry,
    Placement,
    Scope,
    safetensors_name,
)
from gristmill_service.pipeline.layout.extra_columns import Cut, ShardTensor, ValuePieces
from gristmill_service.pipeline.layout.iovec import Iovec, Region
from gristmill_service.pipeline.layout.token_tree import axis_tensors, branches, tree_columns
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, ShardAddress

ITEMSIZES = (8, 4, 2, 1)
"""Tensors are ordered in a file by the size of their values in bytes, so that each tensor is aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class PerRow:
    """Tensors of one dtype with one value per row. values: (names, rows + 1); the last is the padding row's value."""

    names: Sequence[str]
    values: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """The tensors with values of one size, for all rows of all shards of a model, in file order.

    dtype, per_row: the tensors with one value per row, (names, n). columns, ranges: the tensors with values per token.
    tensors: all other tensors.
    """

    itemsize: int
    dtype: str
    per_row: PerRow
    columns: Sequence[Column]
    ranges: Sequence[ByteRanges]
    tensors: Sequence[ShardTensor]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The tensors of a model's shards, grouped by the size of their values."""

    placement: Placement
    groups: Sequence[TensorGroup]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The file of one shard: its own bytes (header, tensors per row), and blocks of placed tensors.

    own: for each group, the bytes before its tensors per token. cuts: for each group, the tensors after them.
    """

    address: ShardAddress
    own: Sequence[Region]
    cuts: Sequence[Sequence[Cut]]
    blocks: Sequence[Block]
    placed: Placed
    size: int
    sequence_elements: int
    """The number of elements of all `sequences` tensors, including padding."""

    def iovec(self) -> Iovec:
        ranges = []
        for own, cuts, group in zip(self.own, self.cuts, self.placed.groups, strict=True):
            ranges.append(own.whole())
            ranges += [columns.of(block.begin, block.end) for block in self.blocks for columns in group.ranges]
            ranges += [cut.iovec for cut in cuts]
        return np.concatenate(ranges)

    @property
    def column_bytes(self) -> dict[str, int]:
        """The size of each declared column in the file, in bytes."""
        nbytes: dict[str, int] = {}
        for group, cuts in zip(self.placed.groups, self.cuts, strict=True):
            for column, ranges in zip(group.columns, group.ranges, strict=True):
                if column.name not in BUILT_IN:
                    size = sum(int(ranges.of(one.begin, one.end)[:, 1].sum()) for one in self.blocks)
                    nbytes[column.name] = nbytes.get(column.name, 0) + size
            for cut in cuts:
                nbytes[cut.tensor.column] = nbytes.get(cut.tensor.column, 0) + int(cut.iovec[:, 1].sum())
        return nbytes


class Layout:
    """Lays out the shards of one model's mini-batches, in plan order. begins: the first row of each shard in the
    placement."""

    def __init__(
        self,
        mini_batches: Sequence[MiniBatchPlan],
        geometry: Geometry,
        config: RunConfig,
        sharing: Sharing | None = None,
    ) -> None:
        """sharing: the tokens that rows share, with `layout: prefix_tree`."""
        placed = np.concatenate([rank.rows for mini_batch in mini_batches for rank in mini_batch.ranks])
        self._blocks = _blocks(mini_batches, placed, geometry, config)
        blocks = [block for blocks in self._blocks for block in blocks]
        edges = [*(block.begin for block in blocks), blocks[-1].end]
        shared = None if sharing is None else sharing.shared(placed, np.array(edges[:-1]))
        leads = {scope: _leads(placed, blocks, scope, geometry) for scope in SCOPES}
        self.placement = Placement(placed, leads, geometry, shared)
        if config.pads_rows:
            own, lengths = self.placement.own["sequence"], self.placement.lengths["sequence"]
            self.placement.tails = padding_after(own, lengths, edges, config)
        own, on_axis = self.placement.own["sequence"], self.placement.on_axis
        self._branches = None if shared is None else branches(shared, own, on_axis, edges)
        self.begins = [blocks[0].begin for blocks in self._blocks]
        self._row_ends = np.append(0, np.cumsum(own))
        self._token_ends = np.append(0, np.cumsum(on_axis))

    @property
    def sequence_elements(self) -> int:
        """The number of elements of all `sequences` tensors of all shards, including padding."""
        return sum(self._elements(block, "sequence") for blocks in self._blocks for block in blocks)

    @property
    def widths(self) -> Int64s:
        """How many tokens each placed row takes in `sequences`, with its padding, and those that it shares; (n,)."""
        lengths, tails = self.placement.lengths["sequence"], self.placement.tails
        if self._blocks[0][0].widths is None:
            return lengths if tails is None else lengths + tails
        blocks = [block for blocks in self._blocks for block in blocks]
        of_blocks = [block.widths["sequence"] for block in blocks if block.widths is not None]
        return np.repeat(of_blocks, [block.end - block.begin for block in blocks])

    def cp_barrier_ratio(self, cp_size: int) -> float:
        """Returns how much slower attention is than with equal loads: the largest cost of a context-parallel rank, over
        the mean of all ranks, summed over micro-batches. 1: no rank waits for another."""
        counts, shared = self.placement.on_axis, self.placement.shared
        if shared is None:
            return 1.0
        axes = []
        for block in (block for blocks in self._blocks for block in blocks):
            sizes, first = counts[block.begin : block.end], shared[block.begin : block.end]
            axes.append(np.arange(sizes.sum()) + np.repeat(first - starts_of(sizes), sizes))
        return load_ratio(axes, cp_size)

    @property
    def tree_columns(self) -> list[Column]:
        """The columns that describe an axis on which rows share tokens; empty if rows share no tokens."""
        if self._branches is None or self.placement.shared is None:
            return []
        return tree_columns(self._branches, self.placement.shared, self.placement.on_axis)

    def place(self, columns: Sequence[Column], per_row: Mapping[int, PerRow], tensors: Sequence[ShardTensor]) -> Placed:
        """Places each tensor for all rows of all shards at once, so that a shard is a slice of every tensor.

        per_row: tensors with one value per row, by the size of their values.
        """

        laid_out = {column.name: column.laid_out(self.placement) for column in columns}
        pieces = [
            ValuePieces(column.name, column.partial_values, laid_out[column.name])
            for column in columns
            if column.partial_values is not None
        ]

        def group(itemsize: int) -> TensorGroup:
            mine = [column for column in columns if column.itemsize == itemsize]
            small = per_row.get(itemsize, _NO_VALUES)
            gathered = PerRow(small.names, small.values.take(self.placement.rows, axis=1))
            dtype = safetensors_name(small.values.dtype)
            of_size = [tensor for tensor in (*tensors, *pieces) if tensor.itemsize == itemsize]
            return TensorGroup(itemsize, dtype, gathered, mine, [laid_out[column.name] for column in mine], of_size)

        groups = [group(itemsize) for itemsize in ITEMSIZES]
        used = [one for one in groups if one.itemsize == 4 or one.per_row.names or one.columns or one.tensors]
        return Placed(self.placement, used)

    def shard(self, index: int, address: ShardAddress, placed: Placed, metadata: dict[str, str]) -> Shard:
        """Returns shard number `index`, in plan order. placed: the result of `place`. metadata: JSON texts by name."""
        blocks = self._blocks[index]
        begin, end = blocks[0].begin, blocks[-1].end
        axes = [self._axis(block) for block in blocks]
        cuts = [
            [cut for tensor in group.tensors for cut in tensor.cuts(self.placement, blocks)] for group in placed.groups
        ]
        header, size = self._header(blocks, placed, cuts, axes, metadata)
        own: list[bytes] = []
        for group in placed.groups:
            small = [group.per_row.values[:, begin:end].tobytes()]
            small += [values.tobytes() for axis in axes for values in axis.values()] if group.itemsize == 4 else []
            own.append(b"".join(small if own else [header, *small]))
        return Shard(
            address=address,
            own=[Region(small) for small in own],
            cuts=cuts,
            blocks=blocks,
            placed=placed,
            size=size,
            sequence_elements=sum(self._elements(block, "sequence") for block in blocks),
        )

    def _axis(self, block: Block) -> dict[str, NDArray[np.int32]]:
        """Returns the tensors that describe the positions of rows on a token axis; empty for padded rows."""
        if block.widths is not None:
            return {}
        if self._branches is not None:
            return axis_tensors(self._branches.between(block.begin, block.end))
        ends = {"cu_seqlens": self._row_ends}
        if self.placement.tails is not None:
            ends["cu_seqlens_padded"] = self._token_ends
        return {
            name: (of_rows[block.begin : block.end + 1] - of_rows[block.begin]).astype(np.int32)
            for name, of_rows in ends.items()
        }

    def _elements(self, block: Block, scope: Scope) -> int:
        """Returns the number of values of a tensor. A packed tensor has one value per token in every scope."""
        if block.widths is None:
            return int(self._token_ends[block.end] - self._token_ends[block.begin])
        return block.widths[scope] * (block.end - block.begin)

    def _header(
        self,
        blocks: Sequence[Block],
        placed: Placed,
        cuts: Sequence[Sequence[Cut]],
        axes: Sequence[Mapping[str, NDArray[np.int32]]],
        metadata: dict[str, str],
    ) -> tuple[bytes, int]:
        """Returns the safetensors header, and the size of the whole file."""
        entries: dict[str, Any] = {"__metadata__": metadata}
        rows, shapes = blocks[-1].end - blocks[0].begin, [self._shapes(block) for block in blocks]
        offset = 0

        def add(name: str, dtype: str, shape: list[int], itemsize: int) -> None:
            nonlocal offset
            end = offset + itemsize * prod(shape)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end

        for group, group_cuts in zip(placed.groups, cuts, strict=True):
            for name in group.per_row.names:
                add(name, group.dtype, [rows], group.itemsize)
            if group.itemsize == 4:
                for block, axis in zip(blocks, axes, strict=True):
                    for name, values in axis.items():
                        add(block.prefix + name, "I32", [len(values)], 4)
            for block, shape in zip(blocks, shapes, strict=True):
                for column in group.columns:
                    add(block.prefix + column.name, column.dtype, [*shape[column.scope], *column.shape], group.itemsize)
            for cut in group_cuts:
                add(cut.name, cut.tensor.dtype, cut.shape, group.itemsize)
        text = orjson.dumps(entries)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, 8 + len(text) + offset

    def _shapes(self, block: Block) -> dict[Scope, list[int]]:
        if block.widths is None:
            return {scope: [self._elements(block, scope)] for scope in SCOPES}
        return {scope: [block.end - block.begin, block.widths[scope]] for scope in SCOPES}


_NO_VALUES = PerRow((), np.empty((0, 1), np.uint8))


def _blocks(
    mini_batches: Sequence[MiniBatchPlan], placed: Int64s, geometry: Geometry, config: RunConfig
) -> list[list[Block]]:
    """Returns the blocks of each shard, in plan order. placed: the rows of all shards."""
    ranks = [rank for mini_batch in mini_batches for rank in mini_batch.ranks]
    own_micro_batches = config.has_token_axis or config.pad_width == "micro_batch"
    bounds = [rank.bounds if own_micro_batches else np.array([0, len(rank.rows)]) for rank in ranks]
    begins = np.cumsum([0, *(len(rank.rows) for rank in ranks)])
    edges = [(begin + edges).tolist() for begin, edges in zip(begins.tolist(), bounds, strict=False)]
    widths = _widths(mini_batches, edges, placed, geometry, config)
    return [
        [
            Block(f"micro_batch_{index:03d}/" if own_micro_batches else "", begin, end, next(widths))
            for index, (begin, end) in enumerate(pairwise(of_shard))
        ]
        for of_shard in edges
    ]


def _widths(
    mini_batches: Sequence[MiniBatchPlan],
    edges: Sequence[Sequence[int]],
    placed: Int64s,
    geometry: Geometry,
    config: RunConfig,
) -> Iterator[dict[Scope, int] | None]:
    """Yields the widths of each block, in order: the length of the longest row, including padding rows, of the
    micro-batch, mini-batch or batch, according to `pad_width`. Yields None for packed blocks.

    edges: for each shard, the begins of its blocks among the placed rows, and the end of the last block.
    """
    counts = np.array([len(of_shard) - 1 for of_shard in edges])
    if config.has_token_axis:
        return repeat(None, int(counts.sum()))
    dp_size = len(edges) // len(mini_batches)
    shards_apart = {"batch": len(edges), "mini_batch": dp_size}.get(config.pad_width, 1)
    if config.pad_width == "micro_batch":
        begins, blocks = np.concatenate([of_shard[:-1] for of_shard in edges]), np.ones(int(counts.sum()), np.int64)
    else:
        begins = np.array([of_shard[0] for of_shard in edges[::shards_apart]])
        blocks = np.add.reduceat(counts, np.arange(0, len(edges), shards_apart))
    multiple = config.pad_to_multiple_of
    widths = [
        np.repeat(-(-np.maximum.reduceat(geometry.of(scope)[placed], begins) // multiple) * multiple, blocks).tolist()
        for scope in SCOPES
    ]
    return (dict(zip(SCOPES, pair, strict=True)) for pair in zip(*widths, strict=True))


def padding_after(own: Int64s, lengths: Int64s, edges: Sequence[int], config: RunConfig) -> Int64s:
    """Returns the padding after each row, (rows,): up to a multiple of `pad_rows_to_multiple_of`, and after the last
    row of a micro-batch up to one of the sizes of `pad_packed_to`. In a tree, a row that the next row continues has
    none, so that the multiple is that of the tokens from one leaf to the next.

    own: int64 (rows,), tokens that the row before does not have. lengths: int64 (rows,), all tokens. edges: the begins
    of micro-batches among the rows, and the end of the last one.
    """
    shared = lengths - own
    leaves = np.flatnonzero(np.append(shared[1:], 0) < lengths)
    tails = np.zeros_like(own)
    tails[leaves] = -np.diff(np.cumsum(own)[leaves], prepend=0) % config.pad_rows_to_multiple_of
    if config.pad_packed_to:
        sizes = np.sort(np.array(config.pad_packed_to))
        tokens = np.add.reduceat(own + tails, edges[:-1])
        tails[np.array(edges[1:]) - 1] += sizes[np.searchsorted(sizes, tokens)] - tokens
    return tails


def _leads(rows: Int64s, blocks: Sequence[Block], scope: Scope, geometry: Geometry) -> Int64s:
    """Returns the number of elements before each row's own elements: padding, or the prompt in a packed column of
    scope response."""
    lengths = geometry.of(scope)[rows]
    counts = [block.end - block.begin for block in blocks]
    if any(block.widths is None for block in blocks):
        return geometry.lengths[rows] - lengths
    widths = np.array([block.widths[scope] for block in blocks if block.widths is not None], np.int64)
    return np.repeat(widths, counts) - lengths
