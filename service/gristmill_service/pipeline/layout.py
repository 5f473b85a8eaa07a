"""Last stage: a plan and the batch's columns become shards, each a safetensors file described as runs of memory.

A shard is never assembled: its `iovec` names slices of the batch's own buffers and of constants, in file order. The
same input gives the same bytes. Layouts: `left_padded` (SkyRL #1285) and `packed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.columns import Column, Geometry, Placement, Runs, Scope
from gristmill_service.pipeline.compact import Block, Compaction, CompactShard
from gristmill_service.pipeline.plan import MiniBatchPlan
from gristmill_service.store.base import ShardAddress
from gristmill_service.store.iovec import Iovec, Region

_SAFETENSORS_NAMES = {np.dtype(np.int32): "I32", np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}
_SCOPES: tuple[Scope, Scope] = ("sequence", "response")

SmallTensors = Sequence[tuple[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One shard's file: the bytes that are its own (header, per-row tensors), and runs of the batch's memory."""

    address: ShardAddress
    own: tuple[Region, Region]
    """What stands before the wide tensors of 4-byte elements, and before those of 1-byte elements."""
    wide: tuple[Sequence[Iovec], Sequence[Iovec]]
    memory: Sequence[Runs]
    size: int
    sequence_elements: int
    """Elements of all `sequences` tensors, padding included."""
    without_padding: CompactShard

    def iovec(self) -> Iovec:
        (head, tail), (words, bytes_) = self.own, self.wide
        return np.concatenate([head.whole(), *words, tail.whole(), *bytes_])

    def compact(self) -> Iovec:
        return self.without_padding.iovec


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """The columns of all rows of all shards of a model: as they stand in files, and as they travel."""

    runs: Sequence[Runs]
    compaction: Compaction


class Layout:
    """The shards of one model's mini-batches, in plan order."""

    def __init__(self, mini_batches: Sequence[MiniBatchPlan], geometry: Geometry, config: RunConfig) -> None:
        self._geometry, self._config = geometry, config
        self._blocks = _blocks(mini_batches, geometry, config)
        rows = [rank.rows for mini_batch in mini_batches for rank in mini_batch.ranks]
        placed = np.concatenate(rows) if rows else np.empty(0, np.int64)
        blocks = [block for blocks in self._blocks for block in blocks]
        self.placement = Placement(
            placed, {scope: _leads(placed, blocks, scope, geometry) for scope in _SCOPES}, geometry
        )

    def place(self, columns: Sequence[Column]) -> Placed:
        """Each column's runs for all rows of all shards at once: what a shard takes of them is a slice."""
        return Placed([column.runs(self.placement) for column in columns], Compaction(self.placement, columns))

    def shard(
        self,
        index: int,
        address: ShardAddress,
        columns: Sequence[Column],
        placed: Placed,
        per_row: SmallTensors,
        metadata: dict[str, Any],
    ) -> Shard:
        """The shard number `index` in plan order. placed: what `place` gave for the columns."""
        blocks = self._blocks[index]
        small = [*per_row, *self._cu_seqlens(blocks)]
        header, size = self._header(small, blocks, columns, metadata)
        own = [b"".join(array.tobytes() for _, array in small if array.itemsize == itemsize) for itemsize in (4, 1)]
        wide = [
            [
                runs.of(block.begin, block.end)
                for block in blocks
                for column, runs in zip(columns, placed.runs, strict=True)
                if np.dtype(column.dtype).itemsize == itemsize
            ]
            for itemsize in (4, 1)
        ]
        regions = Region(header + own[0]), Region(own[1])
        return Shard(
            address=address,
            own=regions,
            wide=(wide[0], wide[1]),
            memory=placed.runs,
            size=size,
            sequence_elements=sum(self._elements(block, "sequence") for block in blocks),
            without_padding=CompactShard(placed.compaction, blocks, regions, size),
        )

    def _cu_seqlens(self, blocks: Sequence[Block]) -> SmallTensors:
        if self._config.layout != "packed":
            return []
        lengths = self._geometry.lengths[self.placement.rows]
        return [
            (f"{block.prefix}cu_seqlens", np.append(0, np.cumsum(lengths[block.begin : block.end])).astype(np.int32))
            for block in blocks
        ]

    def _elements(self, block: Block, scope: Scope) -> int:
        """Values of a tensor. A packed one has one per token, whatever its scope."""
        if block.widths is None:
            return int(self._geometry.lengths[self.placement.rows[block.begin : block.end]].sum())
        return block.widths[scope] * (block.end - block.begin)

    def _header(
        self, small: SmallTensors, blocks: Sequence[Block], columns: Sequence[Column], metadata: dict[str, Any]
    ) -> tuple[bytes, int]:
        """The safetensors header, and the size of the whole file. Tensors of 4-byte elements come first, so that each
        is aligned."""
        entries: dict[str, Any] = {
            "__metadata__": {name: orjson.dumps(value).decode() for name, value in metadata.items()}
        }
        offset = 0
        for itemsize in (4, 1):
            shapes = [(name, array.dtype, list(array.shape)) for name, array in small if array.itemsize == itemsize]
            for block in blocks:
                for column in columns:
                    dtype = np.dtype(column.dtype)
                    if dtype.itemsize == itemsize:
                        shapes.append((block.prefix + column.name, dtype, self._shape(block, column.scope)))
            for name, dtype, shape in shapes:
                end = offset + itemsize * prod(shape)
                entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
                offset = end
        text = orjson.dumps(entries)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text, 8 + len(text) + offset

    def _shape(self, block: Block, scope: Scope) -> list[int]:
        if block.widths is None:
            return [self._elements(block, scope)]
        return [block.end - block.begin, block.widths[scope]]


def _blocks(mini_batches: Sequence[MiniBatchPlan], geometry: Geometry, config: RunConfig) -> list[list[Block]]:
    """Per shard in plan order its blocks. `pad_width` says over which rows widths are taken, padding rows included."""
    per_micro_batch = config.layout == "packed" or config.pad_width == "micro_batch"

    def widths(rows: Int64s) -> dict[Scope, int] | None:
        if config.layout == "packed":
            return None
        multiple = config.pad_to_multiple_of
        return {scope: -(-int(geometry.of(scope)[rows].max()) // multiple) * multiple for scope in _SCOPES}

    def joined(parts: Sequence[MiniBatchPlan]) -> Int64s:
        return np.concatenate([rank.rows for part in parts for rank in part.ranks])

    blocks: list[list[Block]] = []
    begin = 0
    of_batch = widths(joined(mini_batches)) if mini_batches else None
    for mini_batch in mini_batches:
        of_mini_batch = widths(joined([mini_batch]))
        for rank in mini_batch.ranks:
            if per_micro_batch:
                edges = enumerate(pairwise(rank.bounds.tolist()))
                blocks.append(
                    [
                        Block(f"micro_batch_{index:03d}/", begin + first, begin + last, widths(rank.rows[first:last]))
                        for index, (first, last) in edges
                    ]
                )
            else:
                shared = {"batch": of_batch, "mini_batch": of_mini_batch}.get(config.pad_width) or widths(rank.rows)
                blocks.append([Block("", begin, begin + len(rank.rows), shared)])
            begin += len(rank.rows)
    return blocks


def _leads(rows: Int64s, blocks: Sequence[Block], scope: Scope, geometry: Geometry) -> Int64s:
    """Elements before each row's own: padding, or, packed, the prompt before a response's column."""
    own = geometry.of(scope)[rows]
    counts = [block.end - block.begin for block in blocks]
    if any(block.widths is None for block in blocks):
        return geometry.lengths[rows] - own
    widths = np.array([block.widths[scope] for block in blocks if block.widths is not None], np.int64)
    return np.repeat(widths, counts) - own
