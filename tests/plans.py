"""Plans for tests: how they are asked for and read, and the scheduling rules carried out one by one.

The rules are slow and obvious on purpose, and share no code with the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np

from gristmill_service.config import Model, RunConfig, parse_config
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan
from gristmill_service.pipeline.scheduling.schedule import schedule
from tests.rows import make_config

Groups = list[list[int]]  # per prompt group, the lengths of its rows


@dataclass(frozen=True)
class Batch:
    groups: Groups
    config: RunConfig

    @property
    def lengths(self) -> list[int]:
        return [tokens for group in self.groups for tokens in group]

    @property
    def bounds(self) -> list[int]:
        return [0, *accumulate(map(len, self.groups))]


def settings_of(**overrides: Any) -> RunConfig:
    sizes = overrides.get("policy_mini_batch_size", 1), overrides.get("critic_mini_batch_size") or 1
    return parse_config(make_config(train_batch_size=lcm(*sizes)) | overrides)


def planned(groups: Groups, config: RunConfig, partitions: Sequence[int] | None = None) -> list[MiniBatchPlan]:
    lengths = np.array([tokens for group in groups for tokens in group], dtype=np.int64)
    bounds = np.array([0, *accumulate(map(len, groups))], dtype=np.int64)
    return schedule(lengths, bounds, config, partitions=None if partitions is None else np.array(partitions))


def shards(plan: MiniBatchPlan) -> list[list[int]]:
    """Per rank, its rows."""
    return [rank.rows.tolist() for rank in plan.ranks]


def micro_batches(plan: MiniBatchPlan) -> list[list[list[int]]]:
    """Per rank and micro-batch, its rows."""
    return [[[int(rank.rows[at]) for at in micro] for micro in rank.micro_batches] for rank in plan.ranks]


def all_micro_batches(plan: MiniBatchPlan) -> list[list[int]]:
    return [rows for rank in micro_batches(plan) for rows in rank]


def real_rows(plan: MiniBatchPlan) -> list[int]:
    return sorted(row for rows in shards(plan) for row in rows if row != PADDING)


def of(model: Model, plans: list[MiniBatchPlan]) -> list[MiniBatchPlan]:
    return [plan for plan in plans if plan.model == model]


# --- The rules, one by one


def naive_first_fit(rows: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Every row looks at every micro-batch, from the first."""
    packed: list[list[int]] = []
    for row in rows:
        for others in packed:
            if sum(lengths[other] for other in others) + lengths[row] <= cap:
                others.append(row)
                break
        else:
            packed.append([row])
    return packed


def naive_split(micro_batches: list[list[int]], target: int, lengths: Sequence[int]) -> list[list[int]]:
    """Every split looks at every micro-batch for the last of those with the most tokens."""

    def tokens(rows: list[int]) -> int:
        return sum(lengths[row] for row in rows)

    result = [list(rows) for rows in micro_batches]
    while len(result) < target:
        splittable = [place for place, rows in enumerate(result) if len(rows) >= 2]
        if not splittable:
            break
        place = max(splittable, key=lambda place: (tokens(result[place]), place))
        first: list[int] = []
        second: list[int] = []
        for row in sorted(result[place], key=lambda row: (-lengths[row], row)):
            (second if tokens(second) < tokens(first) else first).append(row)
        result[place] = first
        result.append(second)
    return result


def aligned_in_rows(rows: int, config: RunConfig) -> bool:
    """Whether that many rows, padded to dp_size, give each rank a number of micro-batches that VPP takes."""
    size = config.micro_batch.size
    assert size is not None
    per_rank = -(-rows // config.dp_size)
    return -(-per_rank // size) % (config.align_to // config.dp_size) == 0


def naive_filled(ranks: list[list[list[int]]], size: int) -> list[list[list[int]]]:
    """Per rank and micro-batch, its rows, with padding rows behind them until there are `size`."""
    return [[rows + [PADDING] * (size - len(rows)) for rows in rank] for rank in ranks]


def naive_aligned(rows: range, batch: Batch) -> bool:
    if batch.config.token_cap is None:
        return aligned_in_rows(len(rows), batch.config)
    packed, align_to = len(naive_first_fit(rows, batch.lengths, batch.config.token_cap)), batch.config.align_to
    return any(target % align_to == 0 for target in range(packed, len(rows) + 1))


def naive_kept(batch: Batch, groups: range) -> int | None:
    """Groups kept of a mini-batch, found by dropping one more and packing again; None when it is refused."""
    for kept in range(len(groups), 0, -1):
        rows = range(batch.bounds[groups.start], batch.bounds[groups.start + kept])
        whole = kept == len(groups)
        if naive_aligned(rows, batch) and (whole or len(rows) >= batch.config.align_to):
            return kept
        if whole and batch.config.on_misaligned == "pad":
            return kept
        if batch.config.on_misaligned == "error":
            return None
    return None


def naive_by_tokens(batch: Batch, groups: range) -> list[list[list[int]]] | None:
    """Per rank, the micro-batches of the mini-batch that consists of `groups`; None when it is refused."""
    if (kept := naive_kept(batch, groups)) is None:
        return None
    assert batch.config.token_cap is not None
    rows = range(batch.bounds[groups.start], batch.bounds[groups.start + kept])
    packed = naive_first_fit(rows, batch.lengths, batch.config.token_cap)
    while len(packed) % batch.config.align_to:
        packed = naive_split(packed, len(packed) + 1, batch.lengths)
        if all(len(rows) == 1 for rows in packed):
            packed += [[PADDING]] * (-len(packed) % batch.config.align_to)
    return [packed[rank :: batch.config.dp_size] for rank in range(batch.config.dp_size)]
