"""Last stage: a plan and the batch's columns become shards, each a safetensors file described as runs of bytes.

A shard is never assembled in memory: `Shard.buffers()` yields slices of the batch's own buffers and of constants, in
file order, for `writev`. The same input gives the same bytes. Layouts: `left_padded` (SkyRL #1285) and `packed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill.columns import bytes_of
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.columns import Column, Geometry
from gristmill_service.pipeline.plan import MiniBatchPlan, RankPlan
from gristmill_service.store.base import Buffer, ShardAddress

# Rows whose runs are collected before they are handed on: bounds the memory of a layout, not its result.
_ROWS_AT_ONCE = 128

_SAFETENSORS_NAMES = {np.dtype(np.int32): "I32", np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}


@dataclass(frozen=True, slots=True)
class Widths:
    """Columns of the padded tensors: of a sequence, of a response."""

    sequence: int
    response: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One tensor: rows of one column, either padded to a width or packed one after another."""

    name: str
    column: Column
    rows: NDArray[np.int64]
    width: int | None
    """None: packed."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One shard's file: its header, its small tensors, and the blocks that are cut from the batch on demand."""

    address: ShardAddress
    header: bytes
    small: Sequence[tuple[str, NDArray[Any]]]
    blocks: Sequence[Block]
    geometry: Geometry
    size: int
    sequence_elements: int
    """Elements of all `sequences` tensors, padding included."""

    def buffers(self) -> Iterator[Sequence[Buffer]]:
        yield [self.header]
        small, wide = self.small, self.blocks
        for itemsize in (4, 1):
            yield [bytes_of(array) for _, array in small if array.itemsize == itemsize]
            for block in wide:
                if np.dtype(block.column.dtype).itemsize == itemsize:
                    yield from self._runs(block)

    def _runs(self, block: Block) -> Iterator[Sequence[Buffer]]:
        column, lengths = block.column, self.geometry.length_of
        own = lengths if column.scope == "sequence" else self.geometry.response_of
        rows: list[int] = block.rows.tolist()
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[begin : begin + _ROWS_AT_ONCE]
            # Packed response columns stand on their own tokens: the prompt leads, as padding does in a padded row.
            if block.width is None:
                leads = [lengths[row] - own[row] for row in part]
            else:
                leads = [block.width - own[row] for row in part]
            yield column.runs(part, leads)


def lay_out(
    address: ShardAddress,
    rank: RankPlan,
    columns: Sequence[Column],
    per_row: Sequence[tuple[str, NDArray[Any]]],
    metadata: dict[str, Any],
    widths: Sequence[Widths],
    geometry: Geometry,
    config: RunConfig,
) -> Shard:
    """The shard of one rank.

    per_row: named tensors with one value a row of the batch and the padding row's at -1.
    widths: one for the shard, or one per micro-batch when tensors are per micro-batch.
    """
    small = [(name, np.ascontiguousarray(values[rank.rows])) for name, values in per_row]
    blocks: list[Block] = []
    if tensors_per_micro_batch(config):
        edges = rank.bounds.tolist()
        for index, (begin, end) in enumerate(pairwise(edges)):
            prefix, rows = f"micro_batch_{index:03d}/", rank.rows[begin:end]
            if config.layout == "packed":
                cu_seqlens = np.append(0, np.cumsum(geometry.lengths[rows])).astype(np.int32)
                small.append((f"{prefix}cu_seqlens", cu_seqlens))
            blocks += _blocks(prefix, columns, rows, None if config.layout == "packed" else widths[index])
    else:
        blocks = _blocks("", columns, rank.rows, widths[0])
    header, size = _header(small, blocks, geometry, metadata)
    elements = sum(_elements(block, geometry) for block in blocks if block.column.name == "sequences")
    return Shard(address, header, small, blocks, geometry, size, elements)


def tensors_per_micro_batch(config: RunConfig) -> bool:
    return config.layout == "packed" or config.pad_width == "micro_batch"


def pad_widths(
    mini_batches: Sequence[MiniBatchPlan], geometry: Geometry, config: RunConfig
) -> list[list[list[Widths]]]:
    """Widths per mini-batch (of one model), rank and micro-batch; one entry in place of the micro-batches' where the
    tensors are per shard. Padding rows count."""

    def of(rows: NDArray[np.int64]) -> Widths:
        multiple = config.pad_to_multiple_of
        longest, response = int(geometry.lengths[rows].max()), int(geometry.responses[rows].max())
        return Widths(-(-longest // multiple) * multiple, -(-response // multiple) * multiple)

    def joined(ranks: Sequence[RankPlan]) -> NDArray[np.int64]:
        return np.concatenate([rank.rows for rank in ranks])

    if not mini_batches or config.layout == "packed":
        return [[[] for _ in mini_batch.ranks] for mini_batch in mini_batches]
    match config.pad_width:
        case "batch":
            widest = of(np.concatenate([joined(mini_batch.ranks) for mini_batch in mini_batches]))
            return [[[widest] for _ in mini_batch.ranks] for mini_batch in mini_batches]
        case "mini_batch":
            return [[[of(joined(mini_batch.ranks))] for _ in mini_batch.ranks] for mini_batch in mini_batches]
        case "shard":
            return [[[of(rank.rows)] for rank in mini_batch.ranks] for mini_batch in mini_batches]
        case "micro_batch":
            return [
                [[of(part) for part in np.split(rank.rows, rank.bounds[1:-1])] for rank in mini_batch.ranks]
                for mini_batch in mini_batches
            ]


def _blocks(prefix: str, columns: Sequence[Column], rows: NDArray[np.int64], widths: Widths | None) -> list[Block]:
    def width(column: Column) -> int | None:
        if widths is None:
            return None
        return widths.sequence if column.scope == "sequence" else widths.response

    return [Block(prefix + column.name, column, rows, width(column)) for column in columns]


def _elements(block: Block, geometry: Geometry) -> int:
    """Values of a block. A packed column has one per token, whatever its scope."""
    if block.width is None:
        return int(geometry.lengths[block.rows].sum())
    return block.width * len(block.rows)


def _header(
    small: Sequence[tuple[str, NDArray[Any]]], blocks: Sequence[Block], geometry: Geometry, metadata: dict[str, Any]
) -> tuple[bytes, int]:
    """The safetensors header, and the size of the whole file. Tensors of 4-byte elements come first, so that each is
    aligned."""
    entries: dict[str, Any] = {"__metadata__": {name: orjson.dumps(value).decode() for name, value in metadata.items()}}
    offset = 0
    for itemsize in (4, 1):
        shapes = [(name, array.dtype, list(array.shape)) for name, array in small if array.itemsize == itemsize]
        for block in blocks:
            dtype = np.dtype(block.column.dtype)
            if dtype.itemsize == itemsize:
                count = _elements(block, geometry)
                shapes.append((block.name, dtype, [count] if block.width is None else [len(block.rows), block.width]))
        for name, dtype, shape in shapes:
            end = offset + itemsize * prod(shape)
            entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
            offset = end
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + offset
