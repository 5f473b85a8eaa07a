"""What rewards become: scores and advantages of trajectories, or of each trained token, with the KL in them.

Puts `advantage`, `trained_tokens`, `kl` and `token_credit` in order (specification, section 11): which tokens are
trained, KL, advantages. Ranks and layout play no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import Steps
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
    """advantages: float64 (trained tokens,); whitened over the batch where that is asked for. returns: float32 over the
    steps' responses, 0 where nothing is trained. uncredited: how many rewards are in no token's return."""

    tokens: TrainedTokens
    advantages: Float64s
    returns: Ragged
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
    with_kl = None if reference is None else np.empty(tokens.edges[-1], np.float32)
    shown = None if with_kl is None else Ragged.from_lengths(with_kl, received.steps.response_lengths)
    if per_token:
        return Credit(np.zeros(len(scores)), _of_tokens(tokens, _rewards(tokens, kept, config, with_kl), config), shown)
    sums = np.concatenate([np.empty(0), *(part.kl_sums() for part in _rewards(tokens, kept, config, with_kl))])
    assert reference is not None, "without a KL there is nothing to do"
    changed = kl.kl_in_scores(received, scores, sums, reference.coef)
    return Credit(advantage.advantages(received, changed, config), token_rewards=shown)


class _Rewarded(NamedTuple):
    """Some trajectories' trained tokens; the rewards of their responses, with the KL in them; and its estimates, where
    there is one. trained: which of the batch's trained tokens they have; responses: and which response tokens."""

    tokens: TrainedTokens
    rewards: Float64s
    estimates: Float64s | None
    trained: slice
    responses: slice

    def kl_sums(self) -> Float64s:
        assert self.estimates is not None, "asked for where there is a KL"
        return kl.kl_of_trajectories(self.tokens, self.estimates)


def _rewards(
    tokens: TrainedTokens, kept: Int64s, config: RunConfig, with_kl: NDArray[np.float32] | None
) -> Iterator[_Rewarded]:
    """Yields the batch's trajectories, some at a time. with_kl: gets the rewards where a KL changes them."""
    reference = config.kl_in_reward
    for own, part in tokens.parts():
        trained, responses = (
            slice(bounds[own.start], bounds[own.stop]) for bounds in (tokens.step_bounds, tokens.edges)
        )
        rewards, estimates = response_rewards(part.steps, kept[own]), None
        if reference is not None and reference.estimator is not None and with_kl is not None:
            sampled = (
                part.steps.logprobs if config.kl_from == "rollout_logprobs" else _column(part.steps, config.kl_from)
            )
            assert sampled is not None, "checked when the rows came"
            estimates = kl.kl_of_tokens(part, sampled, _column(part.steps, "ref_logprobs"), reference.estimator)
            rewards = kl.kl_in_rewards(part, rewards, estimates, reference.coef)
            with_kl[responses] = reward_column(part.steps, rewards).values
        yield _Rewarded(part, rewards, estimates, trained, responses)


def _of_tokens(tokens: TrainedTokens, parts: Iterable[_Rewarded], config: RunConfig) -> TokenCredit:
    advantages, returns = np.empty(len(tokens)), np.empty(tokens.edges[-1], np.float32)
    uncredited = 0
    for part in parts:
        credited, lost = credited_rewards(part.tokens, part.rewards)
        if config.advantage_estimator == "gae":
            values = part.tokens.take(_column(part.tokens.steps, "values"))
            found = token_credit.gae(part.tokens, credited, values, config.gamma, config.lambda_)
        else:
            found = token_credit.reinforce_plus_plus(part.tokens, credited, config.gamma)
        advantages[part.trained] = found[0]
        returns[part.responses] = part.tokens.response(found[1], "return").values
        uncredited += lost
    if config.whiten == "batch":
        token_credit.whitened(advantages, out=advantages)
    return TokenCredit(tokens, advantages, Ragged.from_lengths(returns, tokens.steps.response_lengths), uncredited)


def _column(steps: Steps, name: str) -> Ragged:
    return steps.extras[name].values


def _row_sums(received: Received, rows: Rows, name: str) -> Float64s:
    """Each row's sum over the steps that it is the first to have; float64 (rows,)."""
    values: NDArray[Any] = _column(received.steps, name).compact().values
    if not len(rows):
        return np.zeros(0)
    of_visits = np.where(rows.owns_reward, values[rows.steps], 0).astype(np.float64)
    sums: Float64s = np.add.reduceat(of_visits, rows.edges[:-1])
    return sums
