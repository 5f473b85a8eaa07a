"""What rewards become: scores and advantages of trajectories, or of each trained token, with the KL in them.

Puts `advantage`, `trained_tokens`, `kl` and `token_credit` in order (specification, section 11): which tokens are
trained, KL, advantages. Ranks and layout play no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.credit import advantage, kl, token_credit
from gristmill_service.pipeline.credit.advantage import Float64s
from gristmill_service.pipeline.credit.trained_tokens import (
    TrainedTokens,
    credited_rewards,
    response_rewards,
    reward_column,
    trained_tokens,
)
from gristmill_service.pipeline.rows.merge import Rows, most_kept
from gristmill_service.pipeline.rows.validate import Received


@dataclass(frozen=True, slots=True, eq=False)
class TokenCredit:
    """advantages, returns: float64 (trained tokens,); whitened over the batch where that is asked for.
    uncredited: how many rewards are in no token's return."""

    tokens: TrainedTokens
    advantages: Float64s
    returns: Float64s
    uncredited: int


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """advantages: float64 (trajectories,), zeros where they are of tokens. of_tokens: with `gae` and `reinforce++`.
    token_rewards: float32 over the steps' responses, where the KL changed them."""

    advantages: Float64s
    of_tokens: TokenCredit | None = None
    token_rewards: Ragged | None = None


def credit(
    received: Received, rows: Rows, scores: Float64s, trained: NDArray[np.bool_], loss_tokens: Int64s, config: RunConfig
) -> Credit:
    """scores: float64 (trajectories,), without the KL. trained: bool (steps,), False where a filter masks. loss_tokens:
    int64 (rows,).

    Raises InvalidArgumentError naming a trajectory or token whose numbers are beyond float32.
    """
    per_token = config.advantage_estimator in ("gae", "reinforce++")
    reference = config.kl_in_reward
    if reference is None and not per_token:
        return Credit(advantage.advantages(received, scores, config))
    if reference is not None and reference.column is not None:
        sums = kl.kl_of_rows(_row_sums(received, rows, reference.column), rows, loss_tokens, len(scores))
        changed = kl.kl_in_scores(received, scores, sums, reference.coef)
        return Credit(advantage.advantages(received, changed, config))
    kept = most_kept(rows, len(trained))
    tokens = trained_tokens(received, trained, kept)
    rewards, estimates = response_rewards(received.steps, kept), None
    if reference is not None and reference.estimator is not None:
        logprobs = (
            received.steps.logprobs if config.kl_from == "rollout_logprobs" else _column(received, config.kl_from)
        )
        assert logprobs is not None, "checked when the rows came"
        estimates = kl.kl_of_tokens(tokens, logprobs, _column(received, "ref_logprobs"), reference.estimator)
        rewards = kl.kl_in_rewards(tokens, rewards, estimates, reference.coef)
    shown = None if estimates is None else reward_column(received.steps, rewards)
    if per_token:
        return Credit(np.zeros(len(scores)), _of_tokens(tokens, rewards, config), shown)
    assert reference is not None, "without a KL there is nothing to do"
    assert estimates is not None, "it has an estimator"
    changed = kl.kl_in_scores(received, scores, kl.kl_of_trajectories(tokens, estimates), reference.coef)
    return Credit(advantage.advantages(received, changed, config), token_rewards=shown)


def _of_tokens(tokens: TrainedTokens, rewards: Float64s, config: RunConfig) -> TokenCredit:
    credited, uncredited = credited_rewards(tokens, rewards)
    if config.advantage_estimator == "gae":
        values = tokens.take(_column(tokens.received, "values"))
        advantages, returns = token_credit.gae(tokens, credited, values, config.gamma, config.lambda_)
    else:
        advantages, returns = token_credit.reinforce_plus_plus(tokens, credited, config.gamma)
    if config.whiten == "batch":
        advantages = token_credit.whitened(advantages)
    return TokenCredit(tokens, advantages, returns, uncredited)


def _column(received: Received, name: str) -> Ragged:
    return received.steps.extras[name].values


def _row_sums(received: Received, rows: Rows, name: str) -> Float64s:
    """Each row's sum over the steps that it is the first to have; float64 (rows,)."""
    values: NDArray[Any] = _column(received, name).compact().values
    if not len(rows):
        return np.zeros(0)
    of_visits = np.where(rows.owns_reward, values[rows.steps], 0).astype(np.float64)
    sums: Float64s = np.add.reduceat(of_visits, rows.edges[:-1])
    return sums
