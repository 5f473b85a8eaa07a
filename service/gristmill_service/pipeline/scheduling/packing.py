"""Micro-batches under a token cap: first-fit packing, and splitting until there are enough of them.

Knows rows and tokens only: ranks, prompt groups and what happens when there are too few rows are `schedule`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from gristmill._wire.columns import Int64s


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
