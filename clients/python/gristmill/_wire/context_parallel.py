"""Divides the token axis of a micro-batch among context-parallel ranks (specification, section 15)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gristmill._wire.columns import Int64s, starts_of

BLOCK = 128
"""The tokens of a tree that are dealt together: a block of FlexAttention's masks."""


def pieces_of(shards: str, size: int) -> int:
    """Return the number of equal pieces into which each row is cut; 1 if rows are not cut."""
    return {"zigzag": 2 * size, "contiguous": size}.get(shards, 1)


def row_positions(edges: Int64s, shards: str, size: int, rank: int) -> Int64s:
    """Return the positions on the token axis of a rank's pieces of each row, in order; int64 (n,).

    edges: int64 (rows + 1,), where rows begin on the axis, each with its padding, and the end of the last one.
    """
    pieces = [rank, 2 * size - 1 - rank] if shards == "zigzag" else [rank]
    lengths = np.diff(edges) // pieces_of(shards, size)
    begins = (edges[:-1, None] + lengths[:, None] * np.array(pieces)).ravel()
    return _spread(begins, np.repeat(lengths, len(pieces)))


def deal(depths: Int64s, size: int) -> tuple[Int64s, Int64s]:
    """Deal the blocks of a tree's token axis to ranks, as many to each (one more to some), the heaviest block first, to
    the rank with the least load. A token's load is the number of tokens to which it attends.

    depths: int64 (tokens,), each token's position in its row. Returns the rank of each block, int64 (blocks,), and the
    load of each rank, int64 (size,).
    """
    loads = np.add.reduceat(depths + 1, np.arange(0, len(depths), BLOCK))
    most = -(-len(loads) // size)
    owners, totals, counts = np.empty(len(loads), np.int64), [0] * size, [0] * size
    for block in np.argsort(-loads, kind="stable").tolist():
        rank = min((rank for rank in range(size) if counts[rank] < most), key=totals.__getitem__)
        owners[block] = rank
        totals[rank] += int(loads[block])
        counts[rank] += 1
    return owners, np.array(totals)


def tree_positions(depths: Int64s, size: int, rank: int) -> Int64s:
    """Return the positions on a tree's token axis of a rank's blocks, in order; int64 (n,). depths: as for `deal`."""
    begins = BLOCK * np.flatnonzero(deal(depths, size)[0] == rank)
    return _spread(begins, np.minimum(BLOCK, len(depths) - begins))


def tree_padding(parents: Int64s, ends: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each token of a tree is padding; bool (tokens,).

    parents: int64 (tokens,). ends: int64 (rows,), each row's last token.
    """
    is_padding = np.ones(len(parents), np.bool_)
    begins, counts = own_tokens(parents, ends)
    is_padding[_spread(begins, counts)] = False
    return is_padding


def own_tokens(parents: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Return where each row's own tokens begin on the axis of a tree, and how many they are; both int64 (rows,).

    They begin at the row's last token that does not follow the token before it on the axis, or after the row before.
    Padding follows a row, so it is not among them. Arguments: as for `tree_padding`.
    """
    branches = np.append(0, np.flatnonzero(parents != np.arange(len(parents)) - 1))
    begins = np.maximum(branches[np.searchsorted(branches, ends, "right") - 1], np.append(0, ends[:-1] + 1))
    return begins, ends + 1 - begins


def load_ratio(axes: Sequence[Int64s], size: int) -> float:
    """Return the load of the slowest rank over the mean load, of micro-batches that follow one another; 1 if ranks
    never wait. axes: the depths of each micro-batch's tokens."""
    loads = np.array([deal(depths, size)[1] for depths in axes])
    return float(loads.max(axis=1).sum() * size / loads.sum())


def _spread(begins: Int64s, counts: Int64s) -> Int64s:
    """Return the integers `begins[i]`, `begins[i] + 1` and so on, `counts[i]` of each."""
    spread: Int64s = np.arange(counts.sum()) + np.repeat(begins - starts_of(counts), counts)
    return spread
