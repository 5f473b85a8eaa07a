"""What rows share, for `layout: prefix_tree`: which rows of a prompt group begin with the same tokens, and how many.

Every token that a row is the first to have sampled keeps a position of its own, so that one row at most trains a
position, with its own advantage. Tokens before a row's first such one are what it may share: its prompt, and what an
earlier row trains. In the order of a depth-first walk of that tree each row shares most with the one before it, and two
rows share the least of what those between them do: two numbers a row are the whole tree.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill_service.pipeline.rows.joins import common_prefix, extends
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan

NONE = -1


@dataclass(frozen=True, eq=False)
class Sharing:
    """The rows of a batch in an order in which those that share stand together.

    order: int64 (rows,), row indices; the rows of a prompt group keep its places.
    commons: int64 (rows,), with how many tokens the row at each place begins as the one before it does, and has them
        where that one has them; 0 where nothing is shared, as by the first row of a prompt group.
    """

    order: Int64s
    commons: Int64s

    @cached_property
    def places(self) -> Int64s:
        """Where in the order each row stands; int64 (rows,)."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    def shared(self, rows: Int64s, begins: Int64s) -> Int64s:
        """With how many tokens each row begins as the one before it in its micro-batch; int64 (n,).

        rows: int64 (n,), the rows of micro-batches one after another, each one's in this order; negative for padding
        rows, which share nothing. begins: where micro-batches begin among them.
        """
        found = np.zeros(len(rows), np.int64)
        if len(rows) < 2:
            return found
        places = np.where(rows < 0, NONE, self.places[rows])
        follows = (places[1:] > places[:-1]) & (places[:-1] >= 0)
        inner = begins[(begins > 0) & (begins < len(rows))]
        follows[inner - 1] = False
        pairs = np.flatnonzero(follows)
        # Two rows share the least of what those from the one to the other do.
        spans = np.stack([places[pairs] + 1, places[pairs + 1] + 1], axis=1).ravel()
        least = np.minimum.reduceat(np.append(self.commons, 0), spans)[::2] if len(pairs) else spans
        found[pairs + 1] = least
        return found

    def shared_tokens(self, mini_batches: Iterable[MiniBatchPlan]) -> int:
        """Counts the tokens of planned rows that stand with the row before them."""
        ranks = [rank for mini_batch in mini_batches for rank in mini_batch.ranks]
        return sum(int(self.shared(rank.rows, rank.bounds[:-1]).sum()) for rank in ranks)


def find_sharing(rows: Rows, tokens: Ragged, group_bounds: Int64s) -> Sharing:
    """Returns what the rows of each prompt group share.

    tokens: of the steps. group_bounds: int64 (groups + 1,), row bounds of the prompt groups.
    """
    own = Ragged(tokens.values, tokens.starts[rows.last], rows.lengths)
    limits = _limits(rows)
    groups = np.repeat(np.arange(len(group_bounds) - 1), np.diff(group_bounds))
    before = _known_before(own, limits, rows.trajectories, groups)
    order, commons = np.arange(len(rows)), np.maximum(before, 0)
    for group in np.unique(groups[before == NONE]).tolist():
        span = slice(int(group_bounds[group]), int(group_bounds[group + 1]))
        walk = _Group(own.take(span), limits[span], before[span]).walk()
        order[span], commons[span] = walk.order + span.start, walk.commons
    return Sharing(order, commons)


def _limits(rows: Rows) -> Int64s:
    """Counts the tokens before the first of each row that no earlier row has sampled; int64 (rows,)."""
    if not len(rows):
        return rows.lengths
    begins = rows.per_visit(rows.prompt_lengths) + rows.starts + rows.shared
    begins = np.where(rows.kept > rows.shared, begins, rows.per_visit(rows.lengths))
    found: Int64s = np.minimum.reduceat(begins, rows.edges[:-1])
    return found


def _known_before(own: Ragged, limits: Int64s, trajectories: Int64s, groups: Int64s) -> Int64s:
    """Returns how many tokens each row shares with the row before it, where that is all that it may share and that one
    may share no more, or all that one of its own trajectory has; 0 for a group's first row, -1 where it has to be
    searched for.

    own: tokens of rows. limits: as `_limits` gives them. groups: of rows. All int64 (rows,).
    """
    lengths, count = own.lengths, len(own)
    found = np.zeros(count, np.int64)
    follows = np.zeros(count, np.bool_)
    follows[1:] = groups[1:] == groups[:-1]
    goes_on = np.zeros(count, np.bool_)
    goes_on[1:] = follows[1:] & (trajectories[1:] == trajectories[:-1]) & (lengths[:-1] <= limits[1:])
    goes_on = extends(own, goes_on)
    found[1:] = np.where(goes_on[1:], lengths[:-1], 0)
    data, item = bytes_of(own.values), own.values.itemsize
    starts, sizes = (item * own.starts).tolist(), (item * limits).tolist()
    ends = (item * (own.starts + lengths)).tolist()
    looked_at = follows & ~goes_on
    looked_at[1:] &= limits[:-1] <= limits[1:]
    found[follows & ~goes_on] = NONE
    for row in np.flatnonzero(looked_at).tolist():
        start, size, other = starts[row], sizes[row], starts[row - 1]
        begin = data[other : min(other + size, ends[row - 1])].tobytes()
        if len(begin) == size and begin.startswith(data[start : start + size]):
            found[row] = size // item
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """The rows of one group, as `Sharing` has those of a batch."""

    order: Int64s
    commons: Int64s


class _Group:
    """The rows of one prompt group. Each begins as an earlier one: its base.

    tokens, limits: of the rows. before: with how many tokens each begins as the row before it, -1 where that is not
    known. Earlier are rows that may share less, so that who samples a token comes before those that merely have it.
    """

    def __init__(self, tokens: Ragged, limits: Int64s, before: Int64s) -> None:
        self._tokens, self._limits, self._before = tokens.arrays(), limits.tolist(), before.tolist()
        # Rows of which each goes on with all of the one before it: the last has what they all have.
        lengths = [0, *tokens.lengths[:-1].tolist()]
        self._goes_on = [0 < common == length for common, length in zip(self._before, lengths, strict=True)]
        self._sorted: list[tuple[bytes, int]] = []

    def walk(self) -> _Walk:
        bases, commons = self._bases()
        children: dict[int, list[int]] = {}
        for row, base in enumerate(bases):
            children.setdefault(base, []).append(row)
        for rows in children.values():
            rows.sort(key=lambda row: -commons[row])
        order: list[int] = []
        stack = children[NONE][::-1]
        while stack:
            row = stack.pop()
            order.append(row)
            stack += children.get(row, [])[::-1]
        found = np.array(order)
        return _Walk(found, np.array(commons)[found])

    def _bases(self) -> tuple[list[int], list[int]]:
        """Returns each row's base, -1 for none, which is the row that brings the last token that they share, and how
        many these are."""
        limits, count = self._limits, len(self._limits)
        bases, commons = [NONE] * count, [0] * count
        last = list(range(count))
        for row in range(count - 2, -1, -1):
            if self._goes_on[row + 1]:
                last[row] = last[row + 1]
        for row in sorted(range(count), key=limits.__getitem__):
            if self._goes_on[row]:
                bases[row], commons[row] = row - 1, self._before[row]
                continue
            if self._before[row] > 0:
                bases[row], commons[row] = row - 1, self._before[row]
            elif self._sorted:
                bases[row], commons[row] = self._nearest(row)
            insort(self._sorted, (self._tokens[last[row]].tobytes(), last[row]))
        for row in range(count):
            while bases[row] != NONE and commons[row] <= commons[bases[row]]:
                bases[row] = bases[bases[row]]
        return bases, commons

    def _nearest(self, row: int) -> tuple[int, int]:
        """Returns the earlier row with which this one begins with the most tokens, and how many of them it may share.
        In the order of their bytes it is one of the two beside it."""
        own = self._tokens[row][: self._limits[row]]
        at = bisect_left(self._sorted, (own.tobytes(), NONE))
        found = (0, NONE)
        for _, other in self._sorted[max(0, at - 1) : at + 1]:
            found = max(found, (common_prefix(self._tokens[other], own), other))
        return (found[1], found[0]) if found[0] else (NONE, 0)
