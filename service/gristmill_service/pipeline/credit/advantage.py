"""Computes the advantages of trajectories, and of steps, within their comparison group. All arithmetic is float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig, StepGroups
from gristmill_service.estimators import Float64s, GroupEstimator, Groups, discounted_sums, group_advantages
from gristmill_service.pipeline.credit.length_penalty import penalized
from gristmill_service.pipeline.credit.whitening import whitened_with_counts
from gristmill_service.pipeline.rows.comparison import Comparison
from gristmill_service.pipeline.rows.validate import Received


class TokenCounts(NamedTuple):
    """How many tokens of each trajectory are trained, without those that a filter masks; float64 (trajectories,) each.

    sampled: `sampled_tokens`. in_rows: `trajectory_tokens`, which are fewer with `retokenized_tail`.
    """

    sampled: Float64s
    in_rows: Float64s


def sampled_tokens(loss_tokens: Int64s, trajectory_bounds: Int64s) -> Float64s:
    """Returns how many tokens of each trajectory are trained, without those that a filter masks, as they were received:
    also those that no row keeps (`retokenized_tail`), so that merging cannot change an advantage; float64
    (trajectories,). loss_tokens: int64 (steps,), of each step that no filter masks, 0 of others."""
    return np.diff(np.append(0, np.cumsum(loss_tokens))[trajectory_bounds]).astype(np.float64)


def trajectory_tokens(row_trajectories: Int64s, loss_tokens: Int64s, trajectories: int) -> Float64s:
    """Returns how many tokens of each trajectory are trained, without those that a filter masks; float64
    (trajectories,).

    row_trajectories: int64 (rows,), the trajectory of each row. loss_tokens: `Plan.loss_tokens`.
    """
    tokens: Float64s = np.bincount(row_trajectories, loss_tokens, trajectories).astype(np.float64)
    return tokens


def whitened_of_trajectories(advantages: Float64s, tokens: Float64s, config: RunConfig) -> Float64s:
    """Returns the advantages of trajectories, whitened with `whiten: batch` or `trajectories`. tokens:
    `trajectory_tokens`."""
    if config.whiten == "batch":
        return whitened_with_counts(advantages, tokens)
    return whitened_with_counts(advantages, np.ones(len(tokens))) if config.whiten == "trajectories" else advantages


def estimated(
    received: Received, scores: Float64s, tokens: Float64s, inputs: Int64s | None, config: RunConfig
) -> Float64s:
    """Returns one advantage per trajectory, not yet whitened. It is computed, or, with `advantage_estimator: none`, as
    clients sent it; zeros if they sent advantages per token, which are laid out as a column.

    tokens: `sampled_tokens`. inputs: `length_penalty.input_tokens`.
    """
    estimator = config.estimator
    if not isinstance(estimator, GroupEstimator):
        sent = received.steps.advantages
        return np.zeros(len(scores)) if sent is None else sent[received.trajectory_bounds[:-1]]
    if not estimator.reads_components:
        return _of_groups(estimator, received, penalized(received, scores, inputs, config), tokens, config)
    result, components = np.zeros(len(scores)), received.components or []
    for name in components[0] if components else ():
        of_component = np.array([numbers[name] for numbers in components])
        weight = config.component_weights.get(name, 1.0)
        result += weight * _of_groups(estimator, received, of_component, tokens, config)
    return result


def step_advantages(
    received: Received, scores: Float64s, tokens: Float64s, inputs: Int64s | None, config: RunConfig
) -> Float64s:
    """Returns the advantage of each step, not yet whitened: `trajectory_weight` times that of its trajectory plus
    `omega` times its own, which compares its return with those of the steps of its comparison group with the same key
    (`step_groups`), also of the same trajectory; float64 (steps,). A step that compares with none has 0 of its own.
    tokens: `sampled_tokens`. inputs: `length_penalty.input_tokens`."""
    estimator, rule, bounds = config.estimator, config.step_groups or StepGroups(), received.trajectory_bounds
    assert isinstance(estimator, GroupEstimator), "only these compare steps"
    of_trajectories = rule.trajectory_weight * estimated(received, scores, tokens, inputs, config)
    keys, lengths = _step_keys(received, rule), np.diff(bounds)
    returns, own = discounted_sums(received.steps.rewards, bounds, rule.gamma), np.zeros(len(keys))
    batch_std = _exact_std(returns) if config.grpo_std_over == "batch" else 0.0
    of_groups = np.repeat(received.compared.numbers, lengths) * (keys.max(initial=0) + 1) + keys
    for steps in Comparison.of(np.where(keys < 0, -1, of_groups)).by_size():
        if steps.shape[1] > 1:
            own[steps] = group_advantages(estimator, Groups(returns[steps], np.ones(steps.shape), batch_std), config)
    return np.repeat(of_trajectories, lengths) + rule.omega * own


def _step_keys(received: Received, rule: StepGroups) -> Int64s:
    """Returns a number for the key of each step, equal for equal keys; -1 for a step without one; int64 (steps,)."""
    texts = received.steps.step_keys
    if rule.key == "index":
        return received.steps.steps.astype(np.int64)
    if texts is None:
        return np.full(len(received.steps), -1)
    numbers = {"": -1} | {text: number for number, text in enumerate(dict.fromkeys(filter(None, texts)))}
    return np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))


def _of_groups(
    estimator: GroupEstimator, received: Received, scores: Float64s, tokens: Float64s, config: RunConfig
) -> Float64s:
    """Returns the advantages of trajectories with these scores."""
    result = np.zeros(len(scores))
    batch_std = _exact_std(scores) if config.grpo_std_over == "batch" else 0.0
    for trajectories in received.compared.by_size():
        groups = Groups(scores[trajectories], tokens[trajectories], batch_std)
        result[trajectories] = group_advantages(estimator, groups, config)
    return result


def _exact_std(numbers: Float64s) -> float:
    """Returns the standard deviation with n - 1, 0 for fewer than two numbers. Both sums are correctly rounded, so that
    the order of the batch does not matter."""
    if len(numbers) < 2:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((numbers - mean) ** 2) / (len(numbers) - 1))
