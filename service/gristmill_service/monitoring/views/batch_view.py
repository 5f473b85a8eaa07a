"""Views of a published batch: its shards row by row, loads, merge breaks, scores. Their size is limited: a larger view
is aggregated or truncated, and reports that.

The views of the last requested batches are cached, even after the batches are freed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.config import Model, RunConfig
from gristmill_service.monitoring import Document
from gristmill_service.monitoring.views.batch_summary import (
    BatchReader,
    BatchSummary,
    PrefixBreak,
    TokenPair,
    shortened,
)
from gristmill_service.monitoring.views.shard_bars import LARGEST, MiniBatchPicture, ShardBars
from gristmill_service.monitoring.views.tokens import SHOWN_TOKENS, RowTokens, key_of, rows_of, tokens_of
from gristmill_service.off_loop import OneByOne
from gristmill_service.pipeline.plan_document import MiniBatchDocument, PlanDocument, decode_plan
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.run import Run

CACHED_BATCHES = 4
SHOWN_GROUPS = 200
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


class BatchBreaks(Document):
    run: str
    batch: int
    merges: bool = Field(description="Whether the run's merge mode joins steps.")
    branches: bool = Field(description="Whether a step may join any earlier step, not only the previous one.")
    in_all: int = Field(description="Steps that did not join an earlier step, without each trajectory's first step.")
    rows_received: int
    rows: int
    pairs: list[TokenPair] = Field(description="The most frequent ones, at most 10.")
    breaks: list[PrefixBreak] = Field(description="The first 200 breaks.")
    texts: dict[int, str] = Field(
        default={}, description="The text of each of these tokens, if the service has a tokenizer."
    )


class GroupScores(Document):
    uid: str
    round: int
    tag: str = Field(default="", description="The group's environment or task.")
    samples: list[int]
    scores: list[float]
    advantages: list[float] | None = Field(description="null if clients sent one per token.")


class BatchScores(Document):
    run: str
    batch: int
    estimator: str
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
    """A batch: its plan, and its rows without tokens."""

    def __init__(self, run: str, batch: int, config: RunConfig, plan: PlanDocument, rows: BatchSummary) -> None:
        self._run, self._batch = run, batch
        self._config, self._plan, self._rows = config, plan, rows
        self._bars = ShardBars(rows, config)

    def picture(self, model: Model, mini_batch: int | None) -> BatchPicture:
        """Returns as many mini-batches as fit, or only one, with finer bars."""
        mini_batches = self._mini_batches(model)
        chosen = mini_batches if mini_batch is None else _chosen(mini_batches, model, mini_batch)
        drawn = self._bars.drawn(mini_batches, chosen[: max(1, LARGEST.shards // self._plan.dp_size)])
        plan, config = self._plan, self._config
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
            load_unit=self._bars.load_unit,
            mini_batches=drawn.mini_batches,
            columns=[str(column) for column in config.columns],
            groups=[shortened(uid) for _, uid in self._rows.received.groups[: LARGEST.bars]],
        )

    def breaks(self) -> BatchBreaks:
        return BatchBreaks(
            run=self._run,
            batch=self._batch,
            merges=self._config.merging.joins,
            branches=self._config.merging.branches,
            in_all=self._rows.breaks_in_all,
            rows_received=self._plan.rows_received,
            rows=self._plan.rows,
            pairs=self._rows.pairs,
            breaks=self._rows.breaks,
        )

    async def tokens(self, run: Run, row: int, start: int) -> RowTokens:
        """Reads the batch up to the row's trajectory, and returns the row's tokens. Raises NotFoundError if the batch
        has no such row, and like `Run.export` if the rows are freed."""
        key, row_of_trajectory = key_of(self._rows, row)
        trajectory = await rows_of(run.export(self._batch), key)
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
        received = self._rows.received
        lasts = (received.trajectory_bounds[1:] - 1).tolist()
        reasons = Counter(received.steps.stop_reasons[last] or "unknown" for last in lasts)
        return BatchDistributions(
            run=self._run,
            batch=self._batch,
            trajectories=len(lasts),
            histograms=[
                _histogram("score", self._rows.scores),
                _histogram("response tokens", self._rows.responses),
                _histogram("turns", np.diff(received.trajectory_bounds)),
            ],
            stop_reasons=dict(reasons.most_common(_REASONS)),
        )

    def scores(self, start: int) -> BatchScores:
        """Returns the scores of at most 200 groups, from group `start`."""
        groups = self._rows.received.groups
        first = max(start, 0)
        return BatchScores(
            run=self._run,
            batch=self._batch,
            estimator=self._config.advantage_estimator,
            groups_in_all=len(groups),
            start=first,
            groups=[self._group(group) for group in range(first, min(first + SHOWN_GROUPS, len(groups)))],
        )

    def _mini_batches(self, model: Model) -> list[MiniBatchDocument]:
        if model not in self._config.models:
            raise InvalidArgumentError(
                f"model {model} does not exist in this run; use {', '.join(self._config.models)}, or set "
                "critic_mini_batch_size to train a critic"
            )
        return [part for part in self._plan.mini_batches if part.model == model]

    def _group(self, group: int) -> GroupScores:
        received, advantages = self._rows.received, self._rows.advantages
        trajectories = slice(int(received.group_bounds[group]), int(received.group_bounds[group + 1]))
        round_, uid = received.groups[group]
        return GroupScores(
            uid=shortened(uid),
            round=round_,
            tag=received.tags[group] if received.tags else "",
            samples=received.steps.samples[received.trajectory_bounds[:-1][trajectories]].tolist(),
            scores=self._rows.scores[trajectories].tolist(),
            advantages=None if advantages is None else advantages[trajectories].tolist(),
        )


class _Key(NamedTuple):
    """The key of a built batch. run_id: distinguishes runs of the same name. dp_size: that of the plan."""

    run_id: str
    batch: int
    dp_size: int


class BatchViewCache:
    """Caches the views of the last requested batches. Holds no reference to a run.

    one_by_one: computes the views, so that they never use more than one core.
    """

    def __init__(self) -> None:
        self.one_by_one = OneByOne()
        self._making = asyncio.Lock()
        self._views: OrderedDict[_Key, BatchView] = OrderedDict()

    async def get(self, run: Run, batch: int) -> BatchView:
        """Returns the view of a batch. Raises like `Run.batch`, and NotFoundError if the batch is not published yet."""
        if view := self._cached(run, batch):
            return view
        async with self._making:
            if view := self._cached(run, batch):
                return view
            key, view = await self._read(run, batch)
            self._views[key] = view
            while len(self._views) > CACHED_BATCHES:
                self._views.popitem(last=False)
            return view

    def _cached(self, run: Run, batch: int) -> BatchView | None:
        key = _Key(run.run_id, batch, run.config.dp_size)
        if key in self._views:
            self._views.move_to_end(key)
        return self._views.get(key)

    async def _read(self, run: Run, batch: int) -> tuple[_Key, BatchView]:
        config = run.config
        answer = await run.batch(batch)
        if answer.state not in (BatchState.PUBLISHED, BatchState.FORWARD):
            raise NotFoundError(f"batch {batch} is not published yet; retry later")
        plan = await self.one_by_one(decode_plan, answer.plan)
        if plan.dp_size != config.dp_size:
            # The trainer resumed with another number of ranks between the two reads.
            raise NotFoundError(f"batch {batch} is being rebuilt for another dp_size; retry later")
        sealed = run.read(lambda state, _: state.batches.get(batch))
        reader = BatchReader(config, 0 if sealed is None else sealed.policy_version)
        async for table in run.export(batch):
            await self.one_by_one(reader.read, table)
        view = await self.one_by_one(lambda: BatchView(run.name, batch, config, plan, reader.summary()))
        return _Key(run.run_id, batch, config.dp_size), view


def _chosen(mini_batches: list[MiniBatchDocument], model: Model, mini_batch: int) -> list[MiniBatchDocument]:
    if mini_batches and not 0 <= mini_batch < len(mini_batches):
        raise InvalidArgumentError(
            f"mini_batch {mini_batch} does not exist; request one of the batch's {len(mini_batches)} {model} "
            "mini-batches, numbered from 0"
        )
    return mini_batches[mini_batch : mini_batch + 1]


def _histogram(
    name: Literal["score", "response tokens", "turns"], values: NDArray[np.float64] | NDArray[np.int64]
) -> Histogram:
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= _BARS:
        edges = different.tolist()
        return Histogram(name=name, lows=edges, highs=edges, counts=counts.tolist())
    counts, edges = np.histogram(values, _BARS)
    return Histogram(name=name, lows=edges[:-1].tolist(), highs=edges[1:].tolist(), counts=counts.tolist())
