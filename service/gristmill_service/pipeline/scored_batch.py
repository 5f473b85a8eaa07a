"""A batch before it is scheduled: validated, filtered, merged and scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit import advantage
from gristmill_service.pipeline.credit.assignment import Credit, credit
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.credit.kl import credit_columns
from gristmill_service.pipeline.layout.extra_columns import row_costs
from gristmill_service.pipeline.rows import filters
from gristmill_service.pipeline.rows.joins import Mismatch
from gristmill_service.pipeline.rows.merge import Rows, merge, realigned_tokens, row_loss_tokens
from gristmill_service.pipeline.rows.sharing import Sharing, find_sharing
from gristmill_service.pipeline.rows.validate import Received, receive

Stage = Literal["validate", "merge", "advantage", "schedule", "layout", "plan"]
StageTimer = Callable[[Stage], AbstractContextManager[object]]
"""A function of a stage's name. Returns the context in which to run the stage."""


def no_timer(_: Stage) -> AbstractContextManager[object]:
    return nullcontext()


class Partitions(NamedTuple):
    """The partitions of a batch's rows, which may not share micro-batches.

    names: by first appearance; "" for rows without one. of_rows: int64 (rows,), the number of each row's partition.
    """

    names: list[str]
    of_rows: Int64s

    def named(self, numbers: Int64s) -> list[str]:
        return [self.names[number] for number in numbers.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """A batch that is ready to be scheduled, for any number of ranks.

    trained: bool (steps,), False for steps that a filter masks. scores: float64 (trajectories,), without the KL.
    credit: the advantages; None while a required column is missing. loss_tokens: int64 (rows,).
    row_group_bounds: (groups + 1,) row bounds. rows_received: the number of all steps, including dropped groups.
    behind: int64 (trajectories,), see `filters.versions_behind`.
    stale: (round, uid) of groups dropped as stale. counts: the number of cases of each rule, by name.
    awaits: names of the columns that trainers have not written yet.
    sharing: the tokens that rows share, with `layout: prefix_tree`. costs: float64 (rows,), the FLOPs of each row that
    `flops` reads from a column. partitions: None if no row has one. baselines: the run's, before the batch.
    """

    received: Received
    rows: Rows
    mismatches: list[Mismatch]
    trained: NDArray[np.bool_]
    scores: Float64s
    credit: Credit | None
    loss_tokens: Int64s
    row_group_bounds: Int64s
    rows_received: int
    behind: Int64s
    stale: list[tuple[int, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    awaits: frozenset[str] = frozenset()
    sharing: Sharing | None = None
    costs: Float64s | None = None
    partitions: Partitions | None = None
    baselines: Baselines = field(default_factory=dict)

    @property
    def staleness(self) -> Int64s:
        """How many versions the oldest step of each trajectory with a known policy version is behind."""
        return self.behind[self.behind > UNKNOWN]

    @property
    def row_groups(self) -> Int64s:
        """The group of each row."""
        return self.received.trajectory_groups[self.rows.trajectories]


def score_batch(
    steps: Steps,
    config: RunConfig,
    policy_version: int | None,
    timed: StageTimer = no_timer,
    begun: Mapping[tuple[int, str], int] | None = None,
    baselines: Baselines = NO_BASELINES,
) -> ScoredBatch:
    """Validates, filters, merges and scores a batch: the stages that depend neither on ranks nor on trainers.

    policy_version, timed, begun, baselines: see `build_batch`.
    """
    awaits = frozenset(column.name for column in config.written_columns)
    with timed("validate"):
        received = receive(steps, config)
        current = filters.newest_version(received.steps) if policy_version is None else policy_version
        received, stale, counts = filters.drop_stale_groups(received, config, current)
        received, stale_tokens = filters.mask_stale_tokens(received, config, current)
    with timed("merge"):
        rows, mismatches, column_mismatches = merge(received, config)
    with timed("advantage"):
        scores = advantage.trajectory_scores(
            received.steps.rewards, received.trajectory_bounds, config.trajectory_score, received.steps.token_rewards
        )
        trained, masked = filters.trained_steps(received, scores, config)
        groups = received.trajectory_groups[rows.trajectories]
        loss_tokens = row_loss_tokens(rows, received.steps.loss_mask, trained)
        row_group_bounds = np.searchsorted(groups, np.arange(len(received.groups) + 1))
        scored = ScoredBatch(
            received=received,
            rows=rows,
            mismatches=mismatches,
            trained=trained,
            scores=scores,
            credit=None,
            loss_tokens=loss_tokens,
            row_group_bounds=row_group_bounds,
            rows_received=len(steps),
            behind=filters.versions_behind(received, current),
            stale=stale,
            counts=counts
            | stale_tokens
            | masked
            | {"incomplete_groups": _incomplete(received, config, begun)}
            | _group_counts(received, scores, config)
            | _realigned(received, rows, config)
            | ({} if column_mismatches is None else {"column_mismatches": column_mismatches}),
            awaits=awaits,
            sharing=_sharing(received, rows, row_group_bounds, config),
            costs=row_costs(received.steps, rows, config),
            partitions=_partitions(received, rows),
            baselines=baselines,
        )
        return scored if awaits & credit_columns(config) else _credited(scored, config)


def _partitions(received: Received, rows: Rows) -> Partitions | None:
    texts = received.steps.partitions
    if texts is None or not any(texts):
        return None
    names = [texts[step] for step in rows.first.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Partitions([*numbers], np.array([numbers[name] for name in names], np.int64))


def _sharing(received: Received, rows: Rows, row_group_bounds: Int64s, config: RunConfig) -> Sharing | None:
    if config.layout != "prefix_tree":
        return None
    tokens = received.steps.tokens
    if tokens.total and not tokens.values.size:
        raise InvalidArgumentError(
            "layout: prefix_tree needs tokens to find shared prefixes, but these rows have only lengths; pass rows "
            "with tokens, or set another layout"
        )
    return find_sharing(rows, tokens, row_group_bounds, weighs_observations=config.observation_weight > 0)


def with_columns(scored: ScoredBatch, extras: Mapping[str, Extra], config: RunConfig) -> ScoredBatch:
    """Returns the batch with the columns that trainers wrote as values of its steps, so that no column is missing."""
    steps = scored.received.steps
    received = replace(scored.received, steps=replace(steps, extras={**steps.extras, **extras}))
    complete = replace(scored, received=received, awaits=frozenset())
    return complete if scored.credit is not None else _credited(complete, config)


def _credited(scored: ScoredBatch, config: RunConfig) -> ScoredBatch:
    received, scores = scored.received, scored.scores
    if len(received.steps) > 0 and not received.steps.tokens.values.size:
        # A lengths file contains no data for advantages, and nothing to lay out.
        return replace(scored, credit=Credit(np.zeros(len(scores))))
    result = credit(received, scored.rows, scores, scored.trained, scored.loss_tokens, config, scored.baselines)
    uncredited = None if result.of_tokens is None else result.of_tokens.uncredited
    counts = {} if uncredited is None else {"uncredited_rewards": uncredited}
    return replace(scored, credit=result, counts=scored.counts | counts)


def _realigned(received: Received, rows: Rows, config: RunConfig) -> dict[str, int]:
    if not config.retokenized_tail:
        return {}
    tokens, loss_tokens = realigned_tokens(rows, received.steps.loss_mask)
    return {"realigned_tokens": tokens, "realigned_loss_tokens": loss_tokens}


def _incomplete(received: Received, config: RunConfig, begun: Mapping[tuple[int, str], int] | None) -> int:
    """Counts the groups with fewer samples than requested."""
    sizes = np.diff(received.group_bounds)
    if begun is None and config.max_samples_per_prompt is not None:
        return 0
    wanted = [(begun or {}).get(group, config.n_samples_per_prompt) for group in received.groups]
    return int((sizes < wanted).sum())


def _group_counts(received: Received, scores: Float64s, config: RunConfig) -> dict[str, int]:
    sizes, compared = np.diff(received.group_bounds), received.compared
    counts = dict[str, int]()
    if config.n_samples_per_prompt > 1:
        counts["lone_survivors"] = int((sizes == 1).sum())
    if config.advantage_estimator == "maxrl" and len(sizes):
        sums = np.add.reduceat(scores[compared.order], compared.bounds[:-1])
        counts["maxrl_nonpositive_groups"] = int((sums <= 0).sum())
    return counts
