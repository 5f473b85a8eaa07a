"""The KL of the policy against a reference as part of the reward (`kl_in_reward`).

Estimators with credit per token subtract it from each trained token's reward; estimators of groups subtract the sum
over a trajectory's trained tokens from its score. All arithmetic is float64. Columns that credit is computed from are
checked when rows arrive: a row that would fail its whole batch is refused.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Array, Int64s, Ragged, exact_sum
from gristmill._wire.steps import FLOAT32_MAX, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import KlEstimator, KlInReward, RunConfig
from gristmill_service.estimators import SUM_PI_SQUARED, Float64s
from gristmill_service.pipeline.credit.trained_tokens import TrainedTokens
from gristmill_service.pipeline.rows.validate import Received, check_costs, check_lambda


def kl(logprobs: Float64s, reference: Float64s, estimator: KlEstimator) -> Float64s:
    """Returns each token's estimate, with d = logprob - reference: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html. Nothing is clamped, whereas SkyRL and verl clamp k3 to
    10 and its exponent to 20. exp(-d) - 1 is one function, expm1: subtracting 1 from exp(-d) would cancel all digits of
    a small d's k3, which is about d²/2.
    """
    with np.errstate(over="ignore"):
        difference: Float64s = logprobs - reference
        match estimator:
            case "k1":
                return difference
            case "k2":
                return difference * difference / 2
            case "k3":
                estimate: Float64s = np.negative(difference)
                np.expm1(estimate, out=estimate)
                estimate += difference
                return estimate


def kl_of_tokens(tokens: TrainedTokens, logprobs: Ragged, reference: Ragged, estimator: KlEstimator) -> Float64s:
    """Returns the estimate at each trained token; float64 (trained tokens,).

    logprobs, reference: response columns of the steps, `old_logprobs` (or `rollout_logprobs`) and `ref_logprobs`; only
    values of trained tokens are read. Raises InvalidArgumentError naming a token whose estimate overflows.
    """
    estimates = kl(tokens.take(logprobs), tokens.take(reference), estimator)
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum that is not finite may have overflowed; a finite one proves that all estimates are.
        is_sum_finite = np.isfinite(estimates.sum())
    if not is_sum_finite and not (is_finite := np.isfinite(estimates)).all():
        token = int(is_finite.argmin())
        before, after = (tokens.take(column)[token] for column in (logprobs, reference))
        raise InvalidArgumentError(
            f"{tokens.name(token, estimator)} is {estimates[token]}: the log-probability is {before} and the "
            f"reference's {after}; check that both are of the same tokens, or use the estimator k1 or k2"
        )
    return estimates


def kl_in_rewards(tokens: TrainedTokens, rewards: Float64s, estimates: Float64s, coef: float) -> Float64s:
    """Returns the rewards of the response tokens less `coef` times the estimates at the trained ones."""
    with np.errstate(over="ignore", invalid="ignore"):
        if tokens.mask is None:
            shares = coef * estimates
            return np.subtract(rewards, shares, out=shares)
        result = rewards.copy()
        result[tokens.mask] -= coef * estimates
    return result


def kl_of_trajectories(tokens: TrainedTokens, estimates: Float64s) -> Float64s:
    """Returns the exact sum over each trajectory's trained tokens, 0 where it has none; float64 (trajectories,)."""
    return _exact_sums(estimates, tokens.bounds)


def kl_of_steps(received: Received, column: str) -> Float64s:
    """Returns the exact sum over each trajectory's steps of the row column that `kl_in_reward: {column: ...}` names;
    float64 (trajectories,). Every step counts, trained or not, so that merging changes nothing."""
    values = received.steps.extras[column].values.compact().values.astype(np.float64)
    return _exact_sums(values, received.trajectory_bounds)


def kl_in_scores(received: Received, scores: Float64s, sums: Float64s, coef: float) -> Float64s:
    """Returns the trajectories' scores less `coef` times their sums; equal scores and sums stay equal.

    Raises InvalidArgumentError naming a trajectory whose score float32 cannot hold.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result: Float64s = scores - coef * sums
    outside = np.flatnonzero(~(np.abs(result) <= FLOAT32_MAX))
    if outside.size:
        trajectory = int(outside[0])
        key = received.steps.key(int(received.trajectory_bounds[trajectory]))
        raise InvalidArgumentError(
            f"{key}: the score is {result[trajectory]}, with a KL of {sums[trajectory]} in it, which float32 cannot "
            "hold; lower the coefficient of kl_in_reward"
        )
    return result


def _exact_sums(numbers: Float64s, bounds: Int64s) -> Float64s:
    runs = pairwise(bounds.tolist())
    return np.array([exact_sum(numbers[begin:end]) for begin, end in runs], np.float64)


MOST = 1e30
"""The largest number that credit is computed from. float32 holds a hundred million times as much, so that no sum over a
trajectory fails its batch."""

_ROUNDING = 0.01
"""By how much a sum of squared probabilities may be outside of 0..1, as the sum of many numbers of few bits."""


def reward_columns(config: RunConfig) -> frozenset[str]:
    """Returns the columns that the `rewards` of shards are computed from."""
    reference = config.kl_in_reward
    has_kl = reference is not None and reference.estimator is not None
    return frozenset([config.kl_from, "ref_logprobs"] if has_kl else ())


def credit_columns(config: RunConfig) -> frozenset[str]:
    """Returns the columns that advantages are computed from."""
    reference = config.kl_in_reward
    of_rows = (None if reference is None else reference.column, config.bootstrap_column)
    return reward_columns(config).union(config.estimator.columns, filter(None, of_rows))


def check_credit_columns(steps: Steps, config: RunConfig) -> None:
    """Refuses rows with values that are too large to compute credit from.

    Raises InvalidArgumentError naming the row, the column, the value and the remedy.
    """
    for name in sorted(credit_columns(config) & steps.extras.keys()):
        _check_fits(steps, name)
    reference = config.kl_in_reward
    check_lambda(steps, config)
    check_costs(steps, config)
    if reference is not None and reference.estimator is not None and "ref_logprobs" in steps.extras:
        _check_kl(steps, config)


def _check_fits(steps: Steps, name: str) -> None:
    column = steps.extras[name].values
    if unfit(name, column.values) is None:
        return
    for row, values in enumerate(column.arrays()):
        if (excess := unfit(name, values)) is not None:
            raise InvalidArgumentError(f"{steps.name(row)}: {name}[{excess[0]}] {excess[1]}")


def unfit(name: str, values: Array, coef: float = 1.0) -> tuple[int, str] | None:
    """Returns the index of the first value of this column that credit cannot be computed from, and a clause for an
    error message; None where there is none."""
    return too_large(values, coef) or (_no_probability(values) if name == SUM_PI_SQUARED else None)


def _no_probability(values: Array) -> tuple[int, str] | None:
    """Such values would make the weights of a baseline cancel each other, and advantages of any size."""
    outside = np.flatnonzero(~((values >= -_ROUNDING) & (values <= 1 + _ROUNDING)))
    if not outside.size:
        return None
    at = int(outside[0])
    return at, f"is {values[at]}, and a sum of squared probabilities is from 0 to 1; send the sum over all tokens"


def too_large(values: Array, coef: float = 1.0) -> tuple[int, str] | None:
    """Returns the index of the first value whose sums float32 may not hold, itself or times `coef`, and a clause for an
    error message; None where there is none."""
    scale = max(1.0, abs(coef))
    if scale * largest(values) <= MOST:
        return None
    outside = np.flatnonzero(~(scale * np.abs(values.astype(np.float64)) <= MOST))
    if not outside.size:
        return None
    at, times = int(outside[0]), "" if coef == 1 else f" with the coefficient {coef}"
    return at, (
        f"is {values[at]}, which is too large to be added up in float32{times}; scale it down to at most {MOST:g}"
    )


def largest(values: Array) -> float:
    """Returns the largest magnitude; NaN if any value is."""
    return max(abs(float(values.min(initial=0))), abs(float(values.max(initial=0))))


def _check_kl(steps: Steps, config: RunConfig) -> None:
    reference = config.kl_in_reward
    assert reference is not None, "checked by the caller"
    sampled = steps.logprobs if config.kl_from == "rollout_logprobs" else None
    if sampled is None and "old_logprobs" in steps.extras:
        sampled = steps.extras["old_logprobs"].values
    if sampled is None:
        return
    for row, (ours, theirs) in enumerate(
        zip(sampled.arrays(), steps.extras["ref_logprobs"].values.arrays(), strict=True)
    ):
        if len(ours) != len(theirs):
            continue
        excess = excessive_kl(ours, theirs, steps.loss_mask[row] == 1, reference)
        if excess is not None:
            at, message = excess
            raise InvalidArgumentError(f"{steps.name(row)}: the KL of response token {at} is {message}")


def excessive_kl(
    ours: Array, theirs: Array, trained: NDArray[np.bool_], reference: KlInReward
) -> tuple[int, str] | None:
    """Returns the first trained token whose KL is too large for credit, and a clause for an error message; None where
    there is none. ours, theirs: log-probabilities under the policy and the reference."""
    assert reference.estimator is not None, "checked by the caller"
    with np.errstate(over="ignore", invalid="ignore"):
        estimates = reference.coef * kl(ours.astype(np.float64), theirs.astype(np.float64), reference.estimator)
    outside = np.flatnonzero(~(np.abs(estimates) <= MOST) & trained)
    if not outside.size:
        return None
    at = int(outside[0])
    return at, (
        f"{estimates[at]}, computed from the log-probabilities {ours[at]} and {theirs[at]} (ref_logprobs); check that "
        "both are of the same tokens, or use the estimator k1 or k2"
    )
