"""Finds the tokens that rows share, for `layout: prefix_tree`: the common prefixes of rows of a prompt group.

Every token that a row is the first to have sampled keeps a position of its own, so that at most one row trains a
position, with its own advantage. The tokens before a row's first such token may be shared: its prompt, and tokens that
an earlier row trains. In a depth-first walk of the resulting tree each row shares most with the row before it, and two
rows share the minimum of what the rows between them share: two numbers per row describe the whole tree. Without those
between, the two share more where both have tokens that one of those sampled, too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill_service.pipeline.rows.joins import common_prefix, extends
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan

NONE = -1


@dataclass(frozen=True, eq=False)
class Sharing:
    """The rows of a batch in an order in which rows that share tokens are adjacent.

    order: int64 (rows,), row indices; the rows of a prompt group stay within its range.
    commons: int64 (rows,), how many first tokens the row at each place shares with the row before it; 0 for the first
        row of a prompt group.
    tokens, limits: of the rows, and int64 (rows,), how many first tokens each may share. multiple: `shared` is rounded
        down to a multiple of it.
    """

    order: Int64s
    commons: Int64s
    tokens: Ragged
    limits: Int64s
    multiple: int = 1

    def rounded_down(self, multiple: int) -> Sharing:
        """Returns the same rows, of which fewer tokens count as shared. With row lengths rounded up, their differences
        are at least what the rows take on an axis that is padded to the multiple."""
        return replace(self, multiple=multiple)

    @cached_property
    def places(self) -> Int64s:
        """Each row's place in the order; int64 (rows,)."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    def shared(self, rows: Int64s, begins: Int64s) -> Int64s:
        """Returns how many first tokens each row shares with the row before it in its micro-batch; int64 (n,).

        rows: int64 (n,), the rows of micro-batches one after another, each one's in this order; negative for padding
        rows, which share nothing. begins: where micro-batches begin among them.
        """
        shared = np.zeros(len(rows), np.int64)
        if len(rows) < 2:
            return shared
        places = np.where(rows < 0, NONE, self.places[rows])
        follows = (places[1:] > places[:-1]) & (places[:-1] >= 0)
        inner = begins[(begins > 0) & (begins < len(rows))]
        follows[inner - 1] = False
        pairs = np.flatnonzero(follows)
        # Two rows share at least the minimum of what the rows from one to the other share.
        spans = np.stack([places[pairs] + 1, places[pairs + 1] + 1], axis=1).ravel()
        least = np.minimum.reduceat(np.append(self.commons, 0), spans)[::2] if len(pairs) else spans
        shared[pairs + 1] = self._longest(rows[pairs], rows[pairs + 1], least)
        return shared if self.multiple == 1 else shared // self.multiple * self.multiple

    def _longest(self, before: Int64s, rows: Int64s, least: Int64s) -> Int64s:
        """Returns how many first tokens rows share with those before them: more than `least` where a row shares more
        with one that is not in the micro-batch. All int64 (pairs,)."""
        values, starts = self.tokens.values, self.tokens.starts
        # Rows of different groups share 0, and need no comparison.
        more = np.flatnonzero((least > 0) & (least < np.minimum(self.limits[rows], self.tokens.lengths[before])))
        more = more[values[starts[before[more]] + least[more]] == values[starts[rows[more]] + least[more]]]
        for pair in more.tolist():
            prefix = self.tokens[rows[pair]][: self.limits[rows[pair]]]
            least[pair] = common_prefix(self.tokens[before[pair]], prefix)
        return least

    def shared_tokens(self, mini_batches: Iterable[MiniBatchPlan]) -> int:
        """Counts the tokens that planned rows share with the row before them."""
        ranks = [rank for mini_batch in mini_batches for rank in mini_batch.ranks]
        return sum(int(self.shared(rank.rows, rank.bounds[:-1]).sum()) for rank in ranks)


def find_sharing(rows: Rows, tokens: Ragged, group_bounds: Int64s, *, weighs_observations: bool = False) -> Sharing:
    """Finds the tokens that the rows of each prompt group share.

    tokens: of the steps. group_bounds: int64 (groups + 1,), row bounds of the prompt groups.
    weighs_observations: whether observations are trained, too, and so keep positions of their own.
    """
    row_tokens = Ragged(tokens.values, tokens.starts[rows.last], rows.lengths)
    limits = _limits(rows, weighs_observations=weighs_observations)
    groups = np.repeat(np.arange(len(group_bounds) - 1), np.diff(group_bounds))
    before = _known_before(row_tokens, limits, rows.trajectories, groups)
    order, commons = np.arange(len(rows)), np.maximum(before, 0)
    for group in np.unique(groups[before == NONE]).tolist():
        span = slice(int(group_bounds[group]), int(group_bounds[group + 1]))
        walk, commons[span] = _Group(row_tokens.take(span), limits[span], before[span]).walk()
        order[span] = walk + span.start
    return Sharing(order, commons, row_tokens, limits)


def _limits(rows: Rows, *, weighs_observations: bool) -> Int64s:
    """Returns how many tokens each row may share: those before the first that it trains, or whose observation it
    weighs; int64 (rows,)."""
    if not len(rows):
        return rows.lengths
    begins = rows.per_visit(rows.prompt_lengths) + rows.starts + rows.shared
    begins = np.where(rows.kept > rows.shared, begins, rows.per_visit(rows.lengths))
    if weighs_observations:
        observed = np.where(rows.is_first, rows.observed, 0)
        ends_before = rows.per_visit(rows.prompt_lengths) + rows.starts - observed
        begins = np.where(observed > 0, np.minimum(begins, ends_before), begins)
    limits: Int64s = np.minimum.reduceat(begins, rows.edges[:-1])
    return limits


def _known_before(row_tokens: Ragged, limits: Int64s, trajectories: Int64s, groups: Int64s) -> Int64s:
    """Returns how many tokens each row shares with the row before it, if no search is needed; else -1.

    None is needed for a group's first row (0), for the rows after it of its trajectory that each continue all of the
    row before them, and for a row that shares its limit with a row before it whose own limit is no larger.
    row_tokens: the tokens of rows. limits: of `_limits`. groups: of rows. All int64 (rows,).
    """
    lengths, count = row_tokens.lengths, len(row_tokens)
    known = np.zeros(count, np.int64)
    follows = np.zeros(count, np.bool_)
    follows[1:] = groups[1:] == groups[:-1]
    goes_on = np.zeros(count, np.bool_)
    goes_on[1:] = follows[1:] & (trajectories[1:] == trajectories[:-1]) & (lengths[:-1] <= limits[1:])
    goes_on = extends(row_tokens, goes_on)
    # Behind a row that does not, one before that may share more.
    breaks = np.cumsum(follows & ~goes_on)
    goes_on &= breaks == breaks[np.maximum.accumulate(np.where(follows, 0, np.arange(count)))]
    known[1:] = np.where(goes_on[1:], lengths[:-1], 0)
    data, item = bytes_of(row_tokens.values), row_tokens.values.itemsize
    starts, sizes = (item * row_tokens.starts).tolist(), (item * limits).tolist()
    ends = (item * (row_tokens.starts + lengths)).tolist()
    candidates = follows & ~goes_on
    known[candidates] = NONE
    candidates[1:] &= limits[:-1] <= limits[1:]
    for row in np.flatnonzero(candidates).tolist():
        start, size, other = starts[row], sizes[row], starts[row - 1]
        begin = data[other : min(other + size, ends[row - 1])].tobytes()
        if len(begin) == size and begin.startswith(data[start : start + size]):
            known[row] = size // item
    return known


class _Group:
    """The rows of one prompt group. Each shares its first tokens with an earlier one: its base.

    tokens, limits: of the rows. before: how many tokens each shares with the row before it, -1 if not known. Rows with
    a lower limit count as earlier, so that a row that samples a token precedes rows that merely contain it.
    """

    def __init__(self, tokens: Ragged, limits: Int64s, before: Int64s) -> None:
        self._tokens, self._limits, self._before = tokens.arrays(), limits.tolist(), before.tolist()
        self._sorted: list[tuple[bytes, int]] = []

    def walk(self) -> tuple[Int64s, Int64s]:
        """Returns the group's rows in depth-first order, and their commons, as `Sharing` has them."""
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
        return np.array(order), np.array(commons)[order]

    def _bases(self) -> tuple[list[int], list[int]]:
        """Returns each row's base, the row that contributes the last token that they share, -1 for none; and the number
        of those tokens."""
        limits, count = self._limits, len(self._limits)
        bases, commons = [NONE] * count, [0] * count
        for row in sorted(range(count), key=limits.__getitem__):
            if self._before[row] == limits[row]:
                bases[row], commons[row] = row - 1, limits[row]
            elif self._sorted:
                bases[row], commons[row] = self._nearest(row)
            insort(self._sorted, (self._tokens[row].tobytes(), row))
        for row in range(count):
            while bases[row] != NONE and commons[row] <= commons[bases[row]]:
                bases[row] = bases[bases[row]]
        return bases, commons

    def _nearest(self, row: int) -> tuple[int, int]:
        """Returns the earlier row that shares most tokens with this one, and how many. Sorted by their bytes, it is one
        of the two neighbors, which is removed if this row has all of its tokens. Of several, it is the row before this
        one, if this one continues it: they share as much in a micro-batch without the others."""
        prefix = self._tokens[row][: self._limits[row]]
        begin = prefix.tobytes()
        at = bisect_left(self._sorted, (begin, NONE))
        neighbors = []
        for place in range(max(0, at - 1), min(at + 1, len(self._sorted))):
            whole, base = self._sorted[place]
            tokens = self._tokens[base]
            common = len(tokens) if begin.startswith(whole) else common_prefix(tokens, prefix)
            neighbors.append((common, base, place))
        common, base, place = max(neighbors)
        if common == len(self._tokens[base]):
            del self._sorted[place]
        if row and np.array_equal(self._tokens[row - 1], prefix[:common]):
            base = row - 1
        return (base, common) if common else (NONE, 0)
