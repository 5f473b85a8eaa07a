"""The bars of a batch's picture, one per row of a shard, and the loads, one per micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.views.batch_summary import BatchSummary
from gristmill_service.pipeline.layout.shard import padding_after
from gristmill_service.pipeline.plan_document import MiniBatchDocument, RankDocument
from gristmill_service.pipeline.scheduling.balance import loads_of


class ShardPicture(Document):
    """The bars of a shard in its row order, in tokens.

    row, group, sample, first, last, steps: the row of each bar, the row's first and last step, and the number of its
    steps; -1 for padding rows, null if a bar covers several rows.
    """

    rows: int
    shared: list[int] = Field(
        description="With layout prefix_tree, tokens stored with the previous row, not counted again; else 0."
    )
    prompt: list[int]
    observation: list[int] = Field(description="Response tokens with loss_mask 0.")
    trained: list[int]
    padding: list[int]
    load: list[int] = Field(description="One per micro-step.")
    row: list[int] | None = None
    group: list[int] | None = None
    sample: list[int] | None = None
    first: list[int] | None = None
    last: list[int] | None = None
    steps: list[int] | None = None


class MiniBatchPicture(Document):
    index: int
    rows: int
    padding_rows: int
    loss_tokens: int
    shards: list[ShardPicture] = Field(description="One per rank.")


class Largest(NamedTuple):
    """The size limits of a picture, which correspond to about 300 KB."""

    bars: int
    cells: int
    shards: int


LARGEST = Largest(bars=4_000, cells=8_000, shards=1_024)


class DrawnBars(NamedTuple):
    """Drawn mini-batches. per_bar: the number of rows in each bar. per_cell: the number of micro-steps in each load."""

    per_bar: int
    per_cell: int
    mini_batches: list[MiniBatchPicture]


class _Rank(NamedTuple):
    """A shard: its rows (-1: padding), the starts of its micro-batches, and the tokens that each row shares with the
    previous row."""

    rows: Int64s
    starts: Int64s
    shared: Int64s


class ShardBars:
    """Draws the bars of shards. Arrays of rows contain the padding row at index -1, so it is not a special case."""

    def __init__(self, rows: BatchSummary, config: RunConfig) -> None:
        self._rows, self._config = rows, config
        padding_row = config.padding_row_tokens
        observed = rows.lengths - rows.prompts - rows.trained
        # A padding row has only padding tokens.
        self._parts = [np.append(values, 0) for values in (rows.prompts, observed, rows.trained)]
        self._lengths = np.append(rows.lengths, padding_row)
        loads = loads_of(config.padded(rows.lengths), config.flops, rows.costs)
        self._load_scale = 1.0 if config.flops is None or not loads.sum() else rows.lengths.sum() / loads.sum()
        self._loads = np.append(loads, 0.0)

    def drawn(self, mini_batches: Sequence[MiniBatchDocument], chosen: Sequence[MiniBatchDocument]) -> DrawnBars:
        """Draws mini-batches. mini_batches: all of a model's mini-batches in the plan. chosen: those to draw."""
        every = {part.index: [_rank(rank) for rank in part.ranks] for part in mini_batches}
        ranks = [rank for part in chosen for rank in every[part.index]]
        per_bar = _share(sum(len(rank.rows) for rank in ranks), LARGEST.bars)
        per_cell = _share(sum(len(rank.starts) for rank in ranks), LARGEST.cells)
        pictures = []
        for part in chosen:
            shards = [
                self._shard(rank, self._widths(rank, every[part.index], list(every.values())), per_bar, per_cell)
                for rank in every[part.index]
            ]
            pictures.append(
                MiniBatchPicture(
                    index=part.index,
                    rows=part.rows,
                    padding_rows=part.padding_rows,
                    loss_tokens=part.loss_tokens,
                    shards=shards,
                )
            )
        return DrawnBars(per_bar, per_cell, pictures)

    @property
    def load_unit(self) -> str:
        return "tokens" if self._config.flops is None else "FLOPs, as tokens of a row of mean cost"

    def _shard(self, rank: _Rank, widths: Int64s, per_bar: int, per_cell: int) -> ShardPicture:
        prompt, observation, trained = (values[rank.rows] for values in self._parts)
        multiple = self._config.pad_rows_to_multiple_of
        shared = loads_of(rank.shared // multiple * multiple, self._config.flops)
        loads = self._load_scale * (self._loads[rank.rows] - shared)
        loads = np.add.reduceat(loads, rank.starts) if len(rank.rows) else np.empty(0)
        widths = widths - rank.shared
        # Shared tokens are a row's first tokens, and the row does not train them.
        observation = observation - np.maximum(rank.shared - prompt, 0)
        prompt = np.maximum(prompt - rank.shared, 0)
        return ShardPicture(
            rows=len(rank.rows),
            shared=_sums(rank.shared, per_bar),
            prompt=_sums(prompt, per_bar),
            observation=_sums(observation, per_bar),
            trained=_sums(trained, per_bar),
            padding=_sums(widths - prompt - observation - trained, per_bar),
            load=_sums(loads, per_cell),
            **(self._labels(rank.rows) if per_bar == 1 else {}),
        )

    def _labels(self, numbers: Int64s) -> dict[str, list[int]]:
        rows, received = self._rows, self._rows.received
        groups = received.trajectory_groups[rows.trajectories]
        samples = received.steps.samples[received.trajectory_bounds[:-1]][rows.trajectories]
        columns: dict[str, NDArray[Any]] = {
            "row": np.arange(len(rows.lengths)),
            "group": groups,
            "sample": samples,
            "first": rows.first,
            "last": rows.last,
            "steps": rows.steps,
        }
        return {name: np.append(values, -1)[numbers].tolist() for name, values in columns.items()}

    def _widths(self, rank: _Rank, part: Sequence[_Rank], every: Sequence[Sequence[_Rank]]) -> Int64s:
        """Returns the padded width of each row: the width of the widest row that is padded together with it."""
        edges = [*rank.starts.tolist(), len(rank.rows)]
        if self._config.has_token_axis:
            lengths = self._lengths[rank.rows]
            if not self._config.pads_rows:
                return lengths
            return lengths + padding_after(lengths - rank.shared, lengths, edges, self._config)
        match self._config.pad_width:
            case "micro_batch":
                each = [self._widest([rank.rows[start:end]]) for start, end in pairwise(edges)]
                return np.repeat(np.array(each, np.int64), np.diff(edges))
            case "shard":
                width = self._widest([rank.rows])
            case "mini_batch":
                width = self._widest([one.rows for one in part])
            case "batch":
                width = self._widest([one.rows for part in every for one in part])
        return np.full(len(rank.rows), width, np.int64)

    def _widest(self, rows: Sequence[Int64s]) -> int:
        multiple = self._config.pad_to_multiple_of
        return -(-int(self._lengths[np.concatenate(rows)].max(initial=1)) // multiple) * multiple


def _rank(planned: RankDocument) -> _Rank:
    rows = np.array(planned.rows, np.int64)
    starts = np.array([positions[0] for positions in planned.micro_batches if positions], np.int64)
    return _Rank(rows, starts, np.array(planned.shared or [0] * len(rows), np.int64))


def _share(count: int, most: int) -> int:
    return max(1, -(-count // most))


def _sums(values: NDArray[Any], each: int) -> list[int]:
    """Sums every `each` consecutive values, as integers."""
    if not len(values):
        return []
    sums: list[int] = np.round(np.add.reduceat(values, np.arange(0, len(values), each))).astype(np.int64).tolist()
    return sums
