"""Places rows so that ranks are equally loaded, micro-step by micro-step (`balance: tokens | flops`).

All ranks wait for the slowest rank in each micro-step, so the cost is the sum over steps of the heaviest micro-batch.
The longest row determines the time of its step. Therefore steps are filled from the heaviest down: while one row weighs
more than an even share of the rest, the step that it dominates is filled up to its weight. The remaining rows are
spread evenly, each time the heaviest row to the lightest micro-batch.

Uses only rows, loads and capacities. The caller determines the number of micro-batches and their padding.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill_service.config import Flops
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, RankPlan

Loads = NDArray[np.float64]
SharedLoads = Callable[[RankPlan], Loads]

# The barrier ratio at which the search for a better packing stops. First-fit reaches it if there are many steps.
_EVEN_ENOUGH = 1.001

# Plans that differ by less count as equally even.
_ROUNDING = 1e-12


def loads_of(lengths: Int64s, flops: Flops | None, costs: Loads | None = None) -> Loads:
    """Returns each row's cost: FLOPs in units of the larger coefficient (which avoids overflow), or tokens.

    lengths: (rows,) tokens. costs: (rows,) further FLOPs of each row; None: tokens are all that counts.
    """
    linear, quadratic = (1.0, 0.0) if flops is None else (flops.linear, flops.quadratic)
    tokens, unit = lengths.astype(np.float64), max(linear, quadratic) or 1.0
    loads: Loads = (linear / unit + quadratic / unit * tokens) * tokens
    return loads if costs is None else loads + costs / unit


def balanced_by_tokens(lengths: Int64s, loads: Loads, packed: Int64s, cap: int, dp_size: int) -> tuple[Int64s, Int64s]:
    """Returns each row's rank and micro-step, with the number of micro-batches of `packed`, and under its cap.

    lengths, loads: (rows,) tokens and their cost, which grows with them and is 0 for padding. packed: (rows,) the
    micro-batch of each row without balance; their number is a multiple of `dp_size`. If the cap prevents placing rows
    by load, these micro-batches are assigned to ranks unchanged. A row longer than `cap` is alone.
    """
    micro_batches = int(packed.max()) + 1
    totals = _totals(packed, loads, micro_batches)
    slowest = _slowest(totals, dp_size)
    if slowest * dp_size > _EVEN_ENOUGH * totals.sum() and micro_batches < len(packed):
        even = _pack(np.minimum(lengths, cap), loads, cap, micro_batches, dp_size, least=1)
        if even is not None and _slowest(even_totals := _totals(even, loads, micro_batches), dp_size) < slowest:
            packed, totals = even, even_totals
    rank, step = _deal(totals, _heaviest_first(totals), dp_size)
    return rank[packed], step[packed]


def balanced_by_rows(loads: Loads, per_micro_batch: int, dp_size: int) -> tuple[Int64s, Int64s]:
    """Returns each row's rank and micro-step. Micro-batches have `per_micro_batch` rows, except in the last step, which
    contains the lightest rows, and where ranks differ by at most one row. loads: (rows,)."""
    steps, short = divmod(len(loads), dp_size * per_micro_batch)
    full = steps * dp_size
    heaviest_first = _heaviest_first(loads)
    most, last = np.split(heaviest_first, [len(loads) - short])
    packed = np.empty(len(loads), dtype=np.int64)
    if full:
        even = _pack(np.ones_like(most), loads[most], per_micro_batch, full, dp_size, least=per_micro_batch)
        assert even is not None  # rows of one size leave no gaps
        packed[most] = even
    spread = _spread([1] * short, loads[last].tolist(), [(short + index) // dp_size for index in range(dp_size)])
    assert spread is not None
    packed[last] = full + np.array(spread, dtype=np.int64)
    return dealt_in_rows(packed, loads, full, dp_size)


def dealt_in_rows(packed: Int64s, loads: Loads, full: int, dp_size: int) -> tuple[Int64s, Int64s]:
    """Returns each row's rank and micro-step. Assigns micro-batches by load, and the last `dp_size` to the last step.

    packed, loads: (rows,) each row's micro-batch and load. full: the number of micro-batches before the last step.
    """
    totals = _totals(packed, loads, full + dp_size)
    order = np.append(_heaviest_first(totals[:full]), full + _heaviest_first(totals[full:]))
    rank, step = _deal(totals, order, dp_size)
    return rank[packed], step[packed]


def shared_loads(sharing: Sharing, flops: Flops | None) -> SharedLoads:
    """Returns a function that computes the cost that a rank's rows save by sharing tokens with the previous row.

    `loads_of` returns the cost of a row and of its shared prefix. The rest of the row costs the difference, which
    includes attention to the shared tokens.
    """
    return lambda rank: loads_of(sharing.shared(rank.rows, rank.bounds[:-1]), flops)


def most_even(
    plans: Sequence[tuple[RankPlan, ...]], loads: Loads, shared: SharedLoads | None = None
) -> tuple[RankPlan, ...]:
    """Returns the plan with the least waiting, the first of those that are equal but for rounding.

    loads: (rows,) of the batch. shared: the function of `shared_loads`.
    """
    padded = np.append(loads, 0.0)
    times = [float(_micro_batch_loads(ranks, padded, shared).max(axis=0).sum()) for ranks in plans]
    least = min(times)
    return next(plan for plan, time in zip(plans, times, strict=True) if time * (1 - _ROUNDING) <= least)


def barrier_ratio(mini_batches: Iterable[MiniBatchPlan], loads: Loads, shared: SharedLoads | None = None) -> float:
    """Returns the sum over micro-steps of the slowest rank's load, divided by a rank's mean load; 1 if no rank waits.

    loads: (rows,) of the batch; padding rows cost nothing. shared: the function of `shared_loads`.
    """
    slowest = mean = 0.0
    padded = np.append(loads, 0.0)
    for mini_batch in mini_batches:
        by_rank = _micro_batch_loads(mini_batch.ranks, padded, shared)
        slowest += float(by_rank.max(axis=0).sum())
        mean += float(by_rank.sum()) / len(by_rank)
    return slowest / mean if mean else 1.0


def _micro_batch_loads(ranks: Sequence[RankPlan], padded: Loads, shared: SharedLoads | None) -> Loads:
    """Returns each micro-batch's cost, (ranks, micro-steps). padded: (rows + 1,) with 0 at -1, the index PADDING."""
    row_loads = [padded[rank.rows] - (0.0 if shared is None else shared(rank)) for rank in ranks]
    return np.array([np.add.reduceat(each, rank.bounds[:-1]) for each, rank in zip(row_loads, ranks, strict=True)])


def _slowest(loads: Loads, dp_size: int) -> float:
    """Returns the sum over micro-steps of the heaviest micro-batch, if micro-batches of similar load share steps."""
    return float(np.sort(loads)[::-1][::dp_size].sum())


def _totals(packed: Int64s, loads: Loads, micro_batches: int) -> Loads:
    return np.bincount(packed, weights=loads, minlength=micro_batches).astype(np.float64, copy=False)


def _heaviest_first(loads: Loads) -> Int64s:
    return np.argsort(-loads, kind="stable")


def _deal(loads: Loads, order: Int64s, dp_size: int) -> tuple[Int64s, Int64s]:
    """Returns each micro-batch's rank and step. Every `dp_size` micro-batches, in `order`, form a step, in which
    heavier micro-batches are assigned to ranks with less load so far."""
    so_far = [0.0] * dp_size
    ranks: list[int] = []
    for step in loads[order].reshape(-1, dp_size).tolist():
        lightest_first = sorted(range(dp_size), key=so_far.__getitem__)
        ranks += lightest_first
        for rank, load in zip(lightest_first, step, strict=True):
            so_far[rank] += load
    rank_of, step_of = np.empty_like(order), np.empty_like(order)
    rank_of[order] = ranks
    step_of[order] = np.arange(len(order)) // dp_size
    return rank_of, step_of


def _pack(sizes: Int64s, loads: Loads, room: int, micro_batches: int, per_step: int, least: int) -> Int64s | None:
    """Returns each row's micro-batch, of `micro_batches`, a multiple of `per_step`. Each has at least `least` rows, and
    a total size of at most `room`. Returns None if there is too little capacity to place rows by load.

    sizes, loads: (rows,), both grow with the row. There are at least `least` rows per micro-batch.
    """
    backwards = np.argsort(loads[::-1], kind="stable")
    order = len(loads) - 1 - backwards  # lightest first; on a tie the later row, so that the earlier is taken first
    rows = _Pool(sizes[order].tolist(), loads[order].tolist())
    packed = np.empty(len(loads), dtype=np.int64)
    done, left = 0, float(loads.sum())
    while (missing := micro_batches - done) > per_step:
        if rows.heaviest + (least - 1) * rows.lightest <= left / missing:
            break
        for micro_batch in _fill(rows, room, per_step, (missing - per_step) * least, least):
            packed[order[micro_batch]] = done
            left -= sum(rows.loads[row] for row in micro_batch)
            done += 1
    rest = rows.drain()
    spread = _spread([rows.sizes[row] for row in rest], [rows.loads[row] for row in rest], [room] * missing)
    if spread is None:
        return None
    packed[order[rest]] = np.array(spread, dtype=np.int64) + done
    return packed


def _fill(rows: _Pool, room: int, micro_batches: int, keep: int, least: int) -> list[list[int]]:
    """Fills a step with the heaviest rows, and then with rows that fit under the weight of the heaviest. Leaves at
    least `keep` rows."""
    step = [[rows.take_heaviest()] for _ in range(micro_batches)]
    level = rows.loads[step[0][0]] + (least - 1) * rows.lightest
    rooms = [room - rows.sizes[micro_batch[0]] for micro_batch in step]
    lightest = [(rows.loads[micro_batch[0]], index) for index, micro_batch in enumerate(step)]
    heapq.heapify(lightest)
    while lightest and len(rows) > keep:
        load, index = heapq.heappop(lightest)
        missing = least - len(step[index])
        row = rows.take_at_most(rooms[index], level - load - max(0, missing - 1) * rows.lightest)
        if row is None:
            if missing <= 0:
                continue
            row = rows.take_lightest()
        step[index].append(row)
        rooms[index] -= rows.sizes[row]
        heapq.heappush(lightest, (load + rows.loads[row], index))
    return step


def _spread(sizes: Sequence[int], loads: Sequence[float], rooms: Sequence[int]) -> list[int] | None:
    """Assigns each row, heaviest first, to the lightest micro-batch with capacity. Returns None if there is none.

    Micro-batches without capacity are set aside until a row fits, because rows only get smaller.
    """
    room = list(rooms)
    open_ = [(0.0, index) for index in range(len(room))]
    waiting: list[tuple[int, float, int]] = []
    packed: list[int] = []
    for size, weight in zip(sizes, loads, strict=True):
        while waiting and -waiting[0][0] >= size:
            _, load, index = heapq.heappop(waiting)
            heapq.heappush(open_, (load, index))
        while open_ and room[open_[0][1]] < size:
            load, index = heapq.heappop(open_)
            heapq.heappush(waiting, (-room[index], load, index))
        if not open_:
            return None
        load, index = open_[0]
        packed.append(index)
        room[index] -= size
        heapq.heapreplace(open_, (load + weight, index))
    return packed


class _Pool:
    """Rows, lightest first. Removes the heaviest row below a bound in almost constant time.

    `_below[i]` leads from the i-th lightest row to the next remaining one (union-find with path halving).
    """

    def __init__(self, sizes: list[int], loads: list[float]) -> None:
        self.sizes, self.loads = sizes, loads
        self._below = list(range(len(sizes) + 1))
        self._first = 0
        self._count = len(sizes)

    def __len__(self) -> int:
        return self._count

    @property
    def heaviest(self) -> float:
        return self.loads[self._find(len(self.loads)) - 1]

    @property
    def lightest(self) -> float:
        return self.loads[self._find_lightest()]

    def take_heaviest(self) -> int:
        return self._take(self._find(len(self.loads)))

    def take_lightest(self) -> int:
        return self._take(self._find_lightest() + 1)

    def take_at_most(self, size: int, load: float) -> int | None:
        place = self._find(min(bisect_right(self.sizes, size), bisect_right(self.loads, load)))
        return self._take(place) if place else None

    def drain(self) -> list[int]:
        """Returns all remaining rows, heaviest first."""
        return [place - 1 for place in range(len(self.loads), 0, -1) if self._below[place] == place]

    def _take(self, place: int) -> int:
        self._below[place] = place - 1
        self._count -= 1
        return place - 1

    def _find(self, place: int) -> int:
        below = self._below
        while below[place] != place:
            below[place] = below[below[place]]
            place = below[place]
        return place

    def _find_lightest(self) -> int:
        while self._below[self._first + 1] != self._first + 1:
            self._first += 1
        return self._first
