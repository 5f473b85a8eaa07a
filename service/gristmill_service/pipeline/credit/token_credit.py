"""Numbers of a batch's trained tokens: their whitening, and an estimator's advantages and returns, checked."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.estimators import Float64s, Settings, TokenEstimator
from gristmill_service.pipeline.credit.trained_tokens import TrainedTokens

WHITEN_EPSILON = 1e-8
"""What SkyRL and verl add to the variance."""

# So many numbers stay in a core's own cache while one is computed of another.
_CACHED = 1 << 16


def token_advantages(
    estimator: TokenEstimator, tokens: TrainedTokens, settings: Settings, rewards: Float64s, *columns: Float64s
) -> tuple[Float64s, Float64s]:
    """Returns the advantages and returns of the trained tokens; each float64 (trained tokens,).

    rewards: `credited_rewards`. columns: the estimator's, of the trained tokens (`tokens.take`).
    Raises InvalidArgumentError naming the token where float32 does not hold a result.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        advantages, returns = estimator.compute(settings, tokens.bounds, rewards, *columns)
    remedy = f"scale the {' and '.join(('rewards', *estimator.columns))} down"
    if advantages is not returns:
        tokens.check(advantages, "advantage", remedy)
    tokens.check(returns, "return", remedy)
    return advantages, returns


def whiten(advantages: Float64s, parts: Int64s) -> Float64s:
    """Returns the advantages with mean 0 and variance 1 over each part of the trained tokens, such as a mini-batch.

    parts: int64 (trained tokens,), the part that each is in.
    """
    order = np.argsort(parts, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(parts[order])) + 1, len(parts))
    result = np.empty_like(advantages)
    for begin, end in pairwise([0, *ends.tolist()]):
        result[order[begin:end]] = whitened(advantages[order[begin:end]])
    return result


def whitened(advantages: Float64s, out: Float64s | None = None) -> Float64s:
    """Returns (A - mean) / sqrt(var + 1e-8), var with n - 1, as `masked_whiten` of SkyRL and verl has it.

    So the variance is var / (var + 1e-8) rather than 1, which shows where advantages are below 1e-3. Equal advantages,
    one alone among them (which SkyRL and verl refuse), have nothing to compare and give exactly 0.
    out: where the result is put, which may be `advantages`; None: into an array of its own.
    """
    result = np.empty_like(advantages) if out is None else out
    if not len(advantages) or advantages.min() == advantages.max():
        result[:] = 0
        return result
    mean = advantages.mean()
    deviation = np.sqrt(_sum_of_squares(advantages, mean) / (len(advantages) - 1) + WHITEN_EPSILON)
    for begin in range(0, len(advantages), _CACHED):
        part = slice(begin, begin + _CACHED)
        np.subtract(advantages[part], mean, out=result[part])
        result[part] /= deviation
    return result


def _sum_of_squares(numbers: Float64s, mean: np.float64) -> np.float64:
    """Returns the sum of (number - mean)², halves of a long array by themselves, as NumPy adds one up."""
    if len(numbers) > _CACHED:
        half = len(numbers) // 2 // 8 * 8
        return _sum_of_squares(numbers[:half], mean) + _sum_of_squares(numbers[half:], mean)
    centered = numbers - mean
    centered *= centered
    total: np.float64 = centered.sum()
    return total
