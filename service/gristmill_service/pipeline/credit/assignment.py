"""Assigns credit: turns rewards, with a KL in them, into advantages of trajectories or of each trained token.

Combines `advantage`, `trained_tokens`, `kl` and `estimators` (specification, section 11): first the trained tokens,
then the KL, then advantages. Ranks and layout play no part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s, RunningEstimator, Settings, TokenEstimator
from gristmill_service.helper_thread import in_two_threads
from gristmill_service.pipeline.credit import advantage, kl
from gristmill_service.pipeline.credit.baselines import Baselines, running_advantages
from gristmill_service.pipeline.credit.length_penalty import penalized
from gristmill_service.pipeline.credit.trained_tokens import (
    Part,
    TrainedTokens,
    credited_rewards,
    response_rewards,
    reward_column,
    trained_tokens,
)
from gristmill_service.pipeline.credit.whitening import whitened
from gristmill_service.pipeline.numbers import Numbers
from gristmill_service.pipeline.rows.merge import KeptTokens, kept_tokens
from gristmill_service.pipeline.rows.validate import Received


def token_advantages(
    estimator: TokenEstimator, tokens: TrainedTokens, settings: Settings, rewards: Float64s, *columns: Any, **more: Any
) -> tuple[Float64s, Float64s]:
    """Returns the advantages and returns of the trained tokens; each float64 (trained tokens,).

    rewards: `credited_rewards`. columns, more: what `estimator.compute` takes after them.
    Raises InvalidArgumentError naming the token where float32 does not hold a result.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        advantages, returns = estimator.compute(settings, tokens.bounds, rewards, *columns, **more)
    remedy = f"scale the {' and '.join(('rewards', *estimator.columns))} down"
    if advantages is not returns:
        tokens.check(advantages, "advantage", remedy)
    tokens.check(returns, "return", remedy)
    return advantages, returns


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """The advantages and returns of trained tokens.

    advantages: float64 (trained tokens,), whitened with `whiten: batch`. returns: float32 over the steps' responses, 0
    where nothing is trained; None for advantages of steps and those that clients sent. uncredited: the number of
    rewards that are in no token's return.
    """

    tokens: TrainedTokens
    advantages: Float64s
    returns: Ragged | None = None
    uncredited: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The advantages of a batch.

    advantages: float64 (trajectories,), whitened with `whiten: batch` and `trajectories`; zeros if `of_tokens` is set.
    of_tokens: set with a `TokenEstimator`, for advantages of steps, and for those of tokens that clients sent and
    `whiten` changes.
    token_rewards: float32 over the steps' responses; set if they include a KL.
    baselines: the run's baselines after the batch.
    """

    advantages: Float64s
    of_tokens: TokenCredit | None = None
    token_rewards: Ragged | None = None
    baselines: Baselines = field(default_factory=dict)


def credit(
    numbers: Numbers,
    received: Received,
    trained: NDArray[np.bool_],
    loss_tokens: Int64s,
    config: RunConfig,
    before: Baselines,
) -> Credit:
    """Computes the credit of a batch.

    received: the steps with their tokens, which only credit per token and a KL in rewards read. trained: bool (steps,),
    False where a filter masks. loss_tokens: int64 (rows,). before: the run's baselines before this batch.
    Raises InvalidArgumentError naming a trajectory or token whose numbers float32 cannot hold.
    """
    per_token = isinstance(config.estimator, TokenEstimator)
    reference, rows, scores = config.kl_in_reward, numbers.rows, numbers.scores
    lengths = advantage.TokenCounts(
        advantage.sampled_tokens(numbers.sampled * trained, numbers.received.trajectory_bounds),
        advantage.trajectory_tokens(rows.trajectories, loss_tokens, len(scores)),
    )
    sent = received.steps.token_advantages
    if config.estimator.compares_steps or (sent is not None and config.whiten != "none"):
        tokens = trained_tokens(received, trained, kept_tokens(rows, len(trained)).most)
        if sent is not None:
            values = tokens.take(sent)
        else:
            of_steps = advantage.step_advantages(
                numbers.received, scores, lengths.sampled, numbers.input_tokens, config
            )
            values = np.repeat(of_steps, np.diff(tokens.step_bounds))
        if config.whiten == "batch":
            whitened(values, out=values)
        return Credit(np.zeros(len(scores)), TokenCredit(tokens, values))
    if reference is None and not per_token:
        return _of_trajectories(numbers, scores, lengths, before, config)
    if reference is not None and reference.column is not None:
        sums = kl.kl_of_steps(received, reference.column)
        changed = kl.kl_in_scores(received, scores, sums, reference.coef)
        return _of_trajectories(numbers, changed, lengths, before, config)
    kept = kept_tokens(rows, len(trained))
    compared = received.compared.numbers if config.estimator.compares_groups else None
    of_tokens = _OfTokens(trained_tokens(received, trained, kept.most), kept, compared, config)
    of_tokens.compute(received.group_bounds if config.estimator.compares_groups else None)
    if per_token:
        return Credit(np.zeros(len(scores)), of_tokens.credit(), of_tokens.token_rewards)
    assert reference is not None, "without a KL there is nothing to do"
    changed = kl.kl_in_scores(received, scores, of_tokens.kl_sums, reference.coef)
    return replace(_of_trajectories(numbers, changed, lengths, before, config), token_rewards=of_tokens.token_rewards)


def _of_trajectories(
    numbers: Numbers, scores: Float64s, tokens: advantage.TokenCounts, before: Baselines, config: RunConfig
) -> Credit:
    """Returns the credit of trajectories with these scores."""
    after, received, inputs = before, numbers.received, numbers.input_tokens
    if isinstance(config.estimator, RunningEstimator):
        scores = penalized(received, scores, inputs, config)
        estimated, after = running_advantages(received, scores, before, config)
    else:
        estimated = advantage.estimated(received, scores, tokens.sampled, inputs, config)
    return Credit(advantage.whitened_of_trajectories(estimated, tokens.in_rows, config), baselines=after)


class _OfTokens:
    """Computes arrays over a batch's trained tokens, for some trajectories at a time.

    kept: see `response_rewards`. compared: int64 (trajectories,), the comparison group of each, if they are compared.
    kl_sums: float64 (trajectories,), the sums of the KL estimates; empty for a `TokenEstimator`.
    """

    def __init__(self, tokens: TrainedTokens, kept: KeptTokens, compared: Int64s | None, config: RunConfig) -> None:
        self._tokens, self._kept, self._compared, self._config = tokens, kept, compared, config
        # Pages that are never touched take no memory.
        self._rewards, self._returns = (np.empty(tokens.edges[-1], np.float32) for _ in range(2))
        self._advantages, self._uncredited = np.empty(len(tokens)), 0
        self.kl_sums = np.empty(0)

    def compute(self, groups: Int64s | None) -> None:
        """Computes all arrays. groups: the bounds of groups, if each is computed as a whole; else None."""
        parts = in_two_threads(self._tokens.parts(groups=groups), self._compute)
        self.kl_sums = np.concatenate([self.kl_sums, *(sums for sums, _ in parts)])
        self._uncredited = sum(uncredited for _, uncredited in parts)

    @property
    def token_rewards(self) -> Ragged | None:
        """The rewards with the KL in them; None without one."""
        return None if self._config.kl_in_reward is None else self._column(self._rewards)

    def credit(self) -> TokenCredit:
        if self._config.whiten == "batch":
            whitened(self._advantages, out=self._advantages)
        return TokenCredit(self._tokens, self._advantages, self._column(self._returns), self._uncredited)

    def _column(self, values: NDArray[np.float32]) -> Ragged:
        return Ragged.from_lengths(values, self._tokens.steps.response_lengths)

    def _compute(self, part: Part) -> tuple[Float64s, int]:
        """Computes a part. Returns the KL sums of its trajectories, and how many rewards are in no token's return."""
        tokens, config = part.tokens, self._config
        kept, reference = self._kept.of(part.steps), config.kl_in_reward
        rewards = response_rewards(tokens.steps, kept)
        estimates = np.empty(0)
        if reference is not None and reference.estimator is not None:
            name, steps = config.kl_from, tokens.steps
            sampled = steps.logprobs if name == "rollout_logprobs" else _column(steps, name)
            assert sampled is not None, "checked when the rows came"
            estimates = kl.kl_of_tokens(tokens, sampled, _column(steps, "ref_logprobs"), reference.estimator)
            rewards = kl.kl_in_rewards(tokens, rewards, estimates, reference.coef)
            self._rewards[part.responses] = reward_column(steps, rewards).values
        if isinstance(config.estimator, TokenEstimator):
            return np.empty(0), self._credit(config.estimator, part, rewards, kept)
        return kl.kl_of_trajectories(tokens, estimates), 0

    def _credit(self, estimator: TokenEstimator, part: Part, rewards: Float64s, kept: KeptTokens) -> int:
        tokens = part.tokens
        credited, uncredited = credited_rewards(tokens, rewards, kept)
        columns: list[Any] = [] if self._compared is None else [self._compared[part.trajectories]]
        columns += [tokens.take(_column(tokens.steps, name)) for name in estimator.columns]
        more: dict[str, Any] = {}
        if (name := self._config.lambda_column) is not None:
            more["lambdas"] = tokens.of_steps(_column(tokens.steps, name))
        if (name := self._config.bootstrap_column) is not None:
            more["bootstraps"] = self._bootstraps(tokens, name)
        advantages, returns = token_advantages(estimator, tokens, self._config, credited, *columns, **more)
        self._advantages[part.trained] = advantages
        tokens.put(returns, self._returns[part.responses])
        return uncredited

    def _bootstraps(self, tokens: TrainedTokens, column: str) -> Float64s:
        """Returns the value after each trajectory: that of its last step if it was truncated, else 0; float64
        (trajectories,)."""
        assert self._config.bootstrap is not None, "it names the column"
        reasons, lasts = frozenset(self._config.bootstrap.stop_reasons), tokens.trajectory_bounds[1:] - 1
        is_truncated = [tokens.steps.stop_reasons[last] in reasons for last in lasts.tolist()]
        values = _column(tokens.steps, column).compact().values[lasts].astype(np.float64)
        return np.where(is_truncated, values, 0.0)


def _column(steps: Steps, name: str) -> Ragged:
    return steps.extras[name].values
