"""A shard's compact form is described as runs of memory, like its file, and leaves out what its lengths tell.

The format is that of `gristmill._wire.codecs.compact_shards`. Made only for who asks: a store of files never does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gristmill._wire.codecs import compact_shards
from gristmill._wire.codecs.compact_shards import PACKED, PART, Form
from gristmill_service.pipeline.layout.columns import Column, Placement, Runs, Scope
from gristmill_service.pipeline.layout.extra_columns import Cut
from gristmill_service.pipeline.layout.iovec import Iovec, Region, coalesced


@dataclass(frozen=True, slots=True)
class Block:
    """A block holds the rows whose tensors are laid out together: a shard's, or those of a micro-batch.

    prefix: of their names. begin, end: which rows of the placement. widths: per scope the columns of the padded
    tensors; None: packed, one row after another.
    """

    prefix: str
    begin: int
    end: int
    widths: dict[Scope, int] | None


class Compaction:
    """Holds the columns of all rows of a model's shards in the form in which they travel."""

    def __init__(self, placement: Placement, columns: Sequence[Column]) -> None:
        self.placement, self.columns = placement, columns

    @cached_property
    def runs(self) -> list[tuple[Runs, ...]]:
        """Each column's runs. Shards of several threads may make them twice, which does no harm."""
        return [column.compact(self.placement) for column in self.columns]


class CompactShard:
    """One shard's compact form. itemsizes: of the numbers of each part. own, cuts: of each part, the bytes before its
    tensors per token, and the tensors after these. size: of the shard's file."""

    def __init__(
        self,
        compaction: Compaction,
        itemsizes: Sequence[int],
        blocks: Sequence[Block],
        own: Sequence[Region],
        cuts: Sequence[Sequence[Cut]],
        size: int,
    ) -> None:
        self._compaction, self._itemsizes, self._blocks = compaction, itemsizes, blocks
        self._own, self._cuts, self._size = own, cuts, size

    @cached_property
    def iovec(self) -> Iovec:
        described = list(self._parts())
        parts = np.array([part for part, _ in described], PART)
        parts["nbytes"] = [int(iovec[:, 1].sum()) for _, iovec in described]
        own, rows = self._compaction.placement.own, slice(self._blocks[0].begin, self._blocks[-1].end)
        self._head = Region(compact_shards.head(parts, own["sequence"][rows], own["response"][rows], self._size))
        return coalesced(np.concatenate([self._head.whole(), *(iovec for _, iovec in described)]))

    def _parts(self) -> Iterator[tuple[tuple[Any, ...], Iovec]]:
        """Yields the parts in the file's order: each as the table has it, but for its size, and its bytes."""
        first = self._blocks[0].begin
        for itemsize, own, cuts in zip(self._itemsizes, self._own, self._cuts, strict=True):
            yield _VERBATIM, own.whole()
            for block in self._blocks:
                rows = block.begin - first, block.end - first
                for column, runs in zip(self._compaction.columns, self._compaction.runs, strict=True):
                    if column.itemsize == itemsize:
                        width = PACKED if block.widths is None else block.widths[column.scope]
                        scope, inner = compact_shards.SCOPES.index(column.scope), math.prod(column.shape)
                        part = (column.form, scope, itemsize, 0, *rows, width, inner, 0, column.fill, 0)
                        yield part, _joined([one.of(block.begin, block.end) for one in runs])
            if cuts:
                yield _VERBATIM, _joined([cut.iovec for cut in cuts])


_VERBATIM = (Form.VERBATIM, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _joined(parts: Sequence[Iovec]) -> Iovec:
    return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
