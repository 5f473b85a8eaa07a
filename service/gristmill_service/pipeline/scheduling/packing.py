"""Packs rows into micro-batches: first-fit under a token cap, splitting until there are enough micro-batches, and the
cost of rows that share tokens in a micro-batch.

Uses only rows and tokens; `schedule` handles ranks, prompt groups and missing rows. A row counts with all its tokens
(`WholeRows`) or, if rows share prefixes, with the tokens that are new in its micro-batch (`SharingRows`). Rows that
share tokens then stay together if the cap allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain, count

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import Flops
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.balance import (
    Loads,
    SharedLoads,
    balanced_by_rows,
    balanced_by_tokens,
    dealt_in_rows,
    loads_of,
    most_even,
    shared_loads,
)
from gristmill_service.pipeline.scheduling.plan import PADDING, RankPlan

MicroBatches = Sequence[Sequence[int]]


def first_fit(lengths: Sequence[int], cap: int) -> Int64s:
    """Returns for each row, in order, the first micro-batch in which it fits. A row longer than `cap` is alone.

    Micro-batches are numbered as they are opened, and a row's number depends only on earlier rows: the packing of a
    prefix is the prefix of the packing. O(rows × log micro-batches).
    """
    # A tournament tree: room[leaves + slot] is the slot's remaining capacity, every other node the larger of its two
    # children. Unused slots have the full cap, so the leftmost slot that fits may be a new one.
    room, leaves = [cap, cap], 1
    opened = count()
    number_of_slot: list[int] = []
    numbers: list[int] = []
    for tokens in lengths:
        if tokens > cap:
            numbers.append(next(opened))
            continue
        if room[1] < tokens:
            room, leaves = _doubled(room, cap), 2 * leaves
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < tokens:
                node += 1
        slot = node - leaves
        if slot == len(number_of_slot):
            number_of_slot.append(next(opened))
        numbers.append(number_of_slot[slot])
        room[node] = most = room[node] - tokens
        while node > 1:  # update the nodes above, as far as they change; inline, because most of the time is spent here
            other = room[node ^ 1]
            if other > most:
                most = other
            node >>= 1
            if room[node] == most:
                break
            room[node] = most
    return np.array(numbers, dtype=np.int64)


def _doubled(room: Sequence[int], cap: int) -> list[int]:
    """Returns the tree with twice as many leaves. The new leaves, at the right, are empty."""
    doubled, level = [cap, cap], 1
    while level < len(room):
        doubled += [*room[level : 2 * level], *[cap] * level]
        level *= 2
    return doubled


class WholeRows:
    """The rows of a batch, by index, each with all of its tokens.

    lengths: int64 (rows,) tokens. flops: their cost; None: a row costs its tokens. costs: float64 (rows,), further
    FLOPs of each row; None: none.
    """

    def __init__(self, lengths: Int64s, flops: Flops | None, costs: Loads | None = None) -> None:
        self._lengths, self._tokens, self._flops = lengths, lengths.tolist(), flops
        self._loads = loads_of(lengths, flops, costs)
        self._grows_with_tokens = costs is None
        self._shared_loads: SharedLoads | None = None

    def between(self, start: int, end: int) -> Int64s:
        """Returns the rows `start:end` in the order in which they are packed."""
        return np.arange(start, end)

    def first_fit(self, rows: Int64s, cap: int) -> Int64s:
        """Returns the micro-batch of each of these rows, packed first-fit under a token cap; a longer row is alone.
        Micro-batches are numbered as they are opened. The packing of the first groups is the first part of the packing
        of all."""
        return first_fit(self._lengths[rows].tolist(), cap)

    def split_until(self, micro_batches: MicroBatches, target: int) -> list[list[int]]:
        """Returns `target` micro-batches, or as many as possible. Repeatedly halves the micro-batch with the most
        tokens, the later one on a tie.

        The first half stays in place, and the second is appended. Other micro-batches retain the order of their rows.
        """

        def entry(place: int) -> tuple[int, int]:
            """An entry of the heap: most tokens first, the later place on a tie."""
            return -self._tokens_in(result[place]), -place

        result = [list(rows) for rows in micro_batches]
        if len(result) >= target:
            return result
        heap = [entry(place) for place, rows in enumerate(result) if len(rows) > 1]
        heapq.heapify(heap)
        while heap and len(result) < target:
            place = -heapq.heappop(heap)[1]
            result[place], second = self._halve(result[place])
            result.append(second)
            for at in (place, len(result) - 1):
                if len(result[at]) > 1:
                    heapq.heappush(heap, entry(at))
        return result

    def rearranged(self, micro_batches: MicroBatches) -> list[list[int]]:
        """Returns the same rows in equally many micro-batches, from which `balanced` starts."""
        return [list(rows) for rows in micro_batches]

    def balanced_by_rows(self, rows: Int64s, per_micro_batch: int, dp_size: int) -> Sequence[tuple[Int64s, Int64s]]:
        """Returns placements of these rows by load, each as the rank and micro-step of every row. All micro-batches
        except the last have `per_micro_batch` rows, and ranks differ by at most one row."""
        return [balanced_by_rows(self._loads[rows], per_micro_batch, dp_size)]

    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        """Places the same rows by load in equally many micro-batches, under the cap."""
        unsorted, numbers = _flat(micro_batches)
        by_row = np.argsort(unsorted, kind="stable")
        rows, packed = unsorted[by_row], numbers[by_row]
        real = rows != PADDING
        tokens, loads = np.where(real, self._lengths[rows], 0), np.where(real, self._loads[rows], 0.0)
        sizes = tokens if self._grows_with_tokens else _growing(tokens, loads)
        rank, step = balanced_by_tokens(sizes, loads, packed, cap, dp_size)
        return _ranks(rows, rank, step, len(micro_batches), dp_size)

    def most_even(self, *plans: tuple[RankPlan, ...]) -> tuple[RankPlan, ...]:
        """Returns the plan with the least waiting, the first of equals."""
        return most_even(plans, self._loads, self._shared_loads)

    def _tokens_in(self, rows: Sequence[int]) -> int:
        return sum(map(self._tokens.__getitem__, rows))

    def _halve(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Assigns rows, longest first (on a tie in order), to the half with fewer tokens (on a tie the first)."""
        first: list[int] = []
        second: list[int] = []
        ahead = 0
        for row in sorted(rows, key=lambda row: -self._tokens[row]):
            if ahead <= 0:
                first.append(row)
                ahead += self._tokens[row]
            else:
                second.append(row)
                ahead -= self._tokens[row]
        return first, second


class SharingRows(WholeRows):
    """Rows that may begin with the same tokens, which a micro-batch then contains only once.

    The rows are in the order of `sharing`, in which each row shares most with the previous one. A family is a run of
    rows in which each row shares tokens with the previous one. It is placed in one micro-batch if it fits.
    """

    def __init__(self, lengths: Int64s, flops: Flops | None, sharing: Sharing, costs: Loads | None = None) -> None:
        super().__init__(lengths, flops, costs)
        self._sharing, self._shared_loads = sharing, shared_loads(sharing, flops)

    def between(self, start: int, end: int) -> Int64s:
        return self._sharing.order[np.sort(self._sharing.places[start:end])]

    def first_fit(self, rows: Int64s, cap: int) -> Int64s:
        lengths, shared = self._lengths[rows], self._shared(rows)
        begins = _parts_under(lengths, shared, cap)
        sizes = np.add.reduceat(lengths - shared, begins) + shared[begins] if len(rows) else begins
        return np.repeat(first_fit(sizes.tolist(), cap), np.diff(np.append(begins, len(rows))))

    def rearranged(self, micro_batches: MicroBatches) -> list[list[int]]:
        """Splits as few families as possible, even if micro-batches then have different numbers of rows."""
        real = [row for rows in micro_batches for row in rows if row != PADDING]
        split = self.split_until([real] if real else [], len(micro_batches))
        return split + [[PADDING]] * (len(micro_batches) - len(split))

    def balanced_by_rows(self, rows: Int64s, per_micro_batch: int, dp_size: int) -> Sequence[tuple[Int64s, Int64s]]:
        """Also returns a placement that keeps the order of rows, and so families together, which may be less even."""
        steps, short = divmod(len(rows), dp_size * per_micro_batch)
        full = steps * dp_size
        sizes = [*[per_micro_batch] * full, *((short + index) // dp_size for index in range(dp_size))]
        packed = np.repeat(np.arange(len(sizes)), sizes)
        loads = self._loads[rows] - loads_of(self._shared(rows, packed), self._flops)
        in_order = dealt_in_rows(packed, loads, full, dp_size)
        return [in_order, *super().balanced_by_rows(rows, per_micro_batch, dp_size)]

    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        """Keeps rows of a family together if they are in one micro-batch."""
        rows, numbers = _flat(micro_batches)
        real, shared = rows != PADDING, self._shared(rows, numbers)
        tokens = np.where(real, self._lengths[rows] - shared, 0)
        loads = np.where(real, self._loads[rows] - loads_of(shared, self._flops), 0.0)
        begins = np.flatnonzero(shared == 0)
        tokens, loads, packed = np.add.reduceat(tokens, begins), np.add.reduceat(loads, begins), numbers[begins]
        rank, step = balanced_by_tokens(_growing(tokens, loads), loads, packed, cap, dp_size)
        counts = np.diff(np.append(begins, len(rows)))
        in_order = np.argsort(np.where(real, self._sharing.places[rows], PADDING), kind="stable")
        rank, step = np.repeat(rank, counts)[in_order], np.repeat(step, counts)[in_order]
        return _ranks(rows[in_order], rank, step, len(micro_batches), dp_size)

    def _shared(self, rows: Int64s, numbers: Int64s | None = None) -> Int64s:
        """Counts the tokens that each row shares with the previous row in its micro-batch. numbers: each row's
        micro-batch, ascending; None: all rows are in one micro-batch."""
        begins = np.zeros(1, np.int64) if numbers is None else np.flatnonzero(np.diff(numbers, prepend=-1))
        return self._sharing.shared(rows, begins)

    def _tokens_in(self, rows: Sequence[int]) -> int:
        members = np.array(rows)
        return int((self._lengths[members] - self._shared(members)).sum())

    def _halve(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Splits where the larger half is smallest. Tokens at the beginning of both halves count in each."""
        members = np.array(rows)
        shared = self._shared(members)
        first = np.cumsum(self._lengths[members] - shared)
        second = first[-1] - first[:-1] + shared[1:]
        cut = int((np.maximum(first[:-1], second) + shared[1:]).argmin()) + 1
        return list(rows[:cut]), list(rows[cut:])


def _parts_under(lengths: Int64s, shared: Int64s, cap: int) -> Int64s:
    """Returns where families begin, and where families with more tokens than the cap are split."""
    begins = np.flatnonzero(shared == 0)
    sizes = np.add.reduceat(lengths - shared, begins) if len(begins) else begins
    large = np.flatnonzero(sizes > cap)
    if not len(large):
        return begins
    edges, all_begins = np.append(begins, len(lengths)), [begins]
    for begin, end in zip(edges[large].tolist(), edges[large + 1].tolist(), strict=True):
        cuts = _cuts(lengths[begin:end].tolist(), shared[begin:end].tolist(), cap)
        all_begins.append(np.array(cuts, np.int64) + begin)
    return np.sort(np.concatenate(all_begins))


def _cuts(lengths: Sequence[int], shared: Sequence[int], cap: int) -> list[int]:
    """Returns where to split a family so that its parts have at most `cap` tokens (except a part with a single row),
    and as few tokens as possible are repeated."""
    # before: the tokens of all rows before each row. best: the repeated tokens and the start of the last part, for the
    # best split of the rows before each row.
    before = [0]
    best = [(0, 0)]
    for row, length in enumerate(lengths):
        before.append(before[-1] + length - shared[row])
        least = (best[row][0] + shared[row], row)
        for begin in range(row - 1, -1, -1):
            if before[-1] - before[begin] > cap:
                break
            if before[-1] - before[begin] + shared[begin] <= cap:
                least = min(least, (best[begin][0] + shared[begin], begin))
        best.append(least)
    cuts, at = [], len(lengths)
    while (at := best[at][1]) > 0:
        cuts.append(at)
    return cuts


def _growing(tokens: Int64s, loads: Loads) -> Int64s:
    """Returns sizes that are at least the tokens and grow with the loads, as packing by load requires: a few long rows
    may cost more than many short rows with more tokens."""
    order = np.argsort(loads, kind="stable")
    most = np.maximum.accumulate(tokens[order])
    grown: Int64s = most[np.searchsorted(loads[order], loads, side="right") - 1]
    return grown


def _flat(micro_batches: MicroBatches) -> tuple[Int64s, Int64s]:
    """Returns the concatenated rows of all micro-batches, and each row's micro-batch."""
    rows = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    return rows, np.repeat(np.arange(len(micro_batches)), list(map(len, micro_batches)))


def _ranks(rows: Int64s, rank: Int64s, step: Int64s, micro_batches: int, dp_size: int) -> tuple[RankPlan, ...]:
    """Returns the ranks' plans. The order of rows within a micro-batch is retained."""
    steps = micro_batches // dp_size
    sizes = np.bincount(rank * steps + step, minlength=micro_batches).reshape(dp_size, steps)
    shards = np.split(rows[np.lexsort((step, rank))], sizes.sum(axis=1).cumsum()[:-1])
    return tuple(RankPlan(*each) for each in zip(shards, np.insert(sizes.cumsum(axis=1), 0, 0, axis=1), strict=True))
