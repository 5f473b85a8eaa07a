"""Batches for the tests of credit per token, and its rules written down a second time, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.estimators import ESTIMATORS, Float64s, TokenEstimator
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit.assignment import token_advantages
from gristmill_service.pipeline.credit.trained_tokens import TrainedTokens, trained_tokens
from gristmill_service.pipeline.rows.validate import Received, receive
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import Row


@dataclass(frozen=True)
class Token:
    """A response token: what a client and a trainer give for it."""

    mask: int = 1
    reward: float = 0.0
    value: float = 0.0
    logprob: float = 0.0
    reference: float = 0.0


Trajectory = list[list[Token]]
"""The steps of a trajectory, each of one response token or more."""

NUMBERS = st.integers(-8, 8).map(float) | st.floats(-100, 100, width=32)
LOGPROBS = st.floats(-20, 0, width=32)
TOKENS = st.builds(
    Token, mask=st.integers(0, 1), reward=st.just(0.0) | NUMBERS, value=NUMBERS, logprob=LOGPROBS, reference=LOGPROBS
)
TRAJECTORIES = st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=4)
BATCHES = st.lists(TRAJECTORIES, min_size=1, max_size=5)
DISCOUNTS = st.sampled_from([0.0, 1.0, 0.5, 0.95, 1e-5]) | st.floats(0, 1)


def gae(
    tokens: TrainedTokens,
    rewards: Float64s,
    values: Float64s,
    gamma: float,
    lambda_: Any,
    *lambdas: Float64s,
    critic: float | None = None,
) -> tuple[Float64s, Float64s]:
    """lambda_: the setting `lambda`. lambdas: the λ of each token, if a column has it. critic: `critic_lambda`."""
    return _token_advantages("gae", tokens, gamma, lambda_, rewards, values, *lambdas, critic=critic)


def reinforce_plus_plus(tokens: TrainedTokens, rewards: Float64s, gamma: float) -> tuple[Float64s, Float64s]:
    return _token_advantages("reinforce++", tokens, gamma, 1.0, rewards)


def _token_advantages(
    name: str, tokens: TrainedTokens, gamma: float, lambda_: Any, *numbers: Float64s, critic: float | None = None
) -> tuple[Float64s, Float64s]:
    estimator = ESTIMATORS[name]
    assert isinstance(estimator, TokenEstimator)
    settings = config_of(1, gamma=gamma, critic_lambda=critic, **{"lambda": lambda_})
    return token_advantages(estimator, tokens, settings, *numbers)


def config_of(groups: int, **settings: Any) -> RunConfig:
    """Not of one estimator: it declares no columns."""
    return parse_config(make_config(train_batch_size=groups, policy_mini_batch_size=groups) | settings)


def tokens_of(batch: list[Trajectory], *, scalar: bool = False) -> TrainedTokens:
    received = received_of(batch, scalar=scalar)
    return trained_tokens(received, np.ones(len(received.steps), np.bool_))


def received_of(batch: list[Trajectory], *, scalar: bool = False) -> Received:
    """The batch as the pipeline has it. scalar: a step's reward is one number, that of its last token."""
    rows: list[dict[str, Any]] = [
        make_row(
            uid=f"p{trajectory}",
            step=step,
            last=step == len(steps) - 1,
            prompt=[1],
            response=[2] * len(tokens),
            loss_mask=[token.mask for token in tokens],
            reward=tokens[-1].reward if scalar else [token.reward for token in tokens],
        )
        for trajectory, steps in enumerate(batch)
        for step, tokens in enumerate(steps)
    ]
    return receive(from_rows(rows), config_of(len(batch)))


def column(batch: list[Trajectory], name: str) -> Ragged:
    """A column of the batch's steps, float32, which is not in order in memory."""
    steps = [[getattr(token, name) for token in step] for steps in batch for step in steps]
    arrays = [np.array(step, np.float32) for step in reversed(steps)]
    return Ragged.from_arrays(arrays, np.float32).take(np.arange(len(steps))[::-1])


def flat(trajectory: Trajectory) -> list[Token]:
    return [token for step in trajectory for token in step]


def rewarded(trajectory: Trajectory) -> tuple[list[Token], list[float]]:
    """The trained tokens with all rewards that fall to them, and the rewards that fall to none."""
    trained: list[Token] = []
    lost: list[float] = []
    for token in flat(trajectory):
        if token.mask:
            trained.append(token)
        elif trained:
            trained[-1] = replace(trained[-1], reward=trained[-1].reward + token.reward)
        elif token.reward:
            lost.append(token.reward)
    return trained, lost


def naive_gae(trajectory: Trajectory, gamma: float, lambda_: float | list[float]) -> tuple[list[float], list[float]]:
    """Advantages and returns of the trained tokens, from the last to the first. lambda_: of all, or of each."""
    trained, _ = rewarded(trajectory)
    advantages: list[float] = []
    advantage = value = 0.0
    each = lambda_ if isinstance(lambda_, list) else [lambda_] * len(trained)
    for token, of_token in zip(reversed(trained), reversed(each), strict=True):
        advantage = token.reward + gamma * value - token.value + gamma * of_token * advantage
        value = token.value
        advantages.insert(0, advantage)
    return advantages, [advantage + token.value for advantage, token in zip(advantages, trained, strict=True)]


def naive_returns(trajectory: Trajectory, gamma: float) -> list[float]:
    """The discounted sum of what each trained token and those after it get, term by term."""
    rewards = [token.reward for token in rewarded(trajectory)[0]]
    return [sum(gamma**later * reward for later, reward in enumerate(rewards[first:])) for first in range(len(rewards))]


def advantages_of(rows: list[Row], config: dict[str, Any], *metadata: str) -> list[Any]:
    """The advantage of each trained token with its trajectory and what the shards' metadata says of its row, sorted."""
    batch = build_batch(from_rows(rows), parse_config(config), run="r", batch=0)
    found: list[Any] = []
    for shard in (shard for shard in batch.shards if shard.address.model == "policy"):
        named = naive.read_shard(shard)[1]
        keys = zip(named["uids"], *(map(str, named[name]) for name in metadata), strict=True)
        for row, key in zip(naive.shard_rows(shard), keys, strict=True):
            trained = row["advantages"][row["loss_mask"] == 1].tolist()
            found += [(*key, int(row["sample"]), advantage) for advantage in trained]
    return sorted(found)


def assert_same_however_laid_out(rows: list[Row], config: dict[str, Any], dp_size: int, *metadata: str) -> None:
    """Merging, layout, ranks and the order of rows change no advantage."""
    expected = advantages_of(rows, config, *metadata)
    for changes in ({"merge": "prefix"}, {"merge": "tree"}, {"layout": "packed", "dp_size": dp_size}):
        assert advantages_of(rows, config | changes, *metadata) == expected
    uids = dict.fromkeys(row["uid"] for row in rows)
    backwards = [row for uid in uids for row in rows[::-1] if row["uid"] == uid]
    assert advantages_of(backwards, config, *metadata) == expected


def joined(lists: list[list[float]]) -> Float64s:
    return np.array([number for numbers in lists for number in numbers], np.float64)


def padded(batch: list[Trajectory], name: str) -> NDArray[np.float32]:
    """One row a trajectory, its tokens from the left; (trajectories, longest)."""
    rows = [[getattr(token, name) for token in flat(steps)] for steps in batch]
    longest = max(len(row) for row in rows)
    return np.array([row + [0] * (longest - len(row)) for row in rows], np.float32)
