"""Describes the token axis of `layout: prefix_tree`: the positions of rows that share prefixes, and tokens' parents.

A micro-batch's axis has its rows in order, each without the tokens that it shares with the row before it. So the axis
is the tree of their tokens in depth-first order: a token is followed by the rest of its own row, then by the branches
of later rows, the deepest first. A token's descendants are the tokens after it up to the first that is no deeper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill_service.pipeline.layout.columns import ByteRanges, Column, Placement
from gristmill_service.pipeline.layout.iovec import Region

ROOT = -1


class Branches(NamedTuple):
    """Each row's own tokens on the axis of its micro-batch: where they begin, how many they are, and the parent of the
    first one, -1 where that begins the row. All int64 (rows,). Padding may follow them."""

    begins: Int64s
    counts: Int64s
    parents: Int64s

    def between(self, begin: int, end: int) -> Branches:
        return Branches(*(values[begin:end] for values in self))


def branches(shared: Int64s, counts: Int64s, on_axis: Int64s, edges: Sequence[int]) -> Branches:
    """Returns the rows' positions on the axes of their micro-batches.

    shared: int64 (rows,), how many first tokens each shares with the row before it in its micro-batch. counts: int64
    (rows,), its other tokens. on_axis: int64 (rows,), the same with the padding after the row. edges: the
    begins of micro-batches among the rows, and the end of the last one.
    """
    ends = np.cumsum(on_axis)
    firsts = np.array(edges, np.int64)
    begins = ends - on_axis - np.repeat(np.append(0, ends)[firsts[:-1]], firsts[1:] - firsts[:-1])
    return Branches(begins, counts, _parents(shared.tolist(), begins.tolist()))


def _parents(shared: list[int], begins: list[int]) -> Int64s:
    """Returns the parent of each row's first own token, which is a token of the last row before it that shares less."""
    parents: list[int] = []
    # The ancestors of the last row, each of which shares more than the one before it.
    path: list[tuple[int, int]] = []
    for common, begin in zip(shared, begins, strict=True):
        while path and path[-1][0] >= common:
            path.pop()
        parents.append(path[-1][1] + common - 1 - path[-1][0] if common else ROOT)
        path.append((common, begin))
    return np.array(parents, np.int64)


def axis_tensors(rows: Branches) -> dict[str, NDArray[np.int32]]:
    """Returns the tensors that describe a micro-batch's axis, given its rows.

    segment_starts: (segments,), the first token of each run of tokens without a branch. segment_parents: (segments,),
    the segment whose last token is the parent of that one, -1 for none. row_ends: (rows,), each row's last token.
    """
    begins, counts, parents = rows
    attached = np.unique(parents[parents >= 0], return_counts=True)
    only = dict(zip(*(values.tolist() for values in attached), strict=True))
    goes_on = np.array(
        [
            parent == begin - 1 and only.get(parent) == 1
            for begin, parent in zip(begins.tolist(), parents.tolist(), strict=True)
        ],
        np.bool_,
    )
    starts = np.unique(np.concatenate([begins[~goes_on], parents[~goes_on & (parents >= 0)] + 1]))
    followed = starts - 1
    at = np.searchsorted(begins, starts)
    is_begin = begins[np.minimum(at, len(begins) - 1)] == starts
    followed[is_begin] = parents[at[is_begin]]
    tensors = {
        "segment_starts": starts,
        "segment_parents": np.searchsorted(starts, followed, side="right") - 1,
        "row_ends": begins + counts - 1,
    }
    return {name: values.astype(np.int32) for name, values in tensors.items()}


class Counting(Column):
    """Integers that begin a row's own tokens with `firsts`, then continue with `seconds` and count up: depths, and the
    parents of tokens.

    firsts, seconds: int64 (n,), of the placed rows. counts: int64 (n,), each one's own tokens, and the padding after
    them, which continues the row.
    """

    dtype, itemsize, scope = "I32", 4, "sequence"

    def __init__(self, name: str, firsts: Int64s, seconds: Int64s, counts: Int64s) -> None:
        self.name, self._counts = name, counts
        self._firsts, self._seconds = firsts.astype(np.int32), seconds
        self._numbers = Region(np.arange(int((seconds + counts).max(initial=0)), dtype=np.int32))
        self._begins = Region(self._firsts)

    def laid_out(self, placement: Placement) -> ByteRanges:
        return self.ranges(placement)

    def ranges(self, placement: Placement) -> ByteRanges:
        count = len(self._counts)
        iovec = np.empty((count, 2, 2), np.int64)
        iovec[:, 0] = self._begins.ranges(4 * np.arange(count), np.full(count, 4))
        iovec[:, 1] = self._numbers.ranges(4 * self._seconds, 4 * (self._counts - 1))
        return ByteRanges(iovec.reshape(-1, 2), 2 * np.arange(count + 1), (self._begins, self._numbers))


def tree_columns(rows: Branches, shared: Int64s, on_axis: Int64s) -> list[Column]:
    """Returns `position_ids`, a token's depth in its row, and `parents`, the token before it on the axis, which is the
    one whose output predicts it; -1 at a root. on_axis: as `branches` has it."""
    return [
        Counting("position_ids", shared, shared + 1, on_axis),
        Counting("parents", rows.parents, rows.begins, on_axis),
    ]
