"""Estimators that give each trained token an advantage of its own: `gae` and `reinforce++`, and whitening.

All arithmetic is float64. A trajectory's bits depend on its own tokens alone; whitening is over many of them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.pipeline.credit.advantage import Float64s
from gristmill_service.pipeline.credit.trained_tokens import TrainedTokens

WHITEN_EPSILON = 1e-8
"""What SkyRL and verl add to the variance."""

PIECE = 1024
"""Longer trajectories are summed in pieces of so many tokens, all pieces of a batch at once."""

# So many numbers stay in a core's own cache while one is computed of another.
_CACHED = 1 << 16


def gae(
    tokens: TrainedTokens, rewards: Float64s, values: Float64s, gamma: float, lambda_: float
) -> tuple[Float64s, Float64s]:
    """Returns the advantages and returns of Generalised Advantage Estimation; each float64 (trained tokens,).

    δ = r + γV' - V, A = δ + γλA', where V' and A' are those of the trajectory's next trained token, 0 after its last;
    the return is A + V. Source: Schulman et al. 2016, arXiv:1506.02438, equations 11, 12 and 16. Nothing is whitened.
    rewards: `credited_rewards`; values: of the trained tokens, `tokens.take`.
    Raises InvalidArgumentError naming the token where float32 does not hold a result.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        advantages = _next(values, tokens.bounds)
        advantages *= gamma
        advantages += rewards
        advantages -= values
        _sum_up(advantages, tokens.bounds, gamma * lambda_)
        returns = advantages + values
    tokens.check(advantages, "advantage", "scale the rewards and values down")
    tokens.check(returns, "return", "scale the rewards and values down")
    return advantages, returns


def reinforce_plus_plus(tokens: TrainedTokens, rewards: Float64s, gamma: float) -> tuple[Float64s, Float64s]:
    """Returns the advantages and returns of REINFORCE++, which are the same; float64 (trained tokens,).

    G = r + γG', the discounted return to go, where G' is that of the trajectory's next trained token, 0 after its last.
    Source: Hu 2025, arXiv:2501.03262, where rewards have the KL in them (`kl_in_reward`) and `whiten: batch` follows.
    rewards: `credited_rewards`. Raises InvalidArgumentError naming the token where float32 does not hold a result.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        returns = discounted_sums(rewards, tokens.bounds, gamma)
    tokens.check(returns, "return")
    return returns, returns


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


def _next(numbers: Float64s, bounds: Int64s) -> Float64s:
    """Returns the number after each in its run, 0 after the last."""
    following = np.empty_like(numbers)
    following[:-1] = numbers[1:]
    following[bounds[1:][np.diff(bounds) > 0] - 1] = 0
    return following


def discounted_sums(numbers: Float64s, bounds: Int64s, decay: float) -> Float64s:
    """Returns S = x + decay · S', S' that of the next in the run and 0 after its last; float64 like `numbers`.

    bounds: int64 (runs + 1,), run r is `bounds[r]:bounds[r + 1]`. A run's result does not depend on the others.

    Runs are cut into pieces, from their ends. The sums of all pieces grow by one number at a time, from the last to
    the first, with one operation for all; then each piece of a run gets its share of the sum that follows it. So a
    run that is no longer than a piece is exactly what the plain loop makes of it, and longer ones differ by rounding.
    """
    sums = numbers.copy()
    _sum_up(sums, bounds, decay)
    return sums


def _sum_up(sums: Float64s, bounds: Int64s, decay: float) -> None:
    """Makes of numbers their discounted sums, in place."""
    if decay == 0 or not len(sums):
        return
    if decay == 1:
        _add_up_pieces(sums, bounds)
    else:
        _sum_pieces(sums, bounds, decay)
    powers = decay ** np.arange(PIECE, 0, -1.0)
    for run in np.flatnonzero(np.diff(bounds) > PIECE).tolist():
        _join_pieces(sums[bounds[run] : bounds[run + 1]], powers)


def _sum_pieces(sums: Float64s, bounds: Int64s, decay: float) -> None:
    """Makes of numbers their discounted sums within each piece, in place."""
    lengths = np.diff(bounds)
    counts = -(-lengths // PIECE)
    runs = np.repeat(np.arange(len(lengths)), counts)
    from_end = PIECE * (np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts))
    sizes = np.minimum(PIECE, lengths[runs] - from_end)
    # Longest first: those that still have numbers at a place from their ends come before those that have none.
    order = np.argsort(-sizes, kind="stable")
    at = (bounds[1:][runs] - 1 - from_end)[order]
    active = len(sizes) - np.cumsum(np.bincount(sizes))[:-1]
    carried = np.zeros(len(at))
    for count in active.tolist():
        places, carry = at[:count], carried[:count]
        carry *= decay
        carry += sums[places]
        sums[places] = carry
        places -= 1


def _add_up_pieces(sums: Float64s, bounds: Int64s) -> None:
    """As `_sum_pieces` without a decay, to the same bits."""
    for begin, end in pairwise(bounds.tolist()):
        for upto in range(end, begin, -PIECE):
            backwards = sums[max(begin, upto - PIECE) : upto][::-1]
            np.add.accumulate(backwards, out=backwards)
    # What begins with 0, as a sum does, has no negative zero.
    sums += 0.0


def _join_pieces(sums: Float64s, powers: Float64s) -> None:
    """Adds to each piece of one run what the sum after it is worth there, the last piece first, in place.

    powers: of the decay, (PIECE,), down to its first.
    """
    for end in range(len(sums) - PIECE, 0, -PIECE):
        begin = max(0, end - PIECE)
        sums[begin:end] += powers[begin - end :] * sums[end]
