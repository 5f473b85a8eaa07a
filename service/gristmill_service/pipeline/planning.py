"""Makes a batch's plan from its numbers: what is trained, its advantages, where and when each row trains, and by which
denominators its loss is divided.

Only three things read tokens: the tokens that rows share (`layout: prefix_tree`), credit per token (`credit`), and
the weights of tokens in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit.advantage import trajectory_tokens
from gristmill_service.pipeline.credit.assignment import Credit, TokenCredit, credit
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.credit.denominators import Denominators
from gristmill_service.pipeline.credit.kl import credit_columns
from gristmill_service.pipeline.credit.loss_weights import loss_weights
from gristmill_service.pipeline.credit.whitening import whiten, whitened_with_counts
from gristmill_service.pipeline.numbers import Numbers
from gristmill_service.pipeline.rows.filters import trained_steps
from gristmill_service.pipeline.rows.sharing import Sharing, find_sharing
from gristmill_service.pipeline.rows.validate import Received
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scheduling.schedule import schedule
from gristmill_service.pipeline.stages import StageTimer, no_timer


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan of a batch.

    trained: bool (steps,), False for steps that a filter masks. loss_tokens: int64 (rows,), what the loss counts of
    each. sharing: the tokens that rows share, with `layout: prefix_tree`. credit: the advantages; None while a required
    column is missing. mini_batches: of all models, the policy's first. weights: see `loss_weights`; None without any.
    awaits: names of the columns that trainers have not written yet. baselines: the run's, before the batch.
    counts: the number of cases of each rule, by name.
    """

    numbers: Numbers
    trained: NDArray[np.bool_]
    loss_tokens: Int64s
    sharing: Sharing | None
    credit: Credit | None
    mini_batches: list[MiniBatchPlan]
    weights: Ragged | None
    awaits: frozenset[str]
    baselines: Baselines
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def policy(self) -> list[MiniBatchPlan]:
        return [part for part in self.mini_batches if part.model == "policy"]

    def denominators(self, mini_batch: MiniBatchPlan, config: RunConfig) -> Denominators:
        """Returns the numbers by which the token losses of a mini-batch are divided."""
        rows, weight = self.numbers.rows, None
        if self.weights is not None:
            visits = slice(*rows.edges[[mini_batch.start, mini_batch.kept_end]].tolist())
            weight = float(self.weights.take(visits).compact().values.sum(dtype=np.float64))
        return Denominators(
            mini_batch,
            self.loss_tokens,
            self.numbers.row_groups,
            rows.trajectories,
            weight,
            only_trained=config.loss_reduction_over == "trained",
        )


def make_plan(
    numbers: Numbers,
    received: Received,
    config: RunConfig,
    *,
    begun: Mapping[tuple[int, str], int] | None = None,
    baselines: Baselines = NO_BASELINES,
    timed: StageTimer = no_timer,
) -> Plan:
    """Returns the plan of a batch.

    received: its steps with tokens. begun, baselines: see `build_batch`.
    Raises InvalidArgumentError if the rows have numbers that float32 cannot hold, or cannot be aligned.
    """
    with timed("advantage"):
        trained, masked = trained_steps(numbers.received, numbers.scores, config)
        rows, awaits = numbers.rows, frozenset(column.name for column in config.written_columns)
        of_visits = numbers.trained * trained[rows.steps]
        plan = Plan(
            numbers=numbers,
            trained=trained,
            loss_tokens=np.add.reduceat(of_visits, rows.edges[:-1]) if len(rows) else of_visits,
            sharing=_sharing(numbers, received, config),
            credit=None,
            mini_batches=[],
            weights=None,
            awaits=awaits,
            baselines=baselines,
            counts=numbers.counts | masked | _group_counts(numbers, config, begun),
        )
        plan = replace(plan, weights=loss_weights(received, rows, trained, config))
        if not awaits & credit_columns(config):
            plan = _credited(plan, received, config)
    with timed("schedule"):
        return replace(plan, mini_batches=scheduled(plan, config))


def with_columns(plan: Plan, received: Received, config: RunConfig) -> Plan:
    """Returns the plan of a batch for which trainers wrote all columns. received: its steps with these columns."""
    weights = loss_weights(received, plan.numbers.rows, plan.trained, config)
    complete = replace(plan, awaits=frozenset(), weights=weights)
    return complete if plan.credit is not None else _credited(complete, received, config)


def scheduled(plan: Plan, config: RunConfig) -> list[MiniBatchPlan]:
    """Returns the mini-batches of all models, the policy's first."""
    numbers = plan.numbers
    partitions = None if numbers.partitions is None else numbers.partitions.of_rows
    return schedule(
        numbers.rows.lengths, numbers.row_group_bounds, config, plan.sharing, partitions, costs=numbers.costs
    )


def _sharing(numbers: Numbers, received: Received, config: RunConfig) -> Sharing | None:
    if config.layout != "prefix_tree":
        return None
    tokens = received.steps.tokens
    if tokens.total and not tokens.values.size:
        raise InvalidArgumentError(
            "layout: prefix_tree needs tokens to find shared prefixes, but these rows have only lengths; pass rows "
            "with tokens, or set another layout"
        )
    weighs_observations = config.observation_weight > 0
    return find_sharing(numbers.rows, tokens, numbers.row_group_bounds, weighs_observations=weighs_observations)


def _credited(plan: Plan, received: Received, config: RunConfig) -> Plan:
    numbers = plan.numbers
    if len(received.steps) > 0 and not received.steps.tokens.values.size:
        # A lengths file contains no data for advantages, and nothing to lay out.
        return replace(plan, credit=Credit(np.zeros(len(numbers.scores))))
    result = credit(numbers, received, plan.trained, plan.loss_tokens, config, plan.baselines)
    uncredited = None if result.of_tokens is None else result.of_tokens.uncredited
    counts = {} if uncredited is None else {"uncredited_rewards": uncredited}
    return replace(plan, credit=result, counts=plan.counts | counts)


def _group_counts(numbers: Numbers, config: RunConfig, begun: Mapping[tuple[int, str], int] | None) -> dict[str, int]:
    received = numbers.received
    sizes, compared = np.diff(received.group_bounds), received.compared
    counts = {"incomplete_groups": _incomplete(received, config, begun)}
    if config.n_samples_per_prompt > 1:
        counts["lone_survivors"] = int((sizes == 1).sum())
    if config.advantage_estimator == "maxrl" and len(sizes):
        sums = np.add.reduceat(numbers.scores[compared.order], compared.bounds[:-1])
        counts["maxrl_nonpositive_groups"] = int((sums <= 0).sum())
    return counts


def _incomplete(received: Received, config: RunConfig, begun: Mapping[tuple[int, str], int] | None) -> int:
    """Counts the groups with fewer samples than requested."""
    sizes = np.diff(received.group_bounds)
    if begun is None and config.max_samples_per_prompt is not None:
        return 0
    wanted = [(begun or {}).get(group, config.n_samples_per_prompt) for group in received.groups]
    return int((sizes < wanted).sum())


def row_advantages(
    advantages: Float64s, plan: Plan, mini_batches: Sequence[MiniBatchPlan], config: RunConfig
) -> Float64s:
    """Returns each row's advantage, whitened with `whiten: mini_batch`. advantages: float64 (trajectories,)."""
    trajectories = plan.numbers.rows.trajectories
    result = advantages[trajectories]
    if config.whiten == "mini_batch":
        for mini_batch in mini_batches:
            kept = slice(mini_batch.start, mini_batch.kept_end)
            owners, places = np.unique(trajectories[kept], return_inverse=True)
            tokens = trajectory_tokens(places, plan.loss_tokens[kept], len(owners))
            result[kept] = whitened_with_counts(advantages[owners], tokens)[places]
    return result


def token_advantages(
    credit: TokenCredit, plan: Plan, mini_batches: Sequence[MiniBatchPlan], config: RunConfig
) -> tuple[Float64s, Int64s]:
    """Returns the advantage of each trained token, whitened with `whiten: mini_batch`, and the row that trains it."""
    row_of_token = credit.tokens.of(plan.numbers.rows.trained_in(credit.tokens.edges))
    if config.whiten != "mini_batch":
        return credit.advantages, row_of_token
    parts = _mini_batch_of_rows(mini_batches, len(plan.numbers.rows))[row_of_token]
    return whiten(credit.advantages, parts), row_of_token


def _mini_batch_of_rows(mini_batches: Sequence[MiniBatchPlan], rows: int) -> Int64s:
    """Returns the mini-batch that trains each row, -1 for rows that were dropped; int64 (rows,)."""
    numbers = np.full(rows, -1)
    for number, mini_batch in enumerate(mini_batches):
        numbers[mini_batch.start : mini_batch.kept_end] = number
    return numbers
