"""The table of advantage estimators: what each is called, which settings and columns it reads, and its arithmetic.

A configuration's rules, warnings and the pipeline ask this table; nothing else names an estimator. All arithmetic is
float64. An estimator of a level is one entry:

- `Estimator`: computes nothing, clients send advantages.
- `GroupEstimator`: one advantage per trajectory, of the scores of its prompt group.
- `TokenEstimator`: an advantage and a return for each trained token, of its trajectory's rewards.
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
"""Longer trajectories are summed in pieces of this many tokens, all pieces of a batch at once."""


class Settings(Protocol):
    """The settings of a run that estimators read."""

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
    """settings: the settings, by their names in a configuration, that other estimators do not read.
    columns: response columns that it is computed of, which the run has to declare."""

    name: str
    settings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def takes_advantages(self) -> bool:
        """Whether clients send advantages."""
        return type(self) is Estimator


@dataclass(frozen=True, slots=True)
class GroupEstimator(Estimator):
    """compute: advantages of groups of two or more whose scores differ; float64 (..., trajectories of each) as the
    scores. of_one: the same of groups of one, where that is what a run asks for; (..., 1)."""

    compute: Callable[[Float64s, Settings], Float64s] = lambda scores, settings: scores.copy()
    of_one: Callable[[Float64s, Settings], Float64s] = lambda scores, settings: np.zeros(scores.shape)


@dataclass(frozen=True, slots=True)
class TokenEstimator(Estimator):
    """compute(settings, bounds, rewards, *columns) returns the advantages and returns of trained tokens, which may be
    one array; float64 (trained tokens,), and so are rewards and each of the columns. bounds: int64 (trajectories + 1,),
    trajectory t has the tokens `bounds[t]:bounds[t + 1]`. Overflow is the caller's to refuse."""

    compute: Callable[..., tuple[Float64s, Float64s]] = lambda settings, bounds, rewards: (rewards, rewards)


def flat(scores: Float64s) -> NDArray[np.bool_]:
    """Returns for each group whether it has two or more trajectories and all scores are equal. scores: (...,
    trajectories of each); the result: (...)."""
    equal: NDArray[np.bool_] = (scores == scores[..., :1]).all(axis=-1)
    return equal if scores.shape[-1] > 1 else np.zeros_like(equal)


def group_advantages(estimator: GroupEstimator, scores: Float64s, settings: Settings) -> Float64s:
    """Returns one advantage per trajectory, of prompt groups of one size. scores, result: (..., trajectories of each).

    Equal scores give exactly 0 by comparison, not by arithmetic, which leaves 1e-10 even in float64. A group of one
    that is left of several samples has no baseline and gets 0. A group's bits do not depend on the others.
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
    """Returns S = x + decay · S', S' that of the next in the run and 0 after its last; float64 like `numbers`.

    bounds: int64 (runs + 1,), run r is `bounds[r]:bounds[r + 1]`. A run's result does not depend on the others.

    Runs are cut into pieces, from their ends. The sums of all pieces grow by one number at a time, from the last to
    the first, with one operation for all; then each piece of a run gets its share of the sum that follows it. So a
    run that is no longer than a piece is exactly what the plain loop makes of it, and longer ones differ by rounding.
    """
    sums = numbers.copy()
    _sum_up(sums, bounds, decay)
    return sums


def _next(numbers: Float64s, bounds: Int64s) -> Float64s:
    """Returns the number after each in its run, 0 after the last."""
    following = np.empty_like(numbers)
    following[:-1] = numbers[1:]
    following[bounds[1:][np.diff(bounds) > 0] - 1] = 0
    return following


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
    # Longest first: pieces that still have numbers at a place from their ends come before pieces that have none.
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
