"""The KL against a reference in rewards and scores."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import KlEstimator, RunConfig, parse_config
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit.kl import (
    kl,
    kl_in_rewards,
    kl_in_scores,
    kl_of_tokens,
    kl_of_trajectories,
)
from gristmill_service.pipeline.credit.trained_tokens import (
    TrainedTokens,
    response_rewards,
    reward_column,
)
from tests.pipeline.credit import (
    BATCHES,
    LOGPROBS,
    Token,
    Trajectory,
    column,
    flat,
    received_of,
    tokens_of,
)
from tests.pipeline.plans import planned
from tests.rows import make_config
from tests.strategies import rollouts

ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]


def definition(logprob: float, reference: float, estimator: str) -> float:
    d = logprob - reference
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def kl_of(batch: list[Trajectory], estimator: KlEstimator) -> tuple[TrainedTokens, Float64s]:
    tokens = tokens_of(batch)
    return tokens, kl_of_tokens(tokens, column(batch, "logprob"), column(batch, "reference"), estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(BATCHES)
def test_each_trained_token_has_the_estimate_of_its_two_logprobs(
    estimator: KlEstimator, batch: list[Trajectory]
) -> None:
    _, estimates = kl_of(batch, estimator)
    expected = [
        definition(token.logprob, token.reference, estimator)
        for trajectory in batch
        for token in flat(trajectory)
        if token.mask
    ]
    np.testing.assert_allclose(estimates, np.array(expected, np.float64), rtol=1e-9, atol=1e-12)


@given(LOGPROBS, LOGPROBS)
def test_k1_turns_with_the_order_and_k2_and_k3_are_never_negative(one: float, other: float) -> None:
    first, second = np.array([one]), np.array([other])
    assert kl(first, second, "k1").tolist() == (-kl(second, first, "k1")).tolist()
    assert kl(first, second, "k2")[0] >= 0
    assert kl(first, second, "k3")[0] >= -1e-30
    assert all(kl(first, first, estimator).tolist() == [0.0] for estimator in ESTIMATORS)


@pytest.mark.parametrize("difference", [1e-3, 1e-5, 1e-7, -1e-3, -1e-5, -1e-7])
def test_k3_of_a_small_difference_is_not_rounding(difference: float) -> None:
    estimate = kl(np.array([difference]), np.array([0.0]), "k3")[0]
    exact = float(sum(Fraction(-difference) ** n / math.factorial(n) for n in range(2, 12)))
    assert estimate == pytest.approx(exact, rel=1e-6 if abs(difference) > 1e-6 else 1e-2)


def test_k3_that_overflows_is_refused_with_the_token_and_both_logprobs() -> None:
    batch = [[[Token()], [Token(mask=0), Token(logprob=-900.0, reference=-1.0)]]]
    message = "uid 'p0' sample 0 step 1: k3[1] is inf: the log-probability is -900.0 and the reference's -1.0; check"
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        kl_of(batch, "k3")
    assert kl_of(batch, "k1")[1].tolist() == [0.0, -899.0]


# Rewards.


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(BATCHES)
def test_each_trained_tokens_reward_is_less_by_its_kl_and_no_others_changes(
    estimator: KlEstimator, batch: list[Trajectory]
) -> None:
    tokens, estimates = kl_of(batch, estimator)
    before = response_rewards(tokens.steps)
    rewards = kl_in_rewards(tokens, before, estimates, 0.5)
    assert before.tobytes() == response_rewards(tokens.steps).tobytes()
    numbers = iter(estimates.tolist())
    expected = [
        token.reward - (0.5 * next(numbers) if token.mask else 0) for trajectory in batch for token in flat(trajectory)
    ]
    np.testing.assert_array_equal(rewards, np.array(expected, np.float64))


@pytest.mark.parametrize("coef", [1e38, 1e308])
def test_a_reward_that_its_kl_takes_beyond_float32_is_refused(coef: float) -> None:
    tokens, estimates = kl_of([[[Token(), Token(logprob=-20.0)]]], "k2")
    rewards = kl_in_rewards(tokens, response_rewards(tokens.steps), estimates, coef)
    with pytest.raises(InvalidArgumentError, match=r"step 0: reward\[1\] is -.*coefficient of kl_in_reward down"):
        reward_column(tokens.steps, rewards)


# Scores.


@given(st.lists(LOGPROBS, min_size=1, max_size=8), st.data())
def test_equal_rewards_and_kl_in_another_order_are_equal_scores(logprobs: list[float], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(logprobs))
    batch = [[[Token(logprob=number, reference=-1.0) for number in numbers]] for numbers in (logprobs, shuffled)]
    tokens, estimates = kl_of(batch, "k3")
    scores = kl_in_scores(received_of(batch), np.array([0.7, 0.7]), kl_of_trajectories(tokens, estimates), 0.1)
    assert scores[0] == scores[1]


def config(**more: object) -> RunConfig:
    return parse_config(make_config(n_samples_per_prompt=3) | more)


SUMS = {"name": "klsum", "dtype": "float32", "scope": "row", "merge": "sum"}


@given(rollouts(most_prompts=2, samples=3))
def test_a_column_of_row_sums_gives_the_same_advantages_whatever_merges(rows: list[dict[str, object]]) -> None:
    """Each step's sum counts, trained or not: a step without trained tokens counted once it was merged only."""
    summed = [{**row, "klsum": float(number % 5)} for number, row in enumerate(rows)]
    computed = []
    for merge in ("none", "prefix", "tree"):
        settings = config(
            merge=merge, columns=[SUMS], kl_in_reward={"coef": 0.5, "column": "klsum"}, train_batch_size=2
        )
        credit = planned(from_rows(summed, columns=settings.columns), settings, None).credit
        assert credit is not None
        computed.append(credit.advantages.tolist())
    assert computed[0] == computed[1] == computed[2]


def test_a_score_that_its_kl_takes_beyond_float32_is_refused_with_the_trajectory() -> None:
    received = received_of([[[Token()]], [[Token()]]])
    for coef, sums in ((1e38, [0.0, 9.0]), (1e308, [0.0, -1e9]), (0.0, [0.0, math.nan])):
        with pytest.raises(InvalidArgumentError, match=r"uid 'p1' sample 0: the score is .* lower the coefficient"):
            kl_in_scores(received, np.array([1.0, 1.0]), np.array(sums), coef)
