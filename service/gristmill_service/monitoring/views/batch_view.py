"""Pictures of a published batch: its shards row by row, loads, breaks of merging, scores. They are bounded in size: a
larger one is added up or given in part, and says so.

Reading a batch blocks. The last batches that were asked for are cached, also when they are freed meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import NamedTuple

from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.config import Model, RunConfig
from gristmill_service.monitoring.views.batch_models import (
    BatchBreaks,
    BatchPicture,
    BatchScores,
    GroupScores,
    PrefixBreak,
    TokenPair,
)
from gristmill_service.monitoring.views.batch_summary import BatchSummary, StepBreak, summarize
from gristmill_service.monitoring.views.distributions import BatchDistributions, distributions
from gristmill_service.monitoring.views.row_view import SHOWN_TOKENS, RowTokens, key_of, tokens_of
from gristmill_service.monitoring.views.shard_bars import LARGEST, ShardBars
from gristmill_service.pipeline.plan_document import MiniBatchDocument, PlanDocument, decode_plan
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.run import Run

CACHED_BATCHES = 4
SHOWN_GROUPS = 200
_LONGEST_UID = 80


class BatchView:
    """One batch: its plan, and its rows without their tokens."""

    def __init__(self, run: str, batch: int, config: RunConfig, plan: PlanDocument, rows: BatchSummary) -> None:
        self._run, self._batch = run, batch
        self._config, self._plan, self._rows = config, plan, rows
        self._bars = ShardBars(rows, config)

    def picture(self, model: Model, mini_batch: int | None) -> BatchPicture:
        """All mini-batches as far as they fit, or one alone, with finer bars then."""
        own = self._mini_batches(model)
        chosen = own if mini_batch is None else _chosen(own, model, mini_batch)
        drawn = self._bars.drawn(own, chosen[: max(1, LARGEST.shards // self._plan.dp_size)])
        plan, config = self._plan, self._config
        return BatchPicture(
            run=self._run,
            batch=self._batch,
            model=model,
            models=list(config.models),
            layout=config.layout,
            pad_width=config.pad_width,
            merge=config.merge,
            prompts=plan.prompts,
            rows_received=plan.rows_received,
            rows=plan.rows,
            dropped_uids=len(plan.dropped_uids),
            metrics=plan.metrics,
            counts=plan.counts,
            mini_batches_in_all=len(own),
            rows_per_bar=drawn.per_bar,
            micro_steps_per_cell=drawn.per_cell,
            load_unit=self._bars.load_unit,
            mini_batches=drawn.mini_batches,
            columns=[str(column) for column in config.columns],
            groups=[_short(uid) for _, uid in self._rows.received.groups[: LARGEST.bars]],
        )

    def breaks(self) -> BatchBreaks:
        found = self._rows.breaks
        return BatchBreaks(
            run=self._run,
            batch=self._batch,
            merge=self._config.merge,
            in_all=found.in_all,
            rows_received=self._plan.rows_received,
            rows=self._plan.rows,
            pairs=[TokenPair(was=was, now=now, count=count) for (was, now), count in found.pairs],
            breaks=[_prefix_break(one) for one in found.shown],
        )

    def tokens(self, run: Run, row: int, start: int) -> RowTokens:
        """Reads the batch until the row's trajectory. Raises NotFoundError where the batch has no such row, and as
        `Run.export` does where the rows are freed."""
        key, own = key_of(self._rows, row)
        tokens, mask = tokens_of(run.export(self._batch), key, own, self._config)
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
        )

    def distributions(self) -> BatchDistributions:
        return distributions(self._run, self._batch, self._rows)

    def scores(self, start: int) -> BatchScores:
        """The scores of 200 groups at most, from this one on."""
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
                f"model is {model} and this run has none; it has {', '.join(self._config.models)} "
                "(critic_mini_batch_size configures a critic)"
            )
        return [part for part in self._plan.mini_batches if part.model == model]

    def _group(self, group: int) -> GroupScores:
        received, advantages = self._rows.received, self._rows.advantages
        own = slice(int(received.group_bounds[group]), int(received.group_bounds[group + 1]))
        round_, uid = received.groups[group]
        return GroupScores(
            uid=_short(uid),
            round=round_,
            tag=received.tags[group] if received.tags else "",
            samples=received.steps.samples[received.trajectory_bounds[:-1][own]].tolist(),
            scores=self._rows.scores[own].tolist(),
            advantages=None if advantages is None else advantages[own].tolist(),
        )


class _Key(NamedTuple):
    """run_id: a run of the same name that was created anew has another one. dp_size: as of the plan."""

    run_id: str
    batch: int
    dp_size: int


class BatchViewCache:
    """The views of the batches that were asked for last. Holds no run. Thread-safe: `_lock` guards `_views`.

    turn: held while a view is made, so that pictures never take more than one core.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._views: OrderedDict[_Key, BatchView] = OrderedDict()

    def cached(self, run: Run, batch: int) -> BatchView | None:
        key = _Key(run.run_id, batch, run.config.dp_size)
        with self._lock:
            found = self._views.get(key)
            if found is not None:
                self._views.move_to_end(key)
            return found

    def get(self, run: Run, batch: int) -> BatchView:
        """Blocks. Raises as `Run.batch` does, and NotFoundError where the batch is not published yet."""
        found = self.cached(run, batch)
        if found is not None:
            return found
        key, view = _read(run, batch)
        with self._lock:
            self._views[key] = view
            while len(self._views) > CACHED_BATCHES:
                self._views.popitem(last=False)
        return view


def _read(run: Run, batch: int) -> tuple[_Key, BatchView]:
    config = run.config
    answer = run.batch(batch)
    if answer.state not in (BatchState.PUBLISHED, BatchState.FORWARD):
        raise NotFoundError(f"batch {batch} is not published yet, so that there is nothing to show; ask again later")
    plan = decode_plan(answer.plan)
    if plan.dp_size != config.dp_size:
        # The trainer came back with another number of ranks between the two.
        raise NotFoundError(f"batch {batch} is being built again for another dp_size; ask again later")
    sealed = run.read(lambda state, _: state.batches.get(batch))
    version = 0 if sealed is None else sealed.policy_version
    view = BatchView(run.name, batch, config, plan, summarize(run.export(batch), config, version))
    return _Key(run.run_id, batch, config.dp_size), view


def _chosen(own: list[MiniBatchDocument], model: Model, mini_batch: int) -> list[MiniBatchDocument]:
    if own and not 0 <= mini_batch < len(own):
        raise InvalidArgumentError(
            f"mini_batch is {mini_batch} and the batch has {len(own)} {model} mini-batches, from 0; ask for one"
        )
    return own[mini_batch : mini_batch + 1]


def _prefix_break(one: StepBreak) -> PrefixBreak:
    key = one.trajectory
    return PrefixBreak(
        uid=_short(key.uid),
        round=key.round,
        sample=key.sample,
        step=one.step,
        against=one.against,
        index=one.at,
        before=one.before,
        was=one.was,
        now=one.now,
        column=one.column,
    )


def _short(uid: str) -> str:
    return uid if len(uid) <= _LONGEST_UID else f"{uid[: _LONGEST_UID - 1]}…"
