"""How rows fill micro-batches: first-fit packing under a token cap, splitting until there are enough, and which rows
share a micro-batch, at what cost.

Knows rows and tokens only; `schedule` handles ranks, prompt groups and missing rows. A row counts with all of its
tokens (`WholeRows`) or, if rows share prefixes, with the tokens that are new in its micro-batch (`SharingRows`): then
rows that share stay together as far as a cap allows.
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
    more_even,
    shared_loads,
)
from gristmill_service.pipeline.scheduling.plan import PADDING, RankPlan

MicroBatches = Sequence[Sequence[int]]


def first_fit(lengths: Sequence[int], cap: int) -> Int64s:
    """Returns for each row, in order, the first micro-batch that it still fits in; a row over `cap` is alone.

    Micro-batches are numbered as they are opened, and a row's number depends only on the rows before it: the packing
    of a prefix is the prefix of the packing. O(rows × log micro-batches).
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
    """Returns the tree with its leaves doubled: as many empty ones to the right."""
    doubled, level = [cap, cap], 1
    while level < len(room):
        doubled += [*room[level : 2 * level], *[cap] * level]
        level *= 2
    return doubled


class WholeRows:
    """The rows of a batch, by index, each with all of its tokens.

    lengths: int64 (rows,) tokens. flops: their cost; None: a row costs its tokens.
    """

    def __init__(self, lengths: Int64s, flops: Flops | None) -> None:
        self._lengths, self._tokens, self._flops = lengths, lengths.tolist(), flops
        self._loads = loads_of(lengths, flops)
        self._shared_loads: SharedLoads | None = None

    def between(self, start: int, end: int) -> Int64s:
        """Returns the rows `start:end` in the order in which they fill micro-batches."""
        return np.arange(start, end)

    def first_fit(self, rows: Int64s, cap: int) -> Int64s:
        """Returns the micro-batch of each of these rows, packed first-fit under a cap of tokens; a row over it is
        alone. Micro-batches are numbered as they are opened, and the packing of the first groups is the first part of
        the packing of all."""
        return first_fit(self._lengths[rows].tolist(), cap)

    def split_until(self, micro_batches: MicroBatches, target: int) -> list[list[int]]:
        """Returns `target` micro-batches, or as many as there can be, by halving the one with the most tokens
        repeatedly, the later one on a tie.

        The first half stays in place, the second is appended. Micro-batches that are not halved keep their rows' order.
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
        """Returns the same rows in as many micro-batches, from which to balance them."""
        return [list(rows) for rows in micro_batches]

    def balanced_by_rows(self, rows: Int64s, per_micro_batch: int, dp_size: int) -> tuple[Int64s, Int64s]:
        """Returns each of these rows' rank and micro-step, by load. All micro-batches but the last have
        `per_micro_batch` rows."""
        return balanced_by_rows(self._loads[rows], per_micro_batch, dp_size)

    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        """Places the same rows in as many micro-batches under the cap by load."""
        unsorted, numbers = _flat(micro_batches)
        by_row = np.argsort(unsorted, kind="stable")
        rows, packed = unsorted[by_row], numbers[by_row]
        real = rows != PADDING
        tokens, loads = np.where(real, self._lengths[rows], 0), np.where(real, self._loads[rows], 0.0)
        rank, step = balanced_by_tokens(tokens, loads, packed, cap, dp_size)
        return _ranks(rows, rank, step, len(micro_batches), dp_size)

    def more_even(self, balanced: tuple[RankPlan, ...], plain: tuple[RankPlan, ...]) -> tuple[RankPlan, ...]:
        """Returns the plan under which ranks wait less: `balanced`, unless `plain` happens to be more even."""
        return more_even(balanced, plain, self._loads, self._shared_loads)

    def _tokens_in(self, rows: Sequence[int]) -> int:
        return sum(map(self._tokens.__getitem__, rows))

    def _halve(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Puts rows, longest first (in their order on a tie), into the lighter half, the first half on a tie."""
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
    """Rows of which several may begin with the same tokens, which a micro-batch then has once.

    They are in the order of `sharing`, in which each shares most with the one before it. A family is a run of rows of
    which each shares something with the one before: it goes into one micro-batch, where it fits.
    """

    def __init__(self, lengths: Int64s, flops: Flops | None, sharing: Sharing) -> None:
        super().__init__(lengths, flops)
        self._sharing, self._shared_loads = sharing, shared_loads(sharing, flops)

    def between(self, start: int, end: int) -> Int64s:
        return self._sharing.order[np.sort(self._sharing.places[start:end])]

    def first_fit(self, rows: Int64s, cap: int) -> Int64s:
        lengths, shared = self._lengths[rows], self._shared(rows)
        begins = _parts_under(lengths, shared, cap)
        sizes = np.add.reduceat(lengths - shared, begins) + shared[begins] if len(rows) else begins
        return np.repeat(first_fit(sizes.tolist(), cap), np.diff(np.append(begins, len(rows))))

    def rearranged(self, micro_batches: MicroBatches) -> list[list[int]]:
        """Cuts as few families as possible, whatever equal numbers of rows would ask for."""
        real = [row for rows in micro_batches for row in rows if row != PADDING]
        split = self.split_until([real] if real else [], len(micro_batches))
        return split + [[PADDING]] * (len(micro_batches) - len(split))

    def balanced_by_rows(self, rows: Int64s, per_micro_batch: int, dp_size: int) -> tuple[Int64s, Int64s]:
        steps, short = divmod(len(rows), dp_size * per_micro_batch)
        full = steps * dp_size
        sizes = [*[per_micro_batch] * full, *((short + index) // dp_size for index in range(dp_size))]
        packed = np.repeat(np.arange(len(sizes)), sizes)
        loads = self._loads[rows] - loads_of(self._shared(rows, packed), self._flops)
        return dealt_in_rows(packed, loads, full, dp_size)

    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        """Keeps the rows of a family together that are in one micro-batch."""
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
        """Counts the tokens that each row shares with the one before it in its micro-batch. numbers: each row's
        micro-batch, ascending; None: all are in one."""
        begins = np.zeros(1, np.int64) if numbers is None else np.flatnonzero(np.diff(numbers, prepend=-1))
        return self._sharing.shared(rows, begins)

    def _tokens_in(self, rows: Sequence[int]) -> int:
        members = np.array(rows)
        return int((self._lengths[members] - self._shared(members)).sum())

    def _halve(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cuts where the larger half is smallest; tokens that both halves then begin with count in each."""
        members = np.array(rows)
        shared = self._shared(members)
        first = np.cumsum(self._lengths[members] - shared)
        second = first[-1] - first[:-1] + shared[1:]
        cut = int((np.maximum(first[:-1], second) + shared[1:]).argmin()) + 1
        return list(rows[:cut]), list(rows[cut:])


def _parts_under(lengths: Int64s, shared: Int64s, cap: int) -> Int64s:
    """Returns where families begin, and where those with more tokens than the cap are cut."""
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
    """Returns where to cut a family so that its parts have no more tokens than the cap (unless a part is a single row),
    and as few tokens as possible are repeated in a second part."""
    # before: tokens of all rows before each. best: of the best cut of those, the tokens repeated, and the last part's
    # begin.
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
    """Returns sizes that are at least the tokens and grow with the loads, which packing by load requires: a few long
    rows may cost more than many short ones with more tokens."""
    order = np.argsort(loads, kind="stable")
    most = np.maximum.accumulate(tokens[order])
    grown: Int64s = most[np.searchsorted(loads[order], loads, side="right") - 1]
    return grown


def _flat(micro_batches: MicroBatches) -> tuple[Int64s, Int64s]:
    """Returns the rows of all micro-batches, one after another, and each row's micro-batch."""
    rows = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    return rows, np.repeat(np.arange(len(micro_batches)), list(map(len, micro_batches)))


def _ranks(rows: Int64s, rank: Int64s, step: Int64s, micro_batches: int, dp_size: int) -> tuple[RankPlan, ...]:
    """Returns the ranks' plans. Rows of a micro-batch keep their order."""
    steps = micro_batches // dp_size
    sizes = np.bincount(rank * steps + step, minlength=micro_batches).reshape(dp_size, steps)
    shards = np.split(rows[np.lexsort((step, rank))], sizes.sum(axis=1).cumsum()[:-1])
    return tuple(RankPlan(*each) for each in zip(shards, np.insert(sizes.cumsum(axis=1), 0, 0, axis=1), strict=True))
