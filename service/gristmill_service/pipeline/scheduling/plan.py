"""The plan of a batch: the mini-batch, rank and micro-batch in which each row trains, and the addresses of its shards.

A plan contains only indices, never data, so it can be shown, stored, and recomputed for another `dp_size`. Row indices
refer to the batch's row order after merging; -1 is a padding row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gristmill_service.config import Model

PADDING = -1


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The shard of one data-parallel rank in one mini-batch.

    rows: int64 (n,), row indices in micro-batch order, -1 for padding rows.
    bounds: int64 (micro-batches + 1,), micro-batch j is `rows[bounds[j]:bounds[j + 1]]`.
    """

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def micro_batches(self) -> list[list[int]]:
        """The positions in `rows` that each micro-batch covers."""
        edges = self.bounds.tolist()
        return [list(range(a, b)) for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class MiniBatchPlan:
    """One optimizer step of one model.

    start, end, kept_end: its rows before any drop are `start:end`, and its trained rows are `start:kept_end`. groups:
    the prompt groups of the trained rows; with `mini_batch_unit: sequence`, a group may be only partly in it.
    dropped_groups: the groups that alignment dropped. Both are ranges of group indices of the batch. partitions: int64
    (micro-batches per rank,), the number of the partition of each micro-batch, which is the same on every rank.
    """

    model: Model
    index: int
    start: int
    end: int
    kept_end: int
    groups: range
    dropped_groups: range
    ranks: tuple[RankPlan, ...]
    partitions: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return self.kept_end - self.start

    @property
    def padding_rows(self) -> int:
        return sum(len(rank.rows) for rank in self.ranks) - self.rows

    @property
    def micro_batches_per_rank(self) -> int:
        return len(self.ranks[0].bounds) - 1


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Identifies the shard of a rank for one mini-batch of one model."""

    model: Model
    mini_batch: int
    rank: int

    @property
    def path(self) -> str:
        """The path of the shard's file within its batch, as in the offline command's output."""
        return f"{self.model}-{self.mini_batch:03d}/rank-{self.rank:03d}.safetensors"
