"""How rows fill micro-batches: first-fit packing under a token cap, splitting until there are enough, and which rows go
together at what cost.

Knows rows and tokens only: ranks, prompt groups and what happens when there are too few rows are `schedule`'s. Rows
cost what they are long (`WholeRows`), or, where they share their beginnings, what of a micro-batch is distinct
(`SharingRows`): then those that share stay together as far as a cap allows.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain, count

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import Flops
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.balance import (
    Loads,
    balanced_by_rows,
    balanced_by_tokens,
    dealt_in_rows,
    loads_of,
    more_even,
    shared_loads,
)
from gristmill_service.pipeline.scheduling.plan import PADDING, RankPlan


def first_fit(lengths: Sequence[int], cap: int) -> Int64s:
    """Returns for each row, in order, the first micro-batch that it still fits in; a row over `cap` stands alone.

    Micro-batches are numbered as they are opened, and a row's number depends only on the rows before it: the packing
    of a prefix is the prefix of the packing. O(rows × log micro-batches).
    """
    # A tournament tree: room[leaves + slot] is what the slot still holds, every other node the larger of its two
    # children. Slots not yet used are there with the full cap, so the leftmost that fits may be a new one.
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
        while node > 1:  # the nodes above it, as far as they change; not a function, it is most of the time spent here
            other = room[node ^ 1]
            if other > most:
                most = other
            node >>= 1
            if room[node] == most:
                break
            room[node] = most
    return np.array(numbers, dtype=np.int64)


def split_until(micro_batches: Sequence[Sequence[int]], target: int, tokens_of: Sequence[int]) -> list[list[int]]:
    """Returns `target` micro-batches, or as many as there can be, by halving the one with the most tokens repeatedly.

    Only those with two rows or more are halved, and the later one on a tie. The first half stays in place, the second
    is appended. `tokens_of[row]` is positive, so no half is empty. Those never halved keep their rows' order.
    """
    return split_by(
        micro_batches,
        target,
        lambda rows: sum(map(tokens_of.__getitem__, rows)),
        lambda rows: _halve(rows, tokens_of),
    )


def split_by(
    micro_batches: Sequence[Sequence[int]],
    target: int,
    tokens_in: Callable[[Sequence[int]], int],
    halve: Callable[[Sequence[int]], tuple[list[int], list[int]]],
) -> list[list[int]]:
    """The same, with the tokens in a micro-batch, and its halves, as these tell."""

    def entry(rows: Sequence[int], place: int) -> tuple[int, int]:
        """An entry of the heap: most tokens first, the later place on a tie."""
        return -tokens_in(rows), -place

    result = [list(rows) for rows in micro_batches]
    if len(result) >= target:
        return result
    heap = [entry(rows, place) for place, rows in enumerate(result) if len(rows) > 1]
    heapq.heapify(heap)
    while heap and len(result) < target:
        place = -heapq.heappop(heap)[1]
        first, second = halve(result[place])
        result[place] = first
        result.append(second)
        for rows, at in ((first, place), (second, len(result) - 1)):
            if len(rows) > 1:
                heapq.heappush(heap, entry(rows, at))
    return result


def _doubled(room: Sequence[int], cap: int) -> list[int]:
    """Returns the tree with as many empty leaves more, to the right of those it has."""
    doubled, level = [cap, cap], 1
    while level < len(room):
        doubled += [*room[level : 2 * level], *[cap] * level]
        level *= 2
    return doubled


def _halve(rows: Sequence[int], tokens_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Puts rows, longest first (in the given order on a tie), into the lighter half, the first half on a tie."""
    first: list[int] = []
    second: list[int] = []
    ahead = 0
    for row in sorted(rows, key=lambda row: -tokens_of[row]):
        if ahead <= 0:
            first.append(row)
            ahead += tokens_of[row]
        else:
            second.append(row)
            ahead -= tokens_of[row]
    return first, second


MicroBatches = Sequence[Sequence[int]]


class RowPacking(ABC):
    """The rows of a batch, by index. lengths: int64 (rows,) tokens. flops: what rows cost; None: their tokens."""

    @abstractmethod
    def between(self, start: int, end: int) -> Int64s:
        """Returns the rows `start:end` in the order in which they fill micro-batches."""

    @abstractmethod
    def first_fit(self, own: Int64s, cap: int) -> Int64s:
        """Returns the micro-batch of each of these rows, packed first-fit under a cap of tokens; a row over it stands
        alone. Micro-batches are numbered as they are opened, and the packing of the first groups is the first part of
        the packing of all."""

    @abstractmethod
    def split_until(self, micro_batches: MicroBatches, target: int) -> list[list[int]]:
        """Returns `target` micro-batches, or as many as there can be, by halving the one with the most tokens
        repeatedly, the later one on a tie."""

    @abstractmethod
    def apart(self, micro_batches: MicroBatches) -> list[list[int]]:
        """Returns the same rows in as many micro-batches, from which to balance them."""

    @abstractmethod
    def balanced_by_rows(self, own: Int64s, per_micro_batch: int, dp_size: int) -> tuple[Int64s, Int64s]:
        """Returns each of these rows' rank and micro-step, by load; micro-batches have so many rows, but the last."""

    @abstractmethod
    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        """Places the same rows in as many micro-batches under the cap by load."""

    @abstractmethod
    def more_even(self, balanced: tuple[RankPlan, ...], plain: tuple[RankPlan, ...]) -> tuple[RankPlan, ...]:
        """Returns the plan under which ranks wait less: `balanced`, unless `plain` happens to be more even."""


class WholeRows(RowPacking):
    def __init__(self, lengths: Int64s, flops: Flops | None) -> None:
        self._lengths, self._tokens = lengths, lengths.tolist()
        self._loads = loads_of(lengths, flops)

    def between(self, start: int, end: int) -> Int64s:
        return np.arange(start, end)

    def first_fit(self, own: Int64s, cap: int) -> Int64s:
        return first_fit(self._lengths[own].tolist(), cap)

    def split_until(self, micro_batches: MicroBatches, target: int) -> list[list[int]]:
        return split_until(micro_batches, target, self._tokens)

    def apart(self, micro_batches: MicroBatches) -> list[list[int]]:
        return [list(rows) for rows in micro_batches]

    def balanced_by_rows(self, own: Int64s, per_micro_batch: int, dp_size: int) -> tuple[Int64s, Int64s]:
        return balanced_by_rows(self._loads[own], per_micro_batch, dp_size)

    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        unsorted, numbers = _flat(micro_batches)
        by_row = np.argsort(unsorted, kind="stable")
        rows, packed = unsorted[by_row], numbers[by_row]
        real = rows != PADDING
        tokens, loads = np.where(real, self._lengths[rows], 0), np.where(real, self._loads[rows], 0.0)
        rank, step = balanced_by_tokens(tokens, loads, packed, cap, dp_size)
        return _ranks(rows, rank, step, len(micro_batches), dp_size)

    def more_even(self, balanced: tuple[RankPlan, ...], plain: tuple[RankPlan, ...]) -> tuple[RankPlan, ...]:
        return more_even(balanced, plain, self._loads)


class SharingRows(RowPacking):
    """Rows in the order of `sharing`, in which each shares most with the one before it. A family is a run of rows of
    which each shares something with the one before: what goes into one micro-batch, where it fits."""

    def __init__(self, lengths: Int64s, flops: Flops | None, sharing: Sharing) -> None:
        self._lengths, self._flops, self._sharing = lengths, flops, sharing
        self._loads, self._shared_loads = loads_of(lengths, flops), shared_loads(sharing, flops)

    def between(self, start: int, end: int) -> Int64s:
        return self._sharing.order[np.sort(self._sharing.places[start:end])]

    def first_fit(self, own: Int64s, cap: int) -> Int64s:
        lengths, shared = self._lengths[own], self._shared(own)
        begins = _parts_under(lengths, shared, cap)
        sizes = np.add.reduceat(lengths - shared, begins) + shared[begins] if len(own) else begins
        return np.repeat(first_fit(sizes.tolist(), cap), np.diff(np.append(begins, len(own))))

    def split_until(self, micro_batches: MicroBatches, target: int) -> list[list[int]]:
        return split_by(micro_batches, target, self._distinct, self._halve)

    def apart(self, micro_batches: MicroBatches) -> list[list[int]]:
        """As few families as can be are cut, whatever equal numbers of rows would ask for."""
        own = [row for rows in micro_batches for row in rows if row != PADDING]
        apart = self.split_until([own] if own else [], len(micro_batches))
        return apart + [[PADDING]] * (len(micro_batches) - len(apart))

    def balanced_by_rows(self, own: Int64s, per_micro_batch: int, dp_size: int) -> tuple[Int64s, Int64s]:
        steps, short = divmod(len(own), dp_size * per_micro_batch)
        full = steps * dp_size
        sizes = [*[per_micro_batch] * full, *((short + index) // dp_size for index in range(dp_size))]
        packed = np.repeat(np.arange(len(sizes)), sizes)
        loads = self._loads[own] - loads_of(self._shared(own, packed), self._flops)
        return dealt_in_rows(packed, loads, full, dp_size)

    def balanced(self, micro_batches: MicroBatches, cap: int, dp_size: int) -> tuple[RankPlan, ...]:
        """What of a family is in one micro-batch stays together."""
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

    def more_even(self, balanced: tuple[RankPlan, ...], plain: tuple[RankPlan, ...]) -> tuple[RankPlan, ...]:
        return more_even(balanced, plain, self._loads, self._shared_loads)

    def _shared(self, rows: Int64s, numbers: Int64s | None = None) -> Int64s:
        """What each shares with the one before it in its micro-batch. numbers: of those, ascending; None: it is one."""
        begins = np.zeros(1, np.int64) if numbers is None else np.flatnonzero(np.diff(numbers, prepend=-1))
        return self._sharing.shared(rows, begins)

    def _distinct(self, rows: Sequence[int]) -> int:
        own = np.array(rows)
        return int((self._lengths[own] - self._shared(own)).sum())

    def _halve(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cuts where the larger of the halves is smallest; what then stands in both counts twice."""
        own = np.array(rows)
        shared = self._shared(own)
        first = np.cumsum(self._lengths[own] - shared)
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
    edges, found = np.append(begins, len(lengths)), [begins]
    for begin, end in zip(edges[large].tolist(), edges[large + 1].tolist(), strict=True):
        cuts = _cuts(lengths[begin:end].tolist(), shared[begin:end].tolist(), cap)
        found.append(np.array(cuts, np.int64) + begin)
    return np.sort(np.concatenate(found))


def _cuts(lengths: Sequence[int], shared: Sequence[int], cap: int) -> list[int]:
    """Returns where to cut a family so that its parts have no more tokens than the cap, but for single rows, and as few
    as can be stand in two of them."""
    # Tokens of all rows before each, and of the best parts of those: the tokens repeated, and where the last begins.
    before = [0]
    best = [(0, 0)]
    for row, length in enumerate(lengths):
        before.append(before[-1] + length - shared[row])
        found = (best[row][0] + shared[row], row)
        for begin in range(row - 1, -1, -1):
            if before[-1] - before[begin] > cap:
                break
            if before[-1] - before[begin] + shared[begin] <= cap:
                found = min(found, (best[begin][0] + shared[begin], begin))
        best.append(found)
    cuts, at = [], len(lengths)
    while (at := best[at][1]) > 0:
        cuts.append(at)
    return cuts


def _growing(tokens: Int64s, loads: Loads) -> Int64s:
    """Returns sizes that are no smaller than the tokens and grow with the loads, as packing by load needs them: a few
    long rows may cost more than many short ones with more tokens."""
    order = np.argsort(loads, kind="stable")
    most = np.maximum.accumulate(tokens[order])
    grown: Int64s = most[np.searchsorted(loads[order], loads, side="right") - 1]
    return grown


def _flat(micro_batches: MicroBatches) -> tuple[Int64s, Int64s]:
    """Returns the rows of all, one micro-batch after another, and of each the number of its own."""
    rows = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    return rows, np.repeat(np.arange(len(micro_batches)), list(map(len, micro_batches)))


def _ranks(rows: Int64s, rank: Int64s, step: Int64s, micro_batches: int, dp_size: int) -> tuple[RankPlan, ...]:
    """Returns the ranks' plans. Rows of a micro-batch keep their order."""
    steps = micro_batches // dp_size
    sizes = np.bincount(rank * steps + step, minlength=micro_batches).reshape(dp_size, steps)
    shards = np.split(rows[np.lexsort((step, rank))], sizes.sum(axis=1).cumsum()[:-1])
    return tuple(RankPlan(*each) for each in zip(shards, np.insert(sizes.cumsum(axis=1), 0, 0, axis=1), strict=True))
