"""The table of advantage estimators: their names, the settings and columns that they read, and their arithmetic.

The rules and warnings of a configuration, and the pipeline, use this table; no other code names an estimator. All
arithmetic is float64. An entry is one of these:

- `Estimator`: computes nothing; clients send advantages.
- `GroupEstimator`: computes one advantage per trajectory from the scores of its comparison group, and in
  some cases one per step.
- `RunningEstimator`: computes one advantage per trajectory from its score and the scores before it.
- `TokenEstimator`: computes an advantage and a return for each trained token from the rewards of its trajectory, and in
  some cases of its comparison group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s

Float64s = NDArray[np.float64]

MAXRL_EPSILON = 1e-6
OTB_EPSILON = 1e-8
SUM_PI_SQUARED = "sum_pi_squared"

PIECE = 1024
"""Longer trajectories are summed in pieces of this many tokens, all pieces of a batch at the same time."""


class LambdaRule(Protocol):
    """A rule for the λ of `gae`: `length_adaptive` is the coefficient α; if it is None, λ is read from a column."""

    @property
    def length_adaptive(self) -> float | None: ...


class Settings(Protocol):
    """The settings that estimators read."""

    @property
    def n_samples_per_prompt(self) -> int: ...
    @property
    def grpo_norm_by_std(self) -> bool: ...
    @property
    def grpo_epsilon(self) -> float: ...
    @property
    def grpo_std_over(self) -> Literal["group", "batch"]: ...
    @property
    def rloo_norm_by_std(self) -> bool: ...
    @property
    def gamma(self) -> float: ...
    @property
    def lambda_(self) -> float | LambdaRule: ...
    @property
    def critic_lambda(self) -> float | None: ...


class Groups(NamedTuple):
    """Comparison groups of one size.

    scores, tokens: float64 (..., trajectories of each), each trajectory's score, and how many tokens it trains.
    batch_std: the standard deviation of all scores of the batch, with n - 1; read with `grpo_std_over: batch`.
    """

    scores: Float64s
    tokens: Float64s
    batch_std: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimator:
    """An entry of the table.

    settings: the settings that not every estimator reads. columns: the response columns that the run must declare.
    reads_components: whether each of `reward_components` takes the place of the scores, and the advantages are summed
    by `component_weights`. compares_groups: whether a `TokenEstimator` compares the trajectories of a group.
    compares_steps: whether a `GroupEstimator` also compares steps.
    """

    name: str
    settings: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    reads_components: bool = False
    compares_groups: bool = False
    compares_steps: bool = False

    @property
    def takes_advantages(self) -> bool:
        """Whether clients send advantages."""
        return type(self) is Estimator


@dataclass(frozen=True, slots=True)
class GroupEstimator(Estimator):
    """Computes one advantage per trajectory from its comparison group.

    compute: returns the advantages of groups of two or more trajectories with different scores; float64 (groups,
    trajectories of each), like the scores. of_one: the same for groups of one in runs with one sample per prompt;
    (..., 1), from scores of this shape. With `compares_steps`, `compute` is also applied to the returns of steps that
    `step_groups` compares, and each step's advantage is added to that of its trajectory.
    """

    compute: Callable[[Groups, Settings], Float64s] = lambda groups, settings: groups.scores.copy()
    of_one: Callable[[Float64s, Settings], Float64s] = lambda scores, settings: np.zeros(scores.shape)


@dataclass(frozen=True, slots=True)
class RunningEstimator(Estimator):
    """Computes one advantage per trajectory from a baseline that the run keeps over its batches;
    `gristmill_service.pipeline.credit.baselines` computes both."""


@dataclass(frozen=True, slots=True)
class TokenEstimator(Estimator):
    """Computes an advantage and a return for each trained token.

    compute(settings, bounds, rewards, *columns): returns both, possibly as the same array; float64 (trained tokens,),
    like rewards and each column. bounds: int64 (trajectories + 1,): trajectory t has the tokens
    `bounds[t]:bounds[t + 1]`. The caller rejects overflow.
    With `compares_groups` it is called with whole groups, and the first column is int64 (trajectories,): the number of
    the comparison group of each.
    """

    compute: Callable[..., tuple[Float64s, Float64s]] = lambda settings, bounds, rewards: (rewards, rewards)


def flat(scores: Float64s) -> NDArray[np.bool_]:
    """Returns whether each group has two or more trajectories, all with equal scores.

    scores: (..., trajectories of each). The result: (...).
    """
    equal: NDArray[np.bool_] = (scores == scores[..., :1]).all(axis=-1)
    return equal if scores.shape[-1] > 1 else np.zeros_like(equal)


def group_advantages(estimator: GroupEstimator, groups: Groups, settings: Settings) -> Float64s:
    """Returns one advantage per trajectory, for comparison groups of one size; (..., trajectories of each).

    Equal scores give exactly 0 by comparison; arithmetic would leave 1e-10 even in float64. A group of one that remains
    of several samples has no baseline and gets 0. Except for `batch_std`, a group's result does not depend on others.
    """
    scores = groups.scores
    if scores.shape[-1] == 1:
        return np.zeros(scores.shape) if settings.n_samples_per_prompt > 1 else estimator.of_one(scores, settings)
    result = np.zeros(scores.shape)
    differ = ~flat(scores)
    compared = Groups(scores[differ], groups.tokens[differ], groups.batch_std)
    result[differ] = estimator.compute(compared, settings)
    return result


def _grpo(groups: Groups, settings: Settings) -> Float64s:
    """Centered scores over their standard deviation: Shao et al. 2024, arXiv:2402.03300 (outcome supervision).

    `grpo_std_over: batch` divides by that of the whole batch, as TRL does with `scale_rewards: batch`;
    `grpo_norm_by_std: false` does not divide, as Dr. GRPO: Liu et al. 2025, arXiv:2503.20783.
    """
    centered: Float64s = groups.scores - groups.scores.mean(axis=-1, keepdims=True)
    if not settings.grpo_norm_by_std:
        return centered
    std = groups.batch_std if settings.grpo_std_over == "batch" else _std(centered)
    normed: Float64s = centered / (std + settings.grpo_epsilon)
    return normed


def _std(centered: Float64s) -> Float64s:
    """Returns the standard deviation of each group, with n - 1; (..., 1)."""
    std: Float64s = np.sqrt((centered * centered).sum(axis=-1, keepdims=True) / (centered.shape[-1] - 1))
    return std


def _grpo_of_one(scores: Float64s, settings: Settings) -> Float64s:
    return scores / (1.0 + settings.grpo_epsilon) if settings.grpo_norm_by_std else scores.copy()


def _rloo(groups: Groups, settings: Settings) -> Float64s:
    """Scores less the mean of the others': Ahmadian et al. 2024, arXiv:2402.14740.

    `rloo_norm_by_std` divides by the standard deviation of the others, unless it is 0: NeMo-RL with
    `use_leave_one_out_baseline` and `normalize_rewards`, which are its defaults.
    """
    scores = groups.scores
    centered: Float64s = scores - (scores.sum(axis=-1, keepdims=True) - scores) / (scores.shape[-1] - 1)
    if not settings.rloo_norm_by_std:
        return centered
    std = _std_of_others(scores)
    return np.where(std > 0, centered / (std + settings.grpo_epsilon), centered)


def _std_of_others(scores: Float64s) -> Float64s:
    """Returns, for each trajectory, the standard deviation of the other scores of its group, with n - 1: exactly 0 if
    they are equal, or if there is only one; like the scores."""
    result = np.zeros(scores.shape)
    for place in range(scores.shape[-1]) if scores.shape[-1] > 2 else ():
        others = np.delete(scores, place, axis=-1)
        result[..., place] = np.where(flat(others), 0.0, others.std(axis=-1, ddof=1))
    return result


def _maxrl(groups: Groups, _: Settings) -> Float64s:
    """Centered scores over their mean."""
    mean = groups.scores.mean(axis=-1, keepdims=True)
    relative: Float64s = (groups.scores - mean) / (mean + MAXRL_EPSILON)
    return relative


def _opo(groups: Groups, _: Settings) -> Float64s:
    """Scores less their mean weighted by trained tokens: Hao et al. 2025, arXiv:2505.23585, and verl's `opo`.

    The plain mean if no trajectory of the group has a trained token.
    """
    tokens = groups.tokens
    weights = np.where(tokens.any(axis=-1, keepdims=True), tokens, 1.0)
    baseline = (weights * groups.scores).sum(axis=-1, keepdims=True) / weights.sum(axis=-1, keepdims=True)
    # The mean of equal scores is exactly theirs.
    lowest = np.where(weights > 0, groups.scores, np.inf).min(axis=-1, keepdims=True)
    highest = np.where(weights > 0, groups.scores, -np.inf).max(axis=-1, keepdims=True)
    centered: Float64s = groups.scores - np.clip(baseline, lowest, highest)
    return centered


def _passk(groups: Groups, settings: Settings) -> Float64s:
    """The best trajectory's lead over the second best, 0 for all others: arXiv:2503.19595, and verl's `grpo_passk`.

    The lead is divided by the group's standard deviation unless `grpo_norm_by_std: false`.
    """
    scores = groups.scores
    second, first = np.moveaxis(np.sort(scores, axis=-1)[..., -2:], -1, 0)
    lead = (first - second)[..., np.newaxis]
    if settings.grpo_norm_by_std:
        lead /= _std(scores - scores.mean(axis=-1, keepdims=True)) + settings.grpo_epsilon
    return np.where(scores == first[..., np.newaxis], lead, 0.0)


def _gae(
    settings: Settings,
    bounds: Int64s,
    rewards: Float64s,
    values: Float64s,
    lambdas: Float64s | None = None,
    bootstraps: Float64s | None = None,
) -> tuple[Float64s, Float64s]:
    """Generalized Advantage Estimation: Schulman et al. 2016, arXiv:1506.02438, equations 11, 12 and 16.

    δ = r + γV' - V, A = δ + γλA', where V' and A' are those of the trajectory's next trained token, 0 after its last;
    the return is A + V. With `critic_lambda`, the return is computed with that λ instead: VAPO, Yue et al. 2025,
    arXiv:2504.05118, decoupled GAE. lambdas: the λ of each trained token, where it is read from a column. bootstraps:
    float64 (trajectories,), the V' after the last token of each: a value if a limit truncated the trajectory rather
    than ended by the environment: Pardo et al. 2018, arXiv:1712.00378, equation 6.
    """
    advantages = _next(values, bounds)
    if bootstraps is not None:
        has_tokens = np.diff(bounds) > 0
        advantages[bounds[1:][has_tokens] - 1] = bootstraps[has_tokens]
    advantages *= settings.gamma
    advantages += rewards
    advantages -= values
    returns = advantages if settings.critic_lambda is None else advantages.copy()
    _sum_up(advantages, bounds, settings.gamma * _lambda(settings.lambda_, bounds, lambdas))
    if settings.critic_lambda is not None:
        _sum_up(returns, bounds, settings.gamma * settings.critic_lambda)
    return advantages, returns + values


def _lambda(rule: float | LambdaRule, bounds: Int64s, lambdas: Float64s | None) -> float | Float64s:
    """Returns λ, or that of each trained token. `length_adaptive: α` is max(0, 1 - 1/(α·n)) for a trajectory of n
    trained tokens: VAPO, arXiv:2504.05118, equation 7, where the sum of λ's powers is then about α·n."""
    if isinstance(rule, float):
        return rule
    if rule.length_adaptive is None:
        assert lambdas is not None, "the configuration declares the column"
        return lambdas
    lengths = np.diff(bounds)
    adaptive: Float64s = np.maximum(0.0, 1 - 1 / (rule.length_adaptive * np.maximum(1, lengths)))
    return np.repeat(adaptive, lengths)


def _reinforce_plus_plus(settings: Settings, bounds: Int64s, rewards: Float64s) -> tuple[Float64s, Float64s]:
    """REINFORCE++: Hu 2025, arXiv:2501.03262, where rewards have the KL in them (`kl_in_reward`) and `whiten: batch`
    follows. Advantages and returns are the same, G = r + γG', the discounted return to go."""
    returns = discounted_sums(rewards, bounds, settings.gamma)
    return returns, returns


def _otb(
    _: Settings, bounds: Int64s, rewards: Float64s, groups: Int64s, logprobs: Float64s, sum_pi_squared: Float64s
) -> tuple[Float64s, Float64s]:
    """Returns to go, less the optimal token baseline: verl's `tir_optimal_token_baseline`.

    W is the sum of 1 - 2π + Σπ², at least 0, over a trajectory's trained tokens up to this one. The baseline of the
    group's tokens with the same index in their trajectories is Σ G·W / (Σ W + 1e-8), 0 where only one trajectory has
    such a token.
    """
    returns, lengths = discounted_sums(rewards, bounds, 1.0), np.diff(bounds)
    # Never below 0, but for rounding: weights of tokens with a probability of nearly 1 would cancel each other.
    weights = np.maximum(0.0, 1 - 2 * np.exp(logprobs) + sum_pi_squared)
    for begin, end in pairwise(bounds.tolist()):
        np.add.accumulate(weights[begin:end], out=weights[begin:end])
    groups = np.unique(groups, return_inverse=True)[1]
    longest = np.zeros(groups.max(initial=-1) + 1, np.int64)
    np.maximum.at(longest, groups, lengths)
    # Tokens that are compared have the same place: first those of the first group, by their index.
    first = (np.cumsum(longest) - longest)[groups]
    places = np.arange(len(rewards)) + np.repeat(first - bounds[:-1], lengths)
    baselines = np.bincount(places, returns * weights) / (np.bincount(places, weights) + OTB_EPSILON)
    baselines[np.bincount(places) < 2] = 0
    return returns - baselines[places], returns


def discounted_sums(numbers: Float64s, bounds: Int64s, decay: float | Float64s) -> Float64s:
    """Returns S = x + decay · S', where S' is that of the run's next number, 0 after the last; float64 like `numbers`.

    bounds: int64 (runs + 1,): run r has the numbers `bounds[r]:bounds[r + 1]`. A run's result does not depend on
        others. decay: of all numbers, or one per number.

    Runs are cut into pieces, from their ends. All pieces are summed at the same time, one number per step, from the
    last to the first. Then the decayed sum of the pieces after it is added to each piece of a run. The result of a
    run within one piece equals that of a plain loop; longer ones differ by rounding.
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


def _sum_up(sums: Float64s, bounds: Int64s, decay: float | Float64s) -> None:
    """Replaces numbers by their discounted sums. decay: of all numbers, or one per number."""
    is_constant = isinstance(decay, float)
    if not len(sums) or (is_constant and decay == 0):
        return
    if is_constant and decay == 1:
        _add_up_pieces(sums, bounds)
    else:
        _sum_pieces(sums, bounds, decay)
    powers: Float64s = decay ** np.arange(PIECE, 0, -1.0) if isinstance(decay, float) else np.empty(0)
    for run in np.flatnonzero(np.diff(bounds) > PIECE).tolist():
        part = slice(bounds[run], bounds[run + 1])
        _join_pieces(sums[part], powers, decay if isinstance(decay, float) else decay[part])


def _sum_pieces(sums: Float64s, bounds: Int64s, decay: float | Float64s) -> None:
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
        carry *= decay if isinstance(decay, float) else decay[places]
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


def _join_pieces(sums: Float64s, powers: Float64s, decay: float | Float64s) -> None:
    """Adds to each piece of a run the decayed sum of the pieces after it, the last piece first, in place.

    powers: of a decay of all numbers, (PIECE,), in descending order; not read if each number has its own decay.
    """
    for end in range(len(sums) - PIECE, 0, -PIECE):
        begin = max(0, end - PIECE)
        if isinstance(decay, float):
            shares = powers[begin - end :]
        else:
            shares = np.multiply.accumulate(decay[begin:end][::-1])[::-1]
        sums[begin:end] += shares * sums[end]


_GRPO_SETTINGS = ("grpo_norm_by_std", "grpo_epsilon", "grpo_std_over")

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator
    for estimator in (
        GroupEstimator("grpo", _GRPO_SETTINGS, compute=_grpo, of_one=_grpo_of_one),
        GroupEstimator("rloo", ("grpo_epsilon", "rloo_norm_by_std"), compute=_rloo),
        GroupEstimator("maxrl", compute=_maxrl, of_one=lambda scores, settings: scores.copy()),
        GroupEstimator("opo", compute=_opo),
        # GDPO: Liu et al. 2026, arXiv:2601.05242: each component of the reward through GRPO by itself.
        GroupEstimator(
            "gdpo",
            (*_GRPO_SETTINGS, "component_weights"),
            reads_components=True,
            compute=_grpo,
            of_one=_grpo_of_one,
        ),
        # GiGPO: Feng et al. 2025, arXiv:2505.10978, section 4: GRPO over trajectories, and over all visits of a state
        # in their group, also several visits by one trajectory, as in verl-agent's `core_gigpo.py`.
        GroupEstimator(
            "gigpo",
            (*_GRPO_SETTINGS, "step_groups"),
            compute=_grpo,
            of_one=_grpo_of_one,
            compares_steps=True,
        ),
        RunningEstimator("rae", ("rae",)),
        GroupEstimator("passk", ("grpo_norm_by_std", "grpo_epsilon"), compute=_passk),
        Estimator("none"),
        TokenEstimator("gae", ("gamma", "lambda", "critic_lambda", "bootstrap"), ("values",), compute=_gae),
        TokenEstimator("otb", (), ("old_logprobs", SUM_PI_SQUARED), compute=_otb, compares_groups=True),
        TokenEstimator("reinforce++", ("gamma",), compute=_reinforce_plus_plus),
    )
}


def readers(setting: str) -> list[str]:
    """Returns the names of the estimators that read a setting."""
    return [estimator.name for estimator in ESTIMATORS.values() if setting in estimator.settings]
