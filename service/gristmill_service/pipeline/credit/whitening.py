"""Whitens advantages: shifts and scales them to mean 0 and variance 1. All arithmetic is float64."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill._wire.steps import FLOAT32_MAX
from gristmill_service.estimators import Float64s

WHITEN_EPSILON = 1e-8
"""What SkyRL and verl add to the variance."""

# This many numbers fit into a core's own cache.
_CACHED = 1 << 16


def whiten(advantages: Float64s, parts: Int64s) -> Float64s:
    """Returns the advantages of trained tokens, whitened within each part, such as a mini-batch.

    parts: int64 (trained tokens,), the part of each.
    """
    order = np.argsort(parts, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(parts[order])) + 1, len(parts))
    result = np.empty_like(advantages)
    for begin, end in pairwise([0, *ends.tolist()]):
        result[order[begin:end]] = whitened(advantages[order[begin:end]])
    return result


def whitened(advantages: Float64s, out: Float64s | None = None) -> Float64s:
    """Returns (A - mean) / sqrt(var + 1e-8), var with n - 1, as `masked_whiten` of SkyRL and verl has it.

    The variance is var / (var + 1e-8) rather than 1, which matters for advantages below 1e-3. Equal advantages give
    exactly 0, as does a single one, which SkyRL and verl refuse.
    out: the array for the result, which may be `advantages`; None: a new one.
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


def whitened_with_counts(advantages: Float64s, counts: Float64s) -> Float64s:
    """Returns the advantages of trajectories, whitened over all tokens, of which `counts` have each.

    Mean and variance are those of `whitened` with each advantage repeated, and are applied also to advantages that no
    token has. With fewer than two tokens there is no variance, and the result is 0. Sums are correctly rounded, so that
    the order of trajectories does not matter. An advantage that float32 cannot hold is refused later: nothing is
    whitened then.
    """
    counted, total = advantages[counts > 0], counts.sum()
    if total < 2:
        return np.zeros(len(advantages))
    if not (np.abs(advantages) <= FLOAT32_MAX).all():
        return advantages
    # The mean of equal advantages is exactly theirs.
    mean = math.fsum((counts * advantages).tolist()) / total if counted.min() < counted.max() else counted[0]
    centered: Float64s = advantages - mean
    variance = math.fsum((counts * centered * centered).tolist()) / max(1.0, total - 1)
    return centered / math.sqrt(variance + WHITEN_EPSILON)


def _sum_of_squares(numbers: Float64s, mean: np.float64) -> np.float64:
    """Returns the sum of (number - mean)²; a long array is halved repeatedly, as NumPy's own sum does."""
    if len(numbers) > _CACHED:
        half = len(numbers) // 2 // 8 * 8
        return _sum_of_squares(numbers[:half], mean) + _sum_of_squares(numbers[half:], mean)
    centered = numbers - mean
    centered *= centered
    total: np.float64 = centered.sum()
    return total
