"""The shapes of a picture: of each shard its bars, one a row, and its load, one a micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.monitoring.batch_summary import BatchSummary
from gristmill_service.pipeline.balance import loads_of
from gristmill_service.pipeline.plan_document import MiniBatchDocument, RankDocument

Json = dict[str, Any]


class Largest(NamedTuple):
    """How much one picture has at most: about 300 KB."""

    bars: int
    cells: int
    shards: int


LARGEST = Largest(bars=4_000, cells=8_000, shards=1_024)

_PARTS = ("prompt", "observation", "trained", "padding")


class _Rank(NamedTuple):
    """A shard: its rows, -1 for padding rows, and where its micro-batches begin among them."""

    rows: Int64s
    starts: Int64s


class ShardBars:
    """Arrays of rows have the padding row at -1, so that it needs no case of its own."""

    def __init__(self, rows: BatchSummary, config: RunConfig) -> None:
        self._rows, self._config = rows, config
        padding_row = config.padding_row_tokens
        observed = rows.lengths - rows.prompts - rows.trained
        # A padding row is all padding.
        self._parts = {
            "prompt": np.append(rows.prompts, 0),
            "observation": np.append(observed, 0),
            "trained": np.append(rows.trained, 0),
        }
        self._lengths = np.append(rows.lengths, padding_row)
        loads = loads_of(rows.lengths, config.flops)
        if config.flops is not None and loads.sum():
            loads = loads * (rows.lengths.sum() / loads.sum())
        self._loads = np.append(loads, 0.0)

    def shown(self, own: Sequence[MiniBatchDocument], chosen: Sequence[MiniBatchDocument]) -> Json:
        """own: all of a model's mini-batches in the plan; chosen: those that are shown."""
        every = {part.index: [_rank(rank) for rank in part.ranks] for part in own}
        ranks = [rank for part in chosen for rank in every[part.index]]
        per_bar = _share(sum(len(rank.rows) for rank in ranks), LARGEST.bars)
        per_cell = _share(sum(len(rank.starts) for rank in ranks), LARGEST.cells)
        widths: dict[int, list[Int64s]] = {
            part.index: [self._widths(rank, every[part.index], list(every.values())) for rank in every[part.index]]
            for part in chosen
        }
        return {
            "rows_per_bar": per_bar,
            "micro_steps_per_cell": per_cell,
            "load_unit": "tokens" if self._config.flops is None else "FLOPs, as tokens of a row of mean cost",
            "mini_batches": [
                {
                    "index": part.index,
                    "rows": part.rows,
                    "padding_rows": part.padding_rows,
                    "loss_tokens": part.loss_tokens,
                    "shards": [
                        self._shard(rank, wide, per_bar, per_cell)
                        for rank, wide in zip(every[part.index], widths[part.index], strict=True)
                    ],
                }
                for part in chosen
            ],
        }

    def _shard(self, rank: _Rank, widths: Int64s, per_bar: int, per_cell: int) -> Json:
        starts = np.arange(0, len(rank.rows), per_bar)
        parts = {name: values[rank.rows] for name, values in self._parts.items()}
        parts["padding"] = widths - sum(parts.values())
        loads = np.add.reduceat(self._loads[rank.rows], rank.starts) if len(rank.rows) else np.empty(0)
        shown = {name: np.add.reduceat(parts[name], starts).tolist() if len(starts) else [] for name in _PARTS}
        cells = np.arange(0, len(loads), per_cell)
        load = np.round(np.add.reduceat(loads, cells)).astype(np.int64).tolist() if len(cells) else []
        return {
            "rows": len(rank.rows),
            **shown,
            "load": load,
            **(self._labels(rank.rows) if per_bar == 1 else {}),
        }

    def _labels(self, numbers: Int64s) -> Json:
        """Which row each bar is; -1 for padding rows."""
        rows, received = self._rows, self._rows.received
        groups = received.trajectory_groups[rows.trajectories]
        samples = received.steps.samples[received.trajectory_bounds[:-1]][rows.trajectories]
        labels: dict[str, Any] = {"row": np.arange(len(rows.lengths)), "group": groups, "sample": samples}
        labels |= {"first": rows.first, "last": rows.last}
        return {name: np.append(values, -1)[numbers].tolist() for name, values in labels.items()}

    def _widths(self, rank: _Rank, part: Sequence[_Rank], every: Sequence[Sequence[_Rank]]) -> Int64s:
        """How wide each row is laid out: as the widest of those that share a width with it."""
        if self._config.layout == "packed":
            return self._lengths[rank.rows]
        match self._config.pad_width:
            case "micro_batch":
                edges = [*rank.starts.tolist(), len(rank.rows)]
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
    return _Rank(rows, starts)


def _share(count: int, most: int) -> int:
    return max(1, -(-count // most))
