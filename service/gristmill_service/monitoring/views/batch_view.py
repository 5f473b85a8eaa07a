"""Views of a published batch: its shards row by row, loads, merge breaks, scores. Their size is limited: a larger view
is aggregated or truncated, and reports that.

They are slices and sums of the batch's plan and table. Only the tokens of a row are read from the run's rows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill._wire.batch_table import BatchTable, Break
from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.config import Model, RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.views.shard_bars import LARGEST, MiniBatchPicture, ShardBars, load_unit
from gristmill_service.monitoring.views.tokens import SHOWN_TOKENS, RowTokens, key_of, rows_of, tokens_of
from gristmill_service.pipeline.plan_document import MiniBatchDocument, decode_plan
from gristmill_service.run.recent_tables import BatchNumbers
from gristmill_service.run.run import Run

SHOWN_GROUPS = 200
_LONGEST_UID = 80
_BARS = 24
_REASONS = 20


class BatchPicture(Document):
    run: str
    batch: int
    model: Model
    models: list[Model]
    layout: str
    pad_width: str
    merges: bool = Field(description="Whether the run's merge mode joins steps.")
    prompts: int
    rows_received: int
    rows: int
    dropped_groups: int
    metrics: dict[str, float] = Field(description="As in the plan.")
    counts: dict[str, int] = Field(description="As in the plan.")
    mini_batches_in_all: int
    rows_per_bar: int = Field(description="The number of rows in each bar; there are at most 4,000 bars.")
    micro_steps_per_cell: int = Field(description="The number of micro-steps in each load.")
    load_unit: str
    mini_batches: list[MiniBatchPicture] = Field(
        description="Mini-batches, up to 1,024 shards; request the others one by one."
    )
    columns: list[str] = Field(description="The declared columns: name, type, shape and scope.")
    groups: list[str] = Field(description="The uids of the first 4,000 groups, shortened.")


class TokenPair(Document):
    was: int = Field(description="The token in the compared step; -1: that step had ended.")
    now: int = Field(description="The token in the prompt; -1: the prompt had ended.")
    count: int


class PrefixBreak(Document):
    uid: str
    round: int
    sample: int
    step: int
    against: int = Field(description="The compared step: the previous step or, in a tree, the most similar one.")
    index: int = Field(
        description="The index of the first different token in the step's prompt, or the prompt's length."
    )
    before: list[int] = Field(description="The equal tokens before it.")
    was: list[int] = Field(description="The tokens from there in the compared step.")
    now: list[int] = Field(description="The tokens from there in this step's prompt.")
    column: str = Field(description="The declared column in which the steps differ, if no token differs; else empty.")


class BatchBreaks(Document):
    run: str
    batch: int
    merges: bool = Field(description="Whether the run's merge mode joins steps.")
    branches: bool = Field(description="Whether a step may join any earlier step, not only the previous one.")
    in_all: int = Field(description="Steps that did not join an earlier step, without each trajectory's first step.")
    rows_received: int
    rows: int
    pairs: list[TokenPair] = Field(description="The most frequent ones, at most 10.")
    breaks: list[PrefixBreak] = Field(description="The first 200, of the first three of each trajectory.")
    texts: dict[int, str] = Field(
        default={}, description="The text of each of these tokens, if the service has a tokenizer."
    )


class GroupScores(Document):
    uid: str
    round: int
    tag: str = Field(default="", description="The group's environment or task.")
    samples: list[int]
    scores: list[float]
    advantages: list[float] | None = Field(description="null while columns that trainers write are missing.")


class BatchScores(Document):
    run: str
    batch: int
    estimator: str
    are_means: bool = Field(description="Whether an advantage is the mean over the trained tokens of its trajectory.")
    groups_in_all: int
    start: int
    groups: list[GroupScores]


class Histogram(Document):
    """Counts of trajectories between each low and high, which are equal if there are few different values."""

    name: Literal["score", "response tokens", "turns"]
    lows: list[float]
    highs: list[float]
    counts: list[int]


class BatchDistributions(Document):
    run: str
    batch: int
    trajectories: int
    histograms: list[Histogram]
    stop_reasons: dict[str, int] = Field(description="The 20 most frequent stop reasons of last steps.")


class BatchView:
    """A batch: its plan, and its table.

    numbers: of a published batch, or of one that was freed.
    """

    def __init__(self, run: str, batch: int, config: RunConfig, numbers: BatchNumbers) -> None:
        self._run, self._batch, self._config = run, batch, config
        self._plan, self._table = decode_plan(numbers.plan), BatchTable.decode(numbers.table)

    def picture(self, model: Model, mini_batch: int | None) -> BatchPicture:
        """Returns as many mini-batches as fit, or only one, with finer bars."""
        mini_batches = self._mini_batches(model)
        chosen = mini_batches if mini_batch is None else _chosen(mini_batches, model, mini_batch)
        plan, config = self._plan, self._config
        bars = ShardBars(self._table, mini_batches, model, config)
        drawn = bars.drawn(chosen[: max(1, LARGEST.shards // plan.dp_size)])
        return BatchPicture(
            run=self._run,
            batch=self._batch,
            model=model,
            models=list(config.models),
            layout=config.layout,
            pad_width=config.pad_width,
            merges=config.merging.joins,
            prompts=plan.prompts,
            rows_received=plan.rows_received,
            rows=plan.rows,
            dropped_groups=len(plan.dropped_groups),
            metrics=plan.metrics,
            counts=plan.counts,
            mini_batches_in_all=len(mini_batches),
            rows_per_bar=drawn.per_bar,
            micro_steps_per_cell=drawn.per_cell,
            load_unit=load_unit(config),
            mini_batches=drawn.mini_batches,
            columns=[str(column) for column in config.columns],
            groups=[_shortened(uid) for uid in self._table.texts["uids"][: LARGEST.bars]],
        )

    def breaks(self) -> BatchBreaks:
        return BatchBreaks(
            run=self._run,
            batch=self._batch,
            merges=self._config.merging.joins,
            branches=self._config.merging.branches,
            in_all=len(self._table.breaks["step"]),
            rows_received=self._plan.rows_received,
            rows=self._plan.rows,
            pairs=[TokenPair(was=was, now=now, count=count) for was, now, count in self._table.facts["pairs"]],
            breaks=[_break(one) for one in self._table.shown_breaks()],
        )

    async def tokens(self, run: Run, row: int, start: int) -> RowTokens:
        """Reads the batch up to the row's trajectory, and returns the row's tokens. Raises NotFoundError if the batch
        has no such row, or is freed."""
        key, row_of_trajectory = key_of(self._table, row)
        try:
            trajectory = await rows_of(run.export(self._batch), key)
        except NotFoundError as freed:
            raise NotFoundError(f"the tokens of row {row} are gone: {freed}") from None
        tokens, mask, conversation = await asyncio.to_thread(tokens_of, trajectory, row_of_trajectory, self._config)
        shown = slice(start, start + SHOWN_TOKENS)
        return RowTokens(
            run=self._run,
            batch=self._batch,
            row=row,
            uid=key.uid,
            round=key.round,
            sample=key.sample,
            prompt_tokens=mask.count(-1),
            tokens_in_all=len(tokens),
            start=start,
            tokens=tokens[shown],
            loss_mask=mask[shown],
            conversation="" if start else conversation,
        )

    def distributions(self) -> BatchDistributions:
        """Returns distributions over trajectories: scores, lengths, turns, and stop reasons."""
        columns, reasons = self._table.trajectories, Counter[str]()
        for number, count in enumerate(np.bincount(columns["stop_reason"]).tolist()):
            reasons[self._table.texts["stop_reasons"][number] or "unknown"] += count
        return BatchDistributions(
            run=self._run,
            batch=self._batch,
            trajectories=len(columns["score"]),
            histograms=[
                _histogram("score", columns["score"]),
                _histogram("response tokens", columns["response"]),
                _histogram("turns", columns["steps"]),
            ],
            stop_reasons=dict(reasons.most_common(_REASONS)),
        )

    def scores(self, start: int) -> BatchScores:
        """Returns the scores of at most 200 groups, from group `start`."""
        table, first = self._table, max(start, 0)
        groups = range(first, min(first + SHOWN_GROUPS, len(table.texts["uids"])))
        bounds = np.searchsorted(table.trajectories["group"], [*groups, groups.stop]).tolist()
        return BatchScores(
            run=self._run,
            batch=self._batch,
            estimator=self._config.advantage_estimator,
            are_means=table.facts["credit"] == "token",
            groups_in_all=len(table.texts["uids"]),
            start=first,
            groups=[
                _group(table, group, slice(*trajectories))
                for group, trajectories in zip(groups, pairwise(bounds), strict=True)
            ],
        )

    def _mini_batches(self, model: Model) -> list[MiniBatchDocument]:
        if model not in self._config.models:
            raise InvalidArgumentError(
                f"model {model} does not exist in this run; use {', '.join(self._config.models)}, or set "
                "critic_mini_batch_size to train a critic"
            )
        return [part for part in self._plan.mini_batches if part.model == model]


def _group(table: BatchTable, group: int, trajectories: slice) -> GroupScores:
    of_group = {name: table.trajectories[name][trajectories] for name in ("sample", "score", "advantage")}
    return GroupScores(
        uid=_shortened(table.texts["uids"][group]),
        round=int(table.groups["round"][group]),
        tag=table.texts["tags"][table.groups["tag"][group]],
        samples=of_group["sample"].tolist(),
        scores=of_group["score"].tolist(),
        advantages=None if np.isnan(of_group["advantage"]).any() else of_group["advantage"].tolist(),
    )


def _break(one: Break) -> PrefixBreak:
    return PrefixBreak(
        uid=_shortened(one.uid),
        round=one.round,
        sample=one.sample,
        step=one.step,
        against=one.against,
        index=one.at,
        before=one.before,
        was=one.was,
        now=one.now,
        column=one.column,
    )


def _shortened(uid: str) -> str:
    return uid if len(uid) <= _LONGEST_UID else f"{uid[: _LONGEST_UID - 1]}…"


def _chosen(mini_batches: list[MiniBatchDocument], model: Model, mini_batch: int) -> list[MiniBatchDocument]:
    if mini_batches and not 0 <= mini_batch < len(mini_batches):
        raise InvalidArgumentError(
            f"mini_batch {mini_batch} does not exist; request one of the batch's {len(mini_batches)} {model} "
            "mini-batches, numbered from 0"
        )
    return mini_batches[mini_batch : mini_batch + 1]


def _histogram(name: Literal["score", "response tokens", "turns"], values: NDArray[Any]) -> Histogram:
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= _BARS:
        edges = different.tolist()
        return Histogram(name=name, lows=edges, highs=edges, counts=counts.tolist())
    # Numbers that hardly differ leave room for fewer bars.
    counts, edges = np.histogram(values, np.unique(np.linspace(values.min(), values.max(), _BARS + 1)))
    return Histogram(name=name, lows=edges[:-1].tolist(), highs=edges[1:].tolist(), counts=counts.tolist())
