"""Assigns each row to a mini-batch, a data-parallel rank and a micro-batch.

Implements sections 5 and 6 of the specification: mini-batch boundaries, padding, alignment, and dropping or rejecting
if micro-batches cannot be aligned. Uses the lengths of rows and, for `layout: prefix_tree`, the tokens that they
share, but no other data; no other layout changes a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.packing import SharingRows, WholeRows
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan, RankPlan

Count = TypeVar("Count", int, Int64s)


class MisalignedError(InvalidArgumentError):
    """A mini-batch cannot be aligned for this `dp_size`, but possibly for another."""


def schedule(
    lengths: Int64s, group_bounds: Int64s, config: RunConfig, sharing: Sharing | None = None
) -> list[MiniBatchPlan]:
    """Returns the mini-batches of one batch: the policy's, then the critic's.

    lengths: (rows,) the tokens (prompt and response) of each row in batch order, at least 1.
    group_bounds: (groups + 1,) row bounds of the prompt groups, from 0 to the number of rows; no group is empty.
    sharing: the tokens that rows share, with `layout: prefix_tree`; caps and loads then count distinct tokens. Padding
    after rows counts, too.

    Raises MisalignedError if a mini-batch cannot be aligned and `on_misaligned` forbids padding.
    """
    divide = _divide_groups if config.mini_batch_unit == "prompt" else _divide_rows
    parts = chain.from_iterable(divide(group_bounds, model, config) for model in config.models)
    flops = config.flops if config.balance == "flops" else None
    lengths = config.padded(lengths)
    rows = (
        WholeRows(lengths, flops)
        if sharing is None
        else SharingRows(lengths, flops, sharing.rounded_down(config.pad_rows_to_multiple_of))
    )
    if config.token_cap is not None:
        return [_plan_by_tokens(part, rows, config.token_cap, config) for part in parts]
    if config.micro_batch.count is not None:
        no_cap = int(lengths.sum())
        return [_plan_by_count(part, rows, config.micro_batch.count, no_cap, config) for part in parts]
    return [_plan_by_size(part, rows, config) for part in parts]


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


def _plan_by_size(part: _Part, batch: WholeRows, config: RunConfig) -> MiniBatchPlan:
    """Assigns equally many rows to every rank, contiguous unless balanced, in micro-batches of `micro_batch.size`."""
    per_micro_batch = config.micro_batch.size
    assert per_micro_batch is not None
    multiple = config.align_to // config.dp_size
    counts = _ceil_div(_ceil_div(part.ends, config.dp_size), per_micro_batch)  # micro-batches per rank of each prefix
    kept = _kept_groups(part, counts % multiple == 0, config)
    kept_rows = _rows_of(part, kept)
    count = _ceil_div(kept_rows + part.padding, config.dp_size)  # rows per rank
    micro_batches = _ceil_div(count, per_micro_batch)
    if micro_batches % multiple:  # fewest padding rows: all micro-batches are full, and the last has one row
        micro_batches = _ceil_div(micro_batches, multiple) * multiple
        count = (micro_batches - 1) * per_micro_batch + 1
    bounds = np.minimum(np.arange(micro_batches + 1, dtype=np.int64) * per_micro_batch, count)
    ordered = batch.between(part.start, part.start + kept_rows)
    padded = np.append(ordered, np.full(config.dp_size * count - kept_rows, PADDING))
    ranks = tuple(RankPlan(rows, bounds) for rows in padded.reshape(config.dp_size, count))
    if config.balance != "none":
        ranks = batch.more_even(_balanced_rows(ordered, batch, per_micro_batch, bounds, config.dp_size), ranks)
    if config.micro_batch.full:
        ranks = tuple(_filled(rank, per_micro_batch) for rank in ranks)
    return _plan(part, kept, ranks)


def _filled(rank: RankPlan, per_micro_batch: int) -> RankPlan:
    """Appends padding rows until the last micro-batch is as large as the others."""
    bounds = np.arange(len(rank.bounds), dtype=np.int64) * per_micro_batch
    missing = bounds[-1] - len(rank.rows)
    return RankPlan(np.append(rank.rows, np.full(missing, PADDING)), bounds)


def _balanced_rows(
    ordered: Int64s, batch: WholeRows, per_micro_batch: int, bounds: Int64s, dp_size: int
) -> tuple[RankPlan, ...]:
    """Places the rows by load, and padding evenly. ordered: the mini-batch's rows. bounds: the bounds of every rank."""
    rank, step = batch.balanced_by_rows(ordered, per_micro_batch, dp_size)
    rows = np.full((dp_size, bounds[-1]), PADDING, dtype=np.int64)
    real = np.bincount(rank, minlength=dp_size)  # rows of each rank, before padding
    rows[np.arange(bounds[-1]) < real[:, None]] = ordered[np.lexsort((step, rank))]
    return tuple(RankPlan(shard, bounds) for shard in rows)


def _plan_by_tokens(part: _Part, batch: WholeRows, cap: int, config: RunConfig) -> MiniBatchPlan:
    """Packs first-fit under the cap, splits until aligned, and assigns micro-batches to ranks in turn or by load."""
    ordered = batch.between(part.start, part.end)
    numbers = batch.first_fit(ordered, cap)
    counts = np.maximum.accumulate(numbers)[part.ends - 1] + 1  # micro-batches of each prefix of whole groups
    kept = _kept_groups(part, _ceil_div(counts, config.align_to) * config.align_to <= part.ends, config)
    packed: list[list[int]] = [[] for _ in range(int(counts[kept - 1]))]
    kept_rows = _rows_of(part, kept)
    for row, number in zip(ordered[:kept_rows].tolist(), numbers[:kept_rows].tolist(), strict=True):
        packed[number].append(row)
    target = _ceil_div(len(packed), config.align_to) * config.align_to
    micro_batches = batch.split_until(packed, target)
    micro_batches += [[PADDING]] * (target - len(micro_batches))
    if config.balance != "none":
        return _plan(part, kept, batch.balanced(micro_batches, cap, config.dp_size))
    return _plan(part, kept, tuple(_rank(micro_batches[rank :: config.dp_size]) for rank in range(config.dp_size)))


def _plan_by_count(part: _Part, batch: WholeRows, count: int, no_cap: int, config: RunConfig) -> MiniBatchPlan:
    """Assigns `count` micro-batches to every rank: splits the rows into contiguous chunks per rank, and each chunk
    likewise into micro-batches. no_cap: a number of tokens that no micro-batch exceeds."""
    dp_size, ordered = config.dp_size, batch.between(part.start, part.end)
    dealt = [rows for chunk in np.array_split(ordered, dp_size) for rows in np.array_split(chunk, count)]
    micro_batches = [rows.tolist() or [PADDING] for rows in dealt]
    ranks = tuple(_rank(micro_batches[rank * count : (rank + 1) * count]) for rank in range(dp_size))
    if config.balance != "none":
        ranks = batch.more_even(batch.balanced(batch.rearranged(micro_batches), no_cap, dp_size), ranks)
    return _plan(part, len(part.groups), ranks)


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


def _rows_of(part: _Part, groups: int) -> int:
    """Returns the number of rows in the mini-batch's first `groups` groups."""
    return int(part.ends[groups - 1]) if groups else 0


def _rank(micro_batches: Sequence[Sequence[int]]) -> RankPlan:
    rows = np.fromiter(chain.from_iterable(micro_batches), dtype=np.int64)
    return RankPlan(rows, np.array([0, *accumulate(map(len, micro_batches))], dtype=np.int64))


def _plan(part: _Part, kept: int, ranks: tuple[RankPlan, ...]) -> MiniBatchPlan:
    return MiniBatchPlan(
        model=part.model,
        index=part.index,
        start=part.start,
        end=part.end,
        kept_end=part.start + _rows_of(part, kept),
        groups=part.groups[:kept],
        dropped_groups=part.groups[kept:],
        ranks=ranks,
    )


def _ceil_div(value: Count, by: int) -> Count:
    return -(-value // by)
