"""Assigns each row to a mini-batch, a data-parallel rank and a micro-batch.

Implements sections 5 and 6 of the specification: mini-batch boundaries, padding, alignment, and dropping or rejecting
if micro-batches cannot be aligned. Uses the lengths of rows and, for `layout: prefix_tree`, the tokens that they
share, but no other data; no other layout changes a plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import lcm
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import MOST_PADDED_TO, Model, RunConfig
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.packing import SharingRows, WholeRows
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan, RankPlan

Count = TypeVar("Count", int, Int64s)

# A number of tokens that no micro-batch exceeds.
_NO_CAP = 1 << 62


class MisalignedError(InvalidArgumentError):
    """A mini-batch cannot be aligned for this `dp_size`, but possibly for another."""


def schedule(
    lengths: Int64s,
    group_bounds: Int64s,
    config: RunConfig,
    sharing: Sharing | None = None,
    partitions: Int64s | None = None,
    costs: NDArray[np.float64] | None = None,
) -> list[MiniBatchPlan]:
    """Returns the mini-batches of one batch: the policy's, then the critic's.

    lengths: (rows,) the tokens (prompt and response) of each row in batch order, at least 1.
    group_bounds: (groups + 1,) row bounds of the prompt groups, from 0 to the number of rows; no group is empty.
    sharing: the tokens that rows share, with `layout: prefix_tree`; caps and loads then count distinct tokens. Padding
    after rows counts, too.
    partitions: (rows,) the number of each row's partition, by first appearance; None if the rows have none.
    costs: (rows,) FLOPs of each row in addition to those of its tokens; None: none.

    Raises MisalignedError if a mini-batch cannot be aligned and `on_misaligned` forbids padding, and
    InvalidArgumentError if micro-batches cannot be divided among partitions.
    """
    divide = _divide_groups if config.mini_batch_unit == "prompt" else _divide_rows
    parts = chain.from_iterable(divide(group_bounds, model, config) for model in config.models)
    flops, costs = (config.flops, costs) if config.balance == "flops" else (None, None)
    lengths = config.padded(lengths)
    rows = (
        WholeRows(lengths, flops, costs)
        if sharing is None
        else SharingRows(lengths, flops, sharing.rounded_down(config.pad_rows_to_multiple_of), costs)
    )
    return [_plan(part, rows, partitions, config) for part in parts]


# --- Mini-batch boundaries (section 5)


@dataclass(frozen=True, slots=True)
class _Part:
    """A mini-batch before alignment.

    groups: the groups of its rows. ends: (groups,) the number of its rows up to the end of each group. padding: the
    number of padding rows that fill it to its size with `mini_batch_unit: sequence`, which never drops a group.
    """

    model: Model
    index: int
    start: int
    end: int
    groups: range
    ends: Int64s
    padding: int


def _divide_groups(group_bounds: Int64s, model: Model, config: RunConfig) -> Iterator[_Part]:
    """Yields mini-batches with as many whole prompt groups as their size. The last one contains the rest."""
    groups, size = len(group_bounds) - 1, config.mini_batch_size(model)
    for index, first in enumerate(range(0, groups, size)):
        last = min(first + size, groups)
        start, end = int(group_bounds[first]), int(group_bounds[last])
        ends = group_bounds[first + 1 : last + 1] - start
        yield _Part(model, index, start, end, range(first, last), ends, 0)


def _divide_rows(group_bounds: Int64s, model: Model, config: RunConfig) -> Iterator[_Part]:
    """Yields mini-batches with as many rows as their size, including evenly distributed padding rows."""
    rows, size = int(group_bounds[-1]), config.mini_batch_size(model)
    multiple = lcm(*map(config.mini_batch_size, config.models))
    mini_batches = _ceil_div(rows, multiple) * (multiple // size)
    real, extra = divmod(rows, mini_batches) if mini_batches else (0, 0)
    for index in range(mini_batches):
        start = index * real + min(index, extra)
        end = start + real + (index < extra)
        first = int(np.searchsorted(group_bounds, start, side="right")) - 1
        last = int(np.searchsorted(group_bounds, end, side="left"))
        ends = np.minimum(group_bounds[first + 1 : last + 1], end) - start
        yield _Part(model, index, start, end, range(first, last), ends, size - (end - start))


# --- Alignment and ranks (section 6)


class _Rows(NamedTuple):
    """The rows of a mini-batch that may share micro-batches: all of them, or those of one partition.

    ordered: the rows in the order in which they are packed. ends: (groups,) the number of these rows up to the end of
    each group of the mini-batch. padding: the number of padding rows to add. partition: the partition's number.
    """

    ordered: Int64s
    ends: Int64s
    padding: int
    partition: int = 0

    def kept(self, groups: int) -> int:
        """Returns how many of the rows are in the mini-batch's first `groups` groups."""
        return int(self.ends[groups - 1]) if groups else 0


class _Packing(NamedTuple):
    """How rows are packed. aligned: bool (groups,), whether the rows of each prefix of the mini-batch's groups can be
    aligned. ranks: returns the ranks' plans for the first rows, given their number."""

    rows: _Rows
    aligned: NDArray[np.bool_]
    ranks: Callable[[int], tuple[RankPlan, ...]]


def _plan(part: _Part, batch: WholeRows, partitions: Int64s | None, config: RunConfig) -> MiniBatchPlan:
    """Packs the rows of each partition by itself. Each rank gets equally many micro-batches of it."""
    packings = _packings(part, _by_partition(part, batch, partitions), batch, config)
    kept = _kept_groups(part, np.logical_and.reduce([packing.aligned for packing in packings]), config)
    # All groups of a partition may be dropped, but a mini-batch without rows has padding rows.
    chosen = [one for one in packings if one.rows.kept(kept) or len(packings) == 1]
    ranks = [one.ranks(one.rows.kept(kept)) for one in chosen]
    return MiniBatchPlan(
        model=part.model,
        index=part.index,
        start=part.start,
        end=part.end,
        kept_end=part.start + (int(part.ends[kept - 1]) if kept else 0),
        groups=part.groups[:kept],
        dropped_groups=part.groups[kept:],
        ranks=ranks[0] if len(ranks) == 1 else tuple(map(_joined, zip(*ranks, strict=True))),
        partitions=np.repeat([one.rows.partition for one in chosen], [len(each[0].bounds) - 1 for each in ranks]),
    )


def _joined(plans: Sequence[RankPlan]) -> RankPlan:
    """Concatenates the micro-batches of one rank."""
    sizes = np.concatenate([np.diff(plan.bounds) for plan in plans])
    return RankPlan(np.concatenate([plan.rows for plan in plans]), np.append(0, np.cumsum(sizes)))


def _by_partition(part: _Part, batch: WholeRows, partitions: Int64s | None) -> list[_Rows]:
    """Returns the rows of each partition of the mini-batch, by first appearance; all rows if they have none."""
    ordered = batch.between(part.start, part.end)
    if partitions is None or part.start == part.end:
        return [_Rows(ordered, part.ends, part.padding)]
    numbers, first = np.unique(partitions[part.start : part.end], return_index=True)
    members = [(number, partitions[ordered] == number) for number in numbers[np.argsort(first)].tolist()]
    return [
        _Rows(ordered[is_member], np.cumsum(is_member)[part.ends - 1], part.padding, number)
        for number, is_member in members
    ]


def _packings(part: _Part, rows: list[_Rows], batch: WholeRows, config: RunConfig) -> list[_Packing]:
    """Returns the packings of partitions."""
    if len(rows) > 1:
        _check_partitions(part, len(rows), config)
    if config.token_cap is not None:
        return [_by_tokens(one, batch, config.token_cap, config) for one in rows]
    if config.micro_batch.count is not None:
        counts = _apportioned(config.micro_batch.count, [len(one.ordered) for one in rows])
        return [_by_count(one, batch, count, config) for one, count in zip(rows, counts, strict=True)]
    return [_by_size(one, batch, config) for one in rows]


def _check_partitions(part: _Part, partitions: int, config: RunConfig) -> None:
    """Rejects partitions among which micro-batches cannot be divided."""
    where = f"{part.model} mini-batch {part.index}: its rows have {partitions} partitions"
    if config.micro_batch.count is not None and config.micro_batch.count < partitions:
        raise InvalidArgumentError(
            f"{where}, and with micro_batch.count: {config.micro_batch.count} a rank has fewer micro-batches; raise "
            "the count, or use micro_batch: {max_tokens: ...}"
        )
    if config.micro_batch.count is None and partitions * config.least_rows > MOST_PADDED_TO:
        raise InvalidArgumentError(
            f"{where}, each padded to at least {config.least_rows} rows, and the limit is {MOST_PADDED_TO} in total; "
            "send fewer partitions, or lower dp_size × microbatch_group_size (with VPP) or × micro_batch.size with full"
        )


def _apportioned(count: int, rows: Sequence[int]) -> list[int]:
    """Divides `count` micro-batches among partitions: one to each, and each further one to the partition with the most
    rows per micro-batch, the first on a tie. rows: the number of each partition's rows."""
    counts = [1] * len(rows)
    heap = [(-float(size), place) for place, size in enumerate(rows)]
    heapq.heapify(heap)
    for _ in range(count - len(rows)):
        place = heap[0][1]
        counts[place] += 1
        heapq.heapreplace(heap, (-rows[place] / counts[place], place))
    return counts


def _by_size(rows: _Rows, batch: WholeRows, config: RunConfig) -> _Packing:
    """Assigns equally many rows to every rank, contiguous unless balanced, in micro-batches of `micro_batch.size`."""
    per_micro_batch, dp_size = config.micro_batch.size, config.dp_size
    assert per_micro_batch is not None
    multiple = config.align_to // dp_size
    counts = _ceil_div(_ceil_div(rows.ends, dp_size), per_micro_batch)  # micro-batches per rank of each prefix

    def ranks(kept: int) -> tuple[RankPlan, ...]:
        count = _ceil_div(kept + rows.padding, dp_size)  # rows per rank
        micro_batches = _ceil_div(count, per_micro_batch)
        if micro_batches % multiple:  # fewest padding rows: all micro-batches are full, and the last has one row
            micro_batches = _ceil_div(micro_batches, multiple) * multiple
            count = (micro_batches - 1) * per_micro_batch + 1
        bounds = np.minimum(np.arange(micro_batches + 1, dtype=np.int64) * per_micro_batch, count)
        ordered = rows.ordered[:kept]
        padded = np.append(ordered, np.full(dp_size * count - kept, PADDING))
        plans = tuple(RankPlan(shard, bounds) for shard in padded.reshape(dp_size, count))
        if config.balance != "none":
            placements = batch.balanced_by_rows(ordered, per_micro_batch, dp_size)
            plans = batch.most_even(*(_placed(ordered, one, bounds, dp_size) for one in placements), plans)
        return tuple(_filled(plan, per_micro_batch) for plan in plans) if config.micro_batch.full else plans

    return _Packing(rows, counts % multiple == 0, ranks)


def _filled(rank: RankPlan, per_micro_batch: int) -> RankPlan:
    """Appends padding rows until the last micro-batch is as large as the others."""
    bounds = np.arange(len(rank.bounds), dtype=np.int64) * per_micro_batch
    missing = bounds[-1] - len(rank.rows)
    return RankPlan(np.append(rank.rows, np.full(missing, PADDING)), bounds)


def _placed(ordered: Int64s, placement: tuple[Int64s, Int64s], bounds: Int64s, dp_size: int) -> tuple[RankPlan, ...]:
    """Places the rows, and padding after those of each rank. ordered: the mini-batch's rows. placement: the rank and
    micro-step of each. bounds: the bounds of every rank."""
    rank, step = placement
    rows = np.full((dp_size, bounds[-1]), PADDING, dtype=np.int64)
    real = np.bincount(rank, minlength=dp_size)  # rows of each rank, before padding
    rows[np.arange(bounds[-1]) < real[:, None]] = ordered[np.lexsort((step, rank))]
    return tuple(RankPlan(shard, bounds) for shard in rows)


def _by_tokens(rows: _Rows, batch: WholeRows, cap: int, config: RunConfig) -> _Packing:
    """Packs first-fit under the cap, splits until aligned, and assigns micro-batches to ranks in turn or by load."""
    numbers, dp_size = batch.first_fit(rows.ordered, cap), config.dp_size
    counts = np.append(0, np.maximum.accumulate(numbers) + 1)  # micro-batches of each number of first rows

    def ranks(kept: int) -> tuple[RankPlan, ...]:
        packed: list[list[int]] = [[] for _ in range(int(counts[kept]))]
        for row, number in zip(rows.ordered[:kept].tolist(), numbers[:kept].tolist(), strict=True):
            packed[number].append(row)
        target = _ceil_div(len(packed), config.align_to) * config.align_to
        micro_batches = batch.split_until(packed, target)
        micro_batches += [[PADDING]] * (target - len(micro_batches))
        if config.balance != "none":
            return batch.balanced(micro_batches, cap, dp_size)
        return tuple(_rank(micro_batches[rank::dp_size]) for rank in range(dp_size))

    return _Packing(rows, _ceil_div(counts[rows.ends], config.align_to) * config.align_to <= rows.ends, ranks)


def _by_count(rows: _Rows, batch: WholeRows, count: int, config: RunConfig) -> _Packing:
    """Assigns `count` micro-batches to every rank: splits the rows into contiguous chunks per rank, and each chunk
    likewise into micro-batches."""
    dp_size = config.dp_size

    def ranks(kept: int) -> tuple[RankPlan, ...]:
        chunks = np.array_split(rows.ordered[:kept], dp_size)
        micro_batches = [cut.tolist() or [PADDING] for chunk in chunks for cut in np.array_split(chunk, count)]
        plans = tuple(_rank(micro_batches[rank * count : (rank + 1) * count]) for rank in range(dp_size))
        if config.balance != "none":
            plans = batch.most_even(batch.balanced(batch.rearranged(micro_batches), _NO_CAP, dp_size), plans)
        return plans

    return _Packing(rows, np.ones(len(rows.ends), np.bool_), ranks)


def _kept_groups(part: _Part, aligned: NDArray[np.bool_], config: RunConfig) -> int:
    """Returns how many of the mini-batch's groups are trained. aligned: whether each prefix of them can be aligned."""
    if config.on_misaligned == "pad" or aligned[-1]:
        return len(part.groups)
    if config.on_misaligned == "drop_trailing":
        candidates = np.flatnonzero(aligned & (part.ends >= config.align_to))
        if len(candidates):
            return int(candidates[-1]) + 1
    raise MisalignedError(_misaligned(part, config))


def _misaligned(part: _Part, config: RunConfig) -> str:
    """Returns the message of MisalignedError."""
    unit = "max_tokens" if config.micro_batch.size is None else "size"
    groups = f" × microbatch_group_size = {config.microbatch_group_size}" if config.vpp_size > 1 else ""
    dropping = (
        f", not even after dropping trailing groups of its {len(part.groups)} prompt groups (at least align_to rows "
        "must remain)"
        if config.on_misaligned == "drop_trailing"
        else ""
    )
    return (
        f"{part.model} mini-batch {part.index}: its {part.end - part.start} rows cannot make a number of micro-batches "
        f"that is a multiple of align_to = {config.align_to} (dp_size = {config.dp_size}{groups}){dropping}; change "
        f"{part.model}_mini_batch_size, n_samples_per_prompt, micro_batch.{unit} or dp_size, or set on_misaligned: pad "
        f"(now {config.on_misaligned})"
    )


def _rank(micro_batches: Sequence[Sequence[int]]) -> RankPlan:
    rows = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    return RankPlan(rows, np.array([0, *accumulate(map(len, micro_batches))], dtype=np.int64))


def _ceil_div(value: Count, by: int) -> Count:
    return -(-value // by)
