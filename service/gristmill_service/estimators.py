"""The table of advantage estimators: their names, the settings and columns that they read, and their arithmetic.

The rules and warnings of a configuration, and the pipeline, use this table; no other code names an estimator. All
arithmetic is float64. An entry is one of these:

- `Estimator`: computes nothing; clients send advantages.
- `GroupEstimator`: one advantage per trajectory, computed from the scores of its prompt group.
- `TokenEstimator`: an advantage and a return for each trained token, computed from its trajectory's rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s

Float64s = NDArray[np.float64]

MAXRL_EPSILON = 1e-6

PIECE = 1024
"""Longer trajectories are summed in pieces of this many tokens, all pieces of a batch at the same time."""


class Settings(Protocol):
    """The settings that estimators read."""

    @property
    def n_samples_per_prompt(self) -> int: ...
    @property
    def grpo_norm_by_std(self) -> bool: ...
    @property
    def grpo_epsilon(self) -> float: ...
    @property
    def gamma(self) -> float: ...
    @property
    def lambda_(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Estimator:
    """settings: names of the settings that only this estimator reads. columns: the response columns that it needs,
    which the run has to declare.
    """

    name: str
    settings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def takes_advantages(self) -> bool:
        """Whether clients send advantages."""
        return type(self) is Estimator


@dataclass(frozen=True, slots=True)
class GroupEstimator(Estimator):
    """compute: returns the advantages of groups of two or more trajectories with different scores; float64
    (..., trajectories of each), like the scores. of_one: the same for groups of one, in runs of such groups; (..., 1).
    """

    compute: Callable[[Float64s, Settings], Float64s] = lambda scores, settings: scores.copy()
    of_one: Callable[[Float64s, Settings], Float64s] = lambda scores, settings: np.zeros(scores.shape)


@dataclass(frozen=True, slots=True)
class TokenEstimator(Estimator):
    """compute(settings, bounds, rewards, *columns) returns the advantages and returns of trained tokens, which may be
    the same array; float64 (trained tokens,), like rewards and each column. bounds: int64 (trajectories + 1,):
    trajectory t has the tokens `bounds[t]:bounds[t + 1]`. The caller refuses overflow."""

    compute: Callable[..., tuple[Float64s, Float64s]] = lambda settings, bounds, rewards: (rewards, rewards)


def flat(scores: Float64s) -> NDArray[np.bool_]:
    """Returns whether each group has two or more trajectories with equal scores. scores: (..., trajectories of each);
    the
    result: (...).
    """
    equal: NDArray[np.bool_] = (scores == scores[..., :1]).all(axis=-1)
    return equal if scores.shape[-1] > 1 else np.zeros_like(equal)


def group_advantages(estimator: GroupEstimator, scores: Float64s, settings: Settings) -> Float64s:
    """Returns one advantage per trajectory, for prompt groups of one size. scores, result: (..., trajectories of each).

    Equal scores give exactly 0 by comparison; arithmetic would leave 1e-10 even in float64. A group of one that remains
    of several samples has no baseline and gets 0. A group's result does not depend on other groups.
    """
    if scores.shape[-1] == 1:
        return np.zeros(scores.shape) if settings.n_samples_per_prompt > 1 else estimator.of_one(scores, settings)
    result = np.zeros(scores.shape)
    differ = ~flat(scores)
    result[differ] = estimator.compute(scores[differ], settings)
    return result


def _grpo(scores: Float64s, settings: Settings) -> Float64s:
    """Centered scores over their standard deviation: Shao et al. 2024 (DeepSeekMath, outcome supervision)."""
    centered: Float64s = scores - scores.mean(axis=-1, keepdims=True)
    if not settings.grpo_norm_by_std:
        return centered
    std = np.sqrt((centered * centered).sum(axis=-1, keepdims=True) / (scores.shape[-1] - 1))
    normed: Float64s = centered / (std + settings.grpo_epsilon)
    return normed


def _grpo_of_one(scores: Float64s, settings: Settings) -> Float64s:
    return scores / (1.0 + settings.grpo_epsilon) if settings.grpo_norm_by_std else scores.copy()


def _rloo(scores: Float64s, settings: Settings) -> Float64s:
    """Scores less the mean of the others': Ahmadian et al. 2024."""
    others: Float64s = (scores.sum(axis=-1, keepdims=True) - scores) / (scores.shape[-1] - 1)
    return scores - others


def _maxrl(scores: Float64s, settings: Settings) -> Float64s:
    """Centered scores over their mean."""
    mean = scores.mean(axis=-1, keepdims=True)
    relative: Float64s = (scores - mean) / (mean + MAXRL_EPSILON)
    return relative


def _gae(settings: Settings, bounds: Int64s, rewards: Float64s, values: Float64s) -> tuple[Float64s, Float64s]:
    """Generalised Advantage Estimation: Schulman et al. 2016, arXiv:1506.02438, equations 11, 12 and 16.

    δ = r + γV' - V, A = δ + γλA', where V' and A' are those of the trajectory's next trained token, 0 after its last;
    the return is A + V. Nothing is whitened.
    """
    advantages = _next(values, bounds)
    advantages *= settings.gamma
    advantages += rewards
    advantages -= values
    _sum_up(advantages, bounds, settings.gamma * settings.lambda_)
    return advantages, advantages + values


def _reinforce_plus_plus(settings: Settings, bounds: Int64s, rewards: Float64s) -> tuple[Float64s, Float64s]:
    """REINFORCE++: Hu 2025, arXiv:2501.03262, where rewards have the KL in them (`kl_in_reward`) and `whiten: batch`
    follows. Advantages and returns are the same, G = r + γG', the discounted return to go."""
    returns = discounted_sums(rewards, bounds, settings.gamma)
    return returns, returns


def discounted_sums(numbers: Float64s, bounds: Int64s, decay: float) -> Float64s:
    """Returns S = x + decay · S', where S' is that of the run's next number, 0 after the last; float64 like `numbers`.

    bounds: int64 (runs + 1,): run r has the numbers `bounds[r]:bounds[r + 1]`. A run's result does not depend on
        others.

    Runs are cut into pieces, from their ends. The sums of all pieces are extended by one number at a time, from the
    last to the first, with one operation for all; then each piece of a run gets its share of the sum after it. The
    result of a run within one piece equals that of a plain loop; longer ones differ by rounding.
    """
    sums = numbers.copy()
    _sum_up(sums, bounds, decay)
    return sums


def _next(numbers: Float64s, bounds: Int64s) -> Float64s:
    """Returns the next number of each in its run; 0 for the last."""
    following = np.empty_like(numbers)
    following[:-1] = numbers[1:]
    following[bounds[1:][np.diff(bounds) > 0] - 1] = 0
    return following


def _sum_up(sums: Float64s, bounds: Int64s, decay: float) -> None:
    """Replaces numbers by their discounted sums."""
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
    """Replaces numbers by their discounted sums within each piece."""
    lengths = np.diff(bounds)
    counts = -(-lengths // PIECE)
    runs = np.repeat(np.arange(len(lengths)), counts)
    from_end = PIECE * (np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts))
    sizes = np.minimum(PIECE, lengths[runs] - from_end)
    # Longest first, so that the pieces with a number at a distance from their end are a prefix.
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
    """Like `_sum_pieces` without a decay, with identical results."""
    for begin, end in pairwise(bounds.tolist()):
        for upto in range(end, begin, -PIECE):
            backwards = sums[max(begin, upto - PIECE) : upto][::-1]
            np.add.accumulate(backwards, out=backwards)
    # A sum that begins with 0 is never a negative zero.
    sums += 0.0


def _join_pieces(sums: Float64s, powers: Float64s) -> None:
    """Adds to each piece of a run its share of the sum after it, the last piece first, in place.

    powers: of the decay, (PIECE,), in descending order.
    """
    for end in range(len(sums) - PIECE, 0, -PIECE):
        begin = max(0, end - PIECE)
        sums[begin:end] += powers[begin - end :] * sums[end]


ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        GroupEstimator("grpo", ("grpo_epsilon",), compute=_grpo, of_one=_grpo_of_one),
        GroupEstimator("rloo", compute=_rloo),
        GroupEstimator("maxrl", compute=_maxrl, of_one=lambda scores, settings: scores.copy()),
        Estimator("none"),
        TokenEstimator("gae", ("gamma", "lambda", "whiten"), ("values",), _gae),
        TokenEstimator("reinforce++", ("gamma", "whiten"), compute=_reinforce_plus_plus),
    )
}


def readers(setting: str) -> list[str]:
    """Returns the names of the estimators that read a setting."""
    return [estimator.name for estimator in ESTIMATORS.values() if setting in estimator.settings]
