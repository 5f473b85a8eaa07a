"""The bars of a batch's picture, one per row of a shard, and the loads, one per micro-step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill._wire.batch_table import BatchTable
from gristmill_service.config import Model, RunConfig
from gristmill_service.monitoring import Document
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


class ShardBars:
    """Draws the bars of a model's shards.

    parts: the tokens of each kind. loads: the cost of each row. labels: which row it is, and of what. All are (n,), in
    the order in which the plan places rows, including padding rows.
    """

    def __init__(
        self, table: BatchTable, mini_batches: Sequence[MiniBatchDocument], model: Model, config: RunConfig
    ) -> None:
        ranks = [rank for part in mini_batches for rank in part.ranks]
        rows = np.array([row for rank in ranks for row in rank.rows], np.int64)
        shared = np.array([tokens for rank in ranks for tokens in rank.shared or [0] * len(rank.rows)], np.int64)

        def placed(values: NDArray[Any], of_padding: int = 0) -> NDArray[Any]:
            return np.append(values, of_padding)[rows]

        numbers, owner = table.rows, table.rows["trajectory"]
        length, prompt, trained = (placed(numbers[name]) for name in ("length", "prompt", "trained"))
        widths = placed(numbers[f"{model}.width"])
        widths[rows < 0] = table.facts["padding_widths"].get(model, [])
        # Shared tokens are a row's first tokens, and the row does not train them.
        own_prompt = np.maximum(prompt - shared, 0)
        self._parts = {
            "shared": shared,
            "prompt": own_prompt,
            "observation": length - shared - own_prompt - trained,
            "trained": trained,
            "padding": widths - length,
        }
        multiple, costs = config.pad_rows_to_multiple_of, numbers.get("cost")
        loads = loads_of(config.padded(numbers["length"]), config.flops, costs)
        scale = 1.0 if config.flops is None or not loads.sum() else numbers["length"].sum() / loads.sum()
        self._loads = scale * (placed(loads) - loads_of(shared // multiple * multiple, config.flops))
        self._labels = {
            "row": rows,
            **{name: placed(table.trajectories[name][owner], -1) for name in ("group", "sample")},
            **{name: placed(numbers[name], -1) for name in ("first", "last", "steps")},
        }
        sizes = (part.rows + part.padding_rows for part in mini_batches)
        self._begins = dict(zip((part.index for part in mini_batches), accumulate(sizes, initial=0), strict=False))

    def drawn(self, chosen: Sequence[MiniBatchDocument]) -> DrawnBars:
        """Draws some of the mini-batches."""
        ranks = [rank for part in chosen for rank in part.ranks]
        per_bar = _share(sum(len(rank.rows) for rank in ranks), LARGEST.bars)
        per_cell = _share(sum(len(rank.micro_batches) for rank in ranks), LARGEST.cells)
        return DrawnBars(per_bar, per_cell, [self._mini_batch(part, per_bar, per_cell) for part in chosen])

    def _mini_batch(self, part: MiniBatchDocument, per_bar: int, per_cell: int) -> MiniBatchPicture:
        begins = accumulate((len(rank.rows) for rank in part.ranks), initial=self._begins[part.index])
        return MiniBatchPicture(
            index=part.index,
            rows=part.rows,
            padding_rows=part.padding_rows,
            loss_tokens=part.loss_tokens,
            shards=[
                self._shard(rank, begin, per_bar, per_cell) for rank, begin in zip(part.ranks, begins, strict=False)
            ],
        )

    def _shard(self, rank: RankDocument, begin: int, per_bar: int, per_cell: int) -> ShardPicture:
        rows = slice(begin, begin + len(rank.rows))
        starts = [positions[0] for positions in rank.micro_batches if positions]
        loads = np.add.reduceat(self._loads[rows], starts) if starts else np.empty(0)
        labels = self._labels if per_bar == 1 else {}
        return ShardPicture(
            rows=len(rank.rows),
            load=_sums(loads, per_cell),
            **{name: _sums(tokens[rows], per_bar) for name, tokens in self._parts.items()},
            **{name: numbers[rows].tolist() for name, numbers in labels.items()},
        )


def load_unit(config: RunConfig) -> str:
    return "tokens" if config.flops is None else "FLOPs, as tokens of a row of mean cost"


def _share(count: int, most: int) -> int:
    return max(1, -(-count // most))


def _sums(values: NDArray[Any], each: int) -> list[int]:
    """Sums every `each` consecutive values, as integers."""
    if not len(values):
        return []
    sums: list[int] = np.round(np.add.reduceat(values, np.arange(0, len(values), each))).astype(np.int64).tolist()
    return sums
