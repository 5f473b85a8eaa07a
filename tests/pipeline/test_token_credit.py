"""Advantages and returns of single tokens: GAE, REINFORCE++ and whitening."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.estimators import PIECE, Float64s, discounted_sums
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit import whitening
from gristmill_service.pipeline.credit.trained_tokens import (
    TrainedTokens,
    credited_rewards,
    response_rewards,
    reward_column,
    trained_tokens,
)
from gristmill_service.pipeline.credit.whitening import whiten, whitened
from tests import naive
from tests.pipeline import credit
from tests.pipeline.credit import (
    BATCHES,
    DISCOUNTS,
    Token,
    Trajectory,
    column,
    gae,
    reinforce_plus_plus,
    tokens_of,
)
from tests.rows import make_config, make_row

Float32s = NDArray[np.float32]


def assert_close(actual: Float64s, expected: NDArray[Any]) -> None:
    """To the rounding of float64."""
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-11)


def credited(tokens: TrainedTokens) -> Float64s:
    return credited_rewards(tokens, response_rewards(tokens.steps))[0]


def gae_of(
    batch: list[Trajectory], gamma: float, lambda_: Any, *, scalar: bool = False
) -> tuple[TrainedTokens, Float64s, Float64s]:
    tokens = tokens_of(batch, scalar=scalar)
    return tokens, *gae(tokens, credited(tokens), tokens.take(column(batch, "value")), gamma, lambda_)


@given(BATCHES, DISCOUNTS, DISCOUNTS)
def test_gae_is_what_the_plain_loop_makes_of_each_trajectorys_trained_tokens(
    batch: list[Trajectory], gamma: float, lambda_: float
) -> None:
    _, advantages, returns = gae_of(batch, gamma, lambda_)
    expected = [credit.naive_gae(trajectory, gamma, lambda_) for trajectory in batch]
    assert_close(advantages, credit.joined([pair[0] for pair in expected]))
    assert_close(returns, credit.joined([pair[1] for pair in expected]))


@given(BATCHES, DISCOUNTS)
def test_reinforce_plus_plus_is_the_return_to_go_of_the_rewards(batch: list[Trajectory], gamma: float) -> None:
    tokens = tokens_of(batch)
    advantages, returns = reinforce_plus_plus(tokens, credited(tokens), gamma)
    expected = credit.joined([credit.naive_returns(trajectory, gamma) for trajectory in batch])
    assert_close(returns, expected)
    assert advantages.tobytes() == returns.tobytes()


@given(BATCHES, DISCOUNTS, st.sampled_from([0.05, 0.5, 1.0, 3.0]))
def test_a_length_adaptive_lambda_is_that_of_the_trajectorys_number_of_trained_tokens(
    batch: list[Trajectory], gamma: float, alpha: float
) -> None:
    _, advantages, _ = gae_of(batch, gamma, {"length_adaptive": alpha})
    counts = [len(credit.rewarded(trajectory)[0]) for trajectory in batch]
    lambdas = [max(0.0, 1 - 1 / (alpha * max(1, count))) for count in counts]
    expected = [credit.naive_gae(one, gamma, of_one)[0] for one, of_one in zip(batch, lambdas, strict=True)]
    assert_close(advantages, credit.joined(expected))


def test_a_length_adaptive_lambda_by_hand() -> None:
    """Four trained tokens and α = 0.5: λ = 1 - 1/(0.5 · 4) = 0.5."""
    steps = [[Token(), Token(mask=0), Token()], [Token(), Token(reward=8.0)]]
    _, advantages, returns = gae_of([steps], 1.0, {"length_adaptive": 0.5})
    assert (advantages.tolist(), returns.tolist()) == ([1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0])


@given(BATCHES, DISCOUNTS, DISCOUNTS, DISCOUNTS)
def test_with_critic_lambda_returns_are_those_of_a_second_pass(
    batch: list[Trajectory], gamma: float, lambda_: float, critic: float
) -> None:
    tokens = tokens_of(batch)
    advantages, returns = gae(
        tokens, credited(tokens), tokens.take(column(batch, "value")), gamma, lambda_, critic=critic
    )
    assert advantages.tobytes() == gae_of(batch, gamma, lambda_)[1].tobytes()
    assert returns.tobytes() == gae_of(batch, gamma, critic)[2].tobytes()


@given(BATCHES, DISCOUNTS, st.integers(0, 9))
def test_lambda_may_be_a_column_with_a_number_for_each_step(batch: list[Trajectory], gamma: float, seed: int) -> None:
    tokens, random = tokens_of(batch), np.random.default_rng(seed)
    of_steps = [[float(one) for one in random.choice([0.0, 0.5, 1.0], len(steps))] for steps in batch]
    numbers = [np.array([one], np.float32) for steps in of_steps for one in steps]
    lambdas = tokens.of_steps(Ragged.from_arrays(numbers, np.float32))
    advantages, _ = gae(
        tokens, credited(tokens), tokens.take(column(batch, "value")), gamma, {"column": "trust"}, lambdas
    )
    expected = [
        credit.naive_gae(
            steps, gamma, [one for one, step in zip(own, steps, strict=True) for token in step if token.mask]
        )[0]
        for own, steps in zip(of_steps, batch, strict=True)
    ]
    assert_close(advantages, credit.joined(expected))


# Merging.


@given(BATCHES, DISCOUNTS, DISCOUNTS)
def test_a_trajectorys_bits_do_not_depend_on_the_rest_of_the_batch(
    batch: list[Trajectory], gamma: float, lambda_: float
) -> None:
    tokens, advantages, _ = gae_of(batch, gamma, lambda_)
    for index, trajectory in enumerate(batch):
        alone = advantages[tokens.bounds[index] : tokens.bounds[index + 1]]
        assert alone.tobytes() == gae_of([trajectory], gamma, lambda_)[1].tobytes()


def test_steps_that_a_filter_masks_are_skipped_like_observations() -> None:
    steps = [[Token(value=1.0)], [Token(value=50.0, reward=2.0)], [Token(value=3.0, reward=4.0)]]
    received = credit.received_of([steps])
    tokens = trained_tokens(received, np.array([True, False, True]))
    assert tokens.places.tolist() == [0, 2]
    advantages, returns = gae(tokens, credited(tokens), tokens.take(column([steps], "value")), 1.0, 1.0)
    assert (advantages.tolist(), returns.tolist()) == ([5.0, 1.0], [6.0, 4.0])


@pytest.mark.parametrize("merge", ["none", "prefix"])
def test_a_truncated_trajectory_is_valued_by_the_state_after_it(merge: str) -> None:
    """δ of the last token is 1 + γV' - V; steps and trajectories that ended by themselves have V' 0 after them."""
    rows = []
    for sample, reason in enumerate(["length", "stop"]):
        first = make_row(sample=sample, last=False, prompt=[1], response=[2, 3], reward=0.0, stop_reason="length")
        last = make_row(sample=sample, step=1, prompt=[1, 2, 3, 4], response=[5, 6], reward=1.0, stop_reason=reason)
        rows += [first | {"values": [0.2, 0.1], "after": 9.0}, last | {"values": [0.4, 0.3], "after": 1.5}]
    columns = [
        {"name": "values", "dtype": "float32", "scope": "response"},
        {"name": "after", "dtype": "float32", "scope": "row"},
    ]
    settings = {"merge": merge, "n_samples_per_prompt": 2, "columns": columns, "micro_batch": {"size": 4}}
    settings |= {"advantage_estimator": "gae", "gamma": 0.8, "lambda": 0.5}
    settings |= {"bootstrap": {"column": "after", "stop_reasons": ["length", "timeout"]}}
    config = parse_config(make_config(**settings))
    (shard,) = build_batch(from_rows(rows, columns=config.columns), config, run="r", batch=0).shards
    got: dict[int, list[float]] = {}
    for row in naive.shard_rows(shard):
        got.setdefault(int(row["sample"]), []).extend(row["advantages"][row["loss_mask"] == 1].tolist())
    for sample, after in enumerate([1.5, 0.0]):
        advantage, expected, values = 0.0, list[float](), [0.2, 0.1, 0.4, 0.3, after]
        for token, reward in reversed([*enumerate([0.0, 0.0, 0.0, 1.0])]):
            advantage = reward + 0.8 * values[token + 1] - values[token] + 0.8 * 0.5 * advantage
            expected.insert(0, advantage)
        assert got[sample] == pytest.approx(expected)


# Rewards.


@pytest.mark.parametrize("merge", ["none", "prefix"])
def test_uncredited_rewards_are_counted_as_they_were_sent(merge: str) -> None:
    """Nothing is trained before the second step, to which 2 and -2 come too early, in one place where merging takes
    another token for the second one's."""
    rows = [
        make_row(step=0, last=False, prompt=[1], response=[2, 3], loss_mask=[0, 0], reward=[2.0, -2.0]),
        make_row(step=1, prompt=[1, 2, 8, 5], response=[4], reward=[1.0]),
    ]
    merging = {"merge": merge} | ({"retokenized_tail": 1} if merge == "prefix" else {})
    config = parse_config(make_config(**merging, advantage_estimator="reinforce++"))
    batch = build_batch(from_rows(rows), config, run="r", batch=0)
    assert batch.plan.counts["uncredited_rewards"] == 2
    assert batch.plan.rows == (1 if merge == "prefix" else 2)


@given(BATCHES, st.booleans())
def test_no_reward_is_lost_but_those_before_anything_is_trained_and_these_are_counted(
    batch: list[Trajectory], scalar: bool
) -> None:
    if scalar:
        # The reward of a step is that of its last token.
        batch = [
            [[*(replace(token, reward=0.0) for token in step[:-1]), step[-1]] for step in steps] for steps in batch
        ]
    tokens = tokens_of(batch, scalar=scalar)
    rewards, left_out = credited_rewards(tokens, response_rewards(tokens.steps))
    expected = [credit.rewarded(trajectory) for trajectory in batch]
    assert_close(rewards, credit.joined([[token.reward for token in trained] for trained, _ in expected]))
    assert left_out == sum(len(lost) for _, lost in expected)


# Columns.


@given(BATCHES)
def test_what_columns_hold_where_nothing_is_trained_is_not_read(batch: list[Trajectory]) -> None:
    poisoned = [
        [[token if token.mask else replace(token, value=float("nan")) for token in step] for step in steps]
        for steps in batch
    ]
    assert gae_of(batch, 0.9, 0.9)[1].tobytes() == gae_of(poisoned, 0.9, 0.9)[1].tobytes()


# Against SkyRL and verl: their recurrences, which go over the columns of a padded float32 batch, written again here.
# `compute_gae_advantage_return` and `compute_reinforce_plus_plus_outcome_advantage` of volcengine/verl 012be9d,
# verl/trainer/ppo/core_algos.py, and NovaSky-AI/SkyRL 03d74ca, skyrl/backends/skyrl_train/utils/ppo_utils.py;
# `masked_whiten` of volcengine/verl 03c8cca, verl/utils/torch_functional.py. SkyRL's GAE takes observations for
# tokens, and the return to go of both restarts at them, so these two are compared where there are none.


def verl_gae(
    rewards: Float32s, values: Float32s, mask: Float32s, gamma: float, lambda_: float
) -> tuple[Float32s, Float32s]:
    advantages = np.zeros_like(rewards)
    value = advantage = np.zeros(len(rewards), np.float32)
    for t in range(rewards.shape[1] - 1, -1, -1):
        candidate = rewards[:, t] + np.float32(gamma) * value - values[:, t] + np.float32(gamma * lambda_) * advantage
        value = np.where(mask[:, t] == 1, values[:, t], value)
        advantage = np.where(mask[:, t] == 1, candidate, advantage)
        advantages[:, t] = advantage
    return advantages, advantages + values


def skyrl_gae(rewards: Float32s, values: Float32s, gamma: float, lambda_: float) -> Float32s:
    advantages = np.zeros_like(rewards)
    value = advantage = np.zeros(len(rewards), np.float32)
    for t in range(rewards.shape[1] - 1, -1, -1):
        advantage = rewards[:, t] + np.float32(gamma) * value - values[:, t] + np.float32(gamma * lambda_) * advantage
        value, advantages[:, t] = values[:, t], advantage
    return advantages


def reference_returns(rewards: Float32s, mask: Float32s, gamma: float) -> Float32s:
    returns = np.zeros_like(rewards)
    running = np.zeros(len(rewards), np.float32)
    for t in range(rewards.shape[1] - 1, -1, -1):
        returns[:, t] = running = rewards[:, t] + np.float32(gamma) * running
        running = running * mask[:, t]
    return returns


def masked_whiten(values: Float32s, mask: Float32s) -> Float32s:
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean) ** 2 * mask).sum() / count * (count / (count - 1))
    whitened: Float32s = (values - mean) / np.sqrt(variance + np.float32(1e-8))
    return whitened


# Rewards on observations, which verl leaves out, and huge numbers, of which float32 leaves nothing, are not drawn.
SMALL = st.integers(-8, 8).map(float)
PLAIN = st.builds(Token, reward=SMALL, value=SMALL)
OBSERVED = PLAIN | st.builds(Token, mask=st.just(0), value=SMALL)


def assert_close_in_float32(actual: Float64s, expected: Float32s) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def one_row_each(token: st.SearchStrategy[Token]) -> st.SearchStrategy[list[Trajectory]]:
    row = st.lists(token, min_size=1, max_size=12).map(lambda tokens: [tokens])
    return st.lists(row, min_size=1, max_size=5)


@given(one_row_each(OBSERVED), DISCOUNTS, DISCOUNTS)
def test_gae_over_observations_is_that_of_verl(batch: list[Trajectory], gamma: float, lambda_: float) -> None:
    _, advantages, returns = gae_of(batch, gamma, lambda_)
    rewards, values, mask = (credit.padded(batch, name) for name in ("reward", "value", "mask"))
    for actual, expected in zip((advantages, returns), verl_gae(rewards, values, mask, gamma, lambda_), strict=True):
        assert_close_in_float32(actual, expected[mask == 1])


@given(one_row_each(PLAIN), DISCOUNTS, DISCOUNTS)
def test_gae_and_its_whitening_are_those_of_skyrl(batch: list[Trajectory], gamma: float, lambda_: float) -> None:
    tokens, advantages, _ = gae_of(batch, gamma, lambda_)
    rewards, values, mask = (credit.padded(batch, name) for name in ("reward", "value", "mask"))
    expected = skyrl_gae(rewards, values, gamma, lambda_)
    assert_close_in_float32(advantages, expected[mask == 1])
    if len(tokens) > 1 and np.ptp(advantages) > 1e-2:
        everything = np.zeros(len(tokens), np.int64)
        np.testing.assert_allclose(
            whiten(advantages, everything), masked_whiten(expected, mask)[mask == 1], rtol=1e-3, atol=1e-3
        )


@given(one_row_each(PLAIN), DISCOUNTS)
def test_reinforce_plus_plus_is_that_of_skyrl_and_verl(batch: list[Trajectory], gamma: float) -> None:
    tokens = tokens_of(batch)
    returns, _ = reinforce_plus_plus(tokens, credited(tokens), gamma)
    rewards, mask = (credit.padded(batch, name) for name in ("reward", "mask"))
    assert_close_in_float32(returns, reference_returns(rewards, mask, gamma)[mask == 1])


# Whitening.

WHOLE = st.lists(st.integers(-(10**6), 10**6).map(float), min_size=2, max_size=50).map(np.array)


@given(WHOLE.filter(lambda numbers: np.ptp(numbers) > 0))
def test_whitened_advantages_have_mean_0_and_variance_1(advantages: Float64s) -> None:
    result = whitened(advantages)
    assert (result.mean(), result.var(ddof=1)) == (pytest.approx(0, abs=1e-8), pytest.approx(1, rel=1e-6))


@pytest.mark.parametrize("advantages", [[], [3.0], [-1e38], [0.7] * 7, [1e-300] * 3, [0.0, -0.0]])
def test_advantages_that_do_not_differ_are_whitened_to_exactly_0(advantages: list[float]) -> None:
    assert whitened(np.array(advantages)).tolist() == [0.0] * len(advantages)


@given(st.lists(st.floats(-3e38, 3e38), max_size=20).map(lambda numbers: np.array(numbers, np.float64)))
def test_whitening_is_finite_whatever_float32_holds(advantages: Float64s) -> None:
    assert (np.abs(whitened(advantages)) <= len(advantages)).all()


# Sums.


def plain_sums(numbers: Float64s, bounds: NDArray[np.int64], decay: float | Float64s) -> Float64s:
    sums, decays = np.zeros_like(numbers), np.broadcast_to(decay, numbers.shape)
    for begin, end in pairwise(bounds.tolist()):
        following = 0.0
        for place in range(end - 1, begin - 1, -1):
            sums[place] = following = numbers[place] + decays[place] * following
    return sums


LENGTHS = st.lists(
    st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7]) | st.integers(0, 50), max_size=5
)


@given(LENGTHS, DISCOUNTS, st.integers(0, 9))
def test_sums_of_long_runs_are_those_of_the_plain_loop(lengths: list[int], decay: float, seed: int) -> None:
    bounds = np.append(0, np.cumsum(lengths, dtype=np.int64))
    numbers = np.random.default_rng(seed).normal(size=bounds[-1])
    before = numbers.tobytes()
    actual, expected = discounted_sums(numbers, bounds, decay), plain_sums(numbers, bounds, decay)
    np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)
    assert numbers.tobytes() == before
    for begin, end in pairwise(bounds.tolist()):
        assert (
            actual[begin:end].tobytes()
            == discounted_sums(numbers[begin:end], np.array([0, end - begin]), decay).tobytes()
        )
        if end - begin <= PIECE:
            assert actual[begin:end].tobytes() == expected[begin:end].tobytes()


@given(LENGTHS, st.integers(0, 9))
def test_each_number_may_have_a_decay_of_its_own(lengths: list[int], seed: int) -> None:
    bounds, random = np.append(0, np.cumsum(lengths, dtype=np.int64)), np.random.default_rng(seed)
    numbers, decays = random.normal(size=bounds[-1]), random.choice([0.0, 0.5, 0.999, 1.0], bounds[-1])
    actual = discounted_sums(numbers, bounds, decays)
    np.testing.assert_allclose(actual, plain_sums(numbers, bounds, decays), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("decay", [1.0, 0.999])
def test_a_trajectory_of_200_000_tokens_keeps_what_float64_holds(decay: float) -> None:
    """Whole numbers have exact sums: none of them may be lost among the large ones before and after."""
    numbers = np.random.default_rng(0).integers(-1000, 1000, 200_000).astype(np.float64)
    sums = discounted_sums(numbers, np.array([0, len(numbers)]), decay)
    if decay == 1:
        assert sums.tolist() == np.cumsum(numbers[::-1])[::-1].tolist()
    else:
        expected = plain_sums(numbers, np.array([0, len(numbers)]), decay)
        np.testing.assert_allclose(sums, expected, rtol=1e-10, atol=1e-8)


# What float32 does not hold.


@pytest.mark.parametrize(
    ("reward", "value", "message"),
    [
        (3e38, 0.0, "uid 'p0' sample 0 step 1: advantage[0] is 6e+38, which float32"),
        (0.0, -3e38, "uid 'p0' sample 0 step 1: advantage[1] is 6.0"),
    ],
)
def test_advantages_that_float32_does_not_hold_are_refused_with_step_and_token(
    reward: float, value: float, message: str
) -> None:
    steps = [[Token(mask=0)], [Token(reward=reward), Token(reward=reward or 3e38, value=value)]]
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        gae_of([steps], 1.0, 1.0)


def test_returns_that_float32_does_not_hold_are_refused_with_step_and_token() -> None:
    tokens = tokens_of([[[Token(mask=0), Token(reward=2e38), Token(reward=2e38)]]])
    with pytest.raises(InvalidArgumentError, match=r"uid 'p0' sample 0 step 0: return\[1\] is 4e\+38"):
        reinforce_plus_plus(tokens, credited(tokens), 1.0)


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_whatever_is_given_results_are_finite_float32_or_refused(reward: float, value: float) -> None:
    tokens = tokens_of([[[Token(), Token(), Token()]]])
    rewards, values = np.array([reward, -reward, reward]), np.array([value, -value, value])
    try:
        advantages, returns = gae(tokens, rewards, values, 1.0, 1.0)
    except InvalidArgumentError:
        return
    for numbers in (advantages, returns):
        assert np.isfinite(tokens.response(numbers, "advantage").values).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e39])
def test_a_reward_that_float32_does_not_hold_is_refused_with_step_and_token(bad: float) -> None:
    steps = tokens_of([[[Token()], [Token(), Token()]]]).steps
    with pytest.raises(InvalidArgumentError, match=r"step 1: reward\[1\] is .* cannot hold; scale the rewards or"):
        reward_column(steps, np.array([0.0, 0.0, bad]))


# Some trajectories at a time.


@pytest.mark.parametrize("most", [1, 7, 10_000])
@given(BATCHES)
def test_parts_are_whole_trajectories_and_all_of_them(most: int, batch: list[Trajectory]) -> None:
    tokens, values = tokens_of(batch), column(batch, "value")
    parts = list(tokens.parts(most))
    assert sum(len(part.tokens.trajectory_bounds) - 1 for part in parts) == len(batch)
    assert [place for part in parts for place in part.tokens.places + part.responses.start] == tokens.places.tolist()
    for part in parts:
        assert len(part.tokens) == part.trained.stop - part.trained.start
        of_part = part.tokens.take(values.part(part.steps))
        assert of_part.tolist() == tokens.take(values)[part.trained].tolist()
        assert len(part.tokens.trajectory_bounds) == 2 or part.tokens.edges[-1] <= most


@given(st.lists(st.integers(-5, 5), max_size=30), st.integers(1, 9))
def test_whitening_does_not_depend_on_how_much_is_cached(numbers: list[int], cached: int) -> None:
    advantages = np.array(numbers, np.float64) / 3
    expected = whitened(advantages)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(whitening, "_CACHED", 16 * cached)
        np.testing.assert_allclose(whitened(advantages), expected, rtol=1e-12, atol=1e-12)
        in_place = advantages.copy()
        assert whitened(in_place, out=in_place) is in_place
        np.testing.assert_allclose(in_place, expected, rtol=1e-12, atol=1e-12)
