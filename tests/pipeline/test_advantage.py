"""Scores and advantages, estimator by estimator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service import estimators
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.estimators import Float64s, GroupEstimator, Groups
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit.scores import trajectory_scores
from tests import naive
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import Row


def config(estimator: str, n: int = 4, **more: Any) -> RunConfig:
    # gigpo compares sums of steps' rewards alone.
    settings = {"advantage_estimator": estimator, "step_wise": False, "trajectory_score": "sum"}
    return parse_config(make_config(n_samples_per_prompt=n) | settings | more)


def group_advantages(
    scores: Float64s, settings: RunConfig, tokens: Float64s | None = None, batch_std: float = 1.0
) -> Float64s:
    assert isinstance(settings.estimator, GroupEstimator)
    groups = Groups(scores, np.ones(scores.shape) if tokens is None else tokens, batch_std)
    return estimators.group_advantages(settings.estimator, groups, settings)


ESTIMATORS = [
    name for name, one in estimators.ESTIMATORS.items() if isinstance(one, GroupEstimator) and not one.reads_components
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(score=st.floats(-1e6, 1e6), count=st.integers(2, 16))
def test_equal_scores_give_exactly_zero(estimator: str, score: float, count: int) -> None:
    assert (group_advantages(np.full(count, score), config(estimator, count)) == 0).all()


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    advantages = group_advantages(np.array([0.0, 0.0, 0.0, 1.0]), config("grpo"))
    np.testing.assert_allclose(advantages, (np.array([0, 0, 0, 1]) - 0.25) / (0.5 + 1e-6))


@pytest.mark.parametrize(("scores", "expected"), [([0.0, 0.0, 0.0, 1.0], 0.75 / (0.5 + 0.25)), ([1.0], 1 / 1.25)])
def test_grpo_epsilon_is_what_is_added_to_the_standard_deviation(scores: list[float], expected: float) -> None:
    advantages = group_advantages(np.array(scores), config("grpo", len(scores), grpo_epsilon=0.25))
    assert advantages[-1] == pytest.approx(expected)


def test_rloo_is_the_difference_from_the_mean_of_the_others() -> None:
    advantages = group_advantages(np.array([1.0, 2.0, 6.0]), config("rloo", 3))
    np.testing.assert_allclose(advantages, [1 - 4.0, 2 - 3.5, 6 - 1.5])


def test_rloo_may_be_divided_by_the_standard_deviation_of_the_others() -> None:
    """The others of 2 are 0, 0 and 1: mean 1 / 3, standard deviation 1 / √3."""
    advantages = group_advantages(np.array([2.0, 0.0, 0.0, 1.0]), config("rloo", rloo_norm_by_std=True))
    thirds, ones, all_but_1 = 3**-0.5 + 1e-6, 1 + 1e-6, 2 * 3**-0.5 + 1e-6
    np.testing.assert_allclose(advantages, [5 / 3 / thirds, -1 / ones, -1 / ones, 1 / 3 / all_but_1])
    wide = config("rloo", rloo_norm_by_std=True, grpo_epsilon=0.5)
    assert group_advantages(np.array([2.0, 0.0, 0.0, 1.0]), wide)[1] == pytest.approx(-1 / 1.5)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0, 1.0, 1.0], [2.0, -1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)]),
        ([4.0, 1.0], [3.0, -3.0]),
        # Computed rather than compared, the standard deviation of seven times 0.7 is 1e-16.
        ([1.7, *[0.7] * 7], [1.0, *[-1 / 7 / (7**-0.5 + 1e-6)] * 7]),
    ],
)
def test_others_that_do_not_differ_do_not_divide(scores: list[float], expected: list[float]) -> None:
    settings = config("rloo", len(scores), rloo_norm_by_std=True)
    np.testing.assert_allclose(group_advantages(np.array(scores), settings), expected)


def test_maxrl_divides_by_the_mean() -> None:
    advantages = group_advantages(np.array([0.0, 1.0]), config("maxrl", 2))
    np.testing.assert_allclose(advantages, np.array([-0.5, 0.5]) / (0.5 + 1e-6))


def advantages_of(groups: list[list[float]], **more: Any) -> list[float]:
    """Advantages of a batch whose trajectories have these scores and one trained token each."""
    rows = [
        make_row(uid=f"p{group}", sample=sample, prompt=[1], response=[2], reward=score)
        for group, scores in enumerate(groups)
        for sample, score in enumerate(scores)
    ]
    estimator = more.pop("advantage_estimator", "grpo")
    settings = config(estimator, max(map(len, groups)), train_batch_size=len(groups), policy_mini_batch_size=1, **more)
    credit = planned(from_rows(rows, step_wise=False), settings, None).credit
    assert credit is not None
    advantages: list[float] = credit.advantages.tolist()
    return advantages


def test_grpo_may_divide_by_the_standard_deviation_of_all_scores_of_the_batch() -> None:
    std = math.sqrt((3 * 0.25**2 + 0.75**2 * 1) / 3)
    assert advantages_of([[0.0, 0.0], [0.0, 1.0]], grpo_std_over="batch") == pytest.approx(
        [0.0, 0.0, -0.5 / (std + 1e-6), 0.5 / (std + 1e-6)]
    )


def test_the_standard_deviation_of_the_batch_has_the_same_bits_in_any_order_of_its_groups() -> None:
    groups = [[0.1 * group, 0.7, 1 / (group + 3)] for group in range(20)]
    advantages = advantages_of(groups, grpo_std_over="batch")
    assert advantages_of(groups[::-1], grpo_std_over="batch") == [
        advantage for at in range(57, -1, -3) for advantage in advantages[at : at + 3]
    ]


def test_opo_subtracts_the_mean_weighted_by_trained_tokens() -> None:
    scores, tokens = np.array([0.0, 1.0, 1.0]), np.array([2.0, 1.0, 0.0])
    assert group_advantages(scores, config("opo", 3), tokens) == pytest.approx([-1 / 3, 2 / 3, 2 / 3])


@given(score=st.floats(-1e6, 1e6), tokens=st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_opo_gives_exactly_zero_to_equal_scores_of_all_that_is_trained(score: float, tokens: list[int]) -> None:
    scores, trained = np.array([*[score] * len(tokens), score + 1]), np.array([*tokens, 0], np.float64)
    assert group_advantages(scores, config("opo", len(scores)), trained)[:-1].tolist() == [0.0] * len(tokens)


def test_opo_subtracts_the_plain_mean_where_nothing_is_trained() -> None:
    assert group_advantages(np.array([0.0, 1.0]), config("opo", 2), np.zeros(2)).tolist() == [-0.5, 0.5]


def test_opo_counts_no_token_that_is_an_observation_or_masked_by_a_filter() -> None:
    rows = [
        make_row(sample=0, prompt=[1], response=[2, 3, 4], loss_mask=[1, 0, 1], reward=1.0),
        make_row(sample=1, prompt=[1], response=[2, 3], reward=0.0),
        make_row(sample=2, prompt=[1], response=[2] * 9, loss_mask=[1] * 9, reward=5.0, stop_reason="length"),
    ]
    settings = config("opo", 3, overlong_filter=["length"])
    credit = planned(from_rows(rows, step_wise=False), settings, None).credit
    assert credit is not None
    assert credit.advantages.tolist() == [0.5, -0.5, 4.5]


@pytest.mark.parametrize("merge", ["none", "prefix"])
def test_opo_counts_the_tokens_that_were_sampled_also_where_merging_takes_others_for_them(merge: str) -> None:
    """Scores 3 and 0 of 3 and 2 tokens; the first step's last token is another one in the second's prompt."""
    rows = [
        make_row(sample=0, step=0, last=False, prompt=[1], response=[2, 3], reward=0.0),
        make_row(sample=0, step=1, prompt=[1, 2, 8, 5], response=[4], reward=3.0),
        make_row(sample=1, prompt=[1], response=[2, 6], reward=0.0),
    ]
    merging = {"merge": merge} | ({"retokenized_tail": 1} if merge == "prefix" else {})
    settings = config("opo", 2, **{"step_wise": True, **merging})
    scored = planned(from_rows(rows), settings, None)
    assert len(scored.numbers.rows) == (2 if merge == "prefix" else 3)
    assert scored.credit is not None
    assert scored.credit.advantages.tolist() == pytest.approx([3 - 9 / 5, -9 / 5])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [0.2, -0.2]),
        ("sequence_mean", [1 / (2 * 1), -1 / (2 * 4)]),
        ("trajectory_mean", [1 / (2 * 1), -1 / (2 * 4)]),
        ("prompt_mean", [1 / (1 * 5), -1 / (1 * 5)]),
        ("seq_mean_token_sum_norm", [1 / (2 * 10), -1 / (2 * 10)]),
    ],
)
def test_divisors_may_count_only_rows_with_trained_tokens(reduction: str, expected: list[float]) -> None:
    """Two groups of scores 2 and 0; those of the second are cut, and train nothing."""
    rows = [
        make_row(
            uid=uid,
            sample=sample,
            prompt=[1],
            response=[7] * tokens,
            reward=2.0 * (sample == 0),
            stop_reason="length" if uid == "b" else "stop",
        )
        for uid in "ab"
        for sample, tokens in enumerate([1, 4])
    ]
    sizes: dict[str, Any] = {"train_batch_size": 2, "policy_mini_batch_size": 2, "micro_batch": {"size": 4}}
    more = {"overlong_filter": ["length"], "grpo_norm_by_std": False, "max_seq_len": 10, "loss_reduction": reduction}
    for over, share in (("trained", 1.0), ("all", 1.0 if reduction == "token_mean" else 0.5)):
        settings = config("grpo", 2, **sizes, **more, loss_reduction_over=over)
        (shard,) = build_batch(from_rows(rows, step_wise=False), settings, run="r", batch=0).shards
        advantages = [float(row["advantages"][0]) for row in naive.shard_rows(shard)[:2]]
        assert advantages == pytest.approx([share * one for one in expected])
        totals = naive.read_shard(shard)[1]["loss_denominators"]
        count = 1 if over == "trained" else 2
        assert [totals[name] for name in ("rows", "trajectories", "prompts")] == [2 * count, 2 * count, count]


@pytest.mark.parametrize(
    ("scores", "lead"), [([1.0, 4.0, 2.0], 2.0), ([3.0, 3.0, 1.0], 0.0), ([-1.0, -5.0, -5.0], 4.0)]
)
@pytest.mark.parametrize("is_normed", [True, False])
def test_passk_credits_the_best_of_a_group_with_its_lead_over_the_second_best(
    scores: list[float], lead: float, is_normed: bool
) -> None:
    advantages = group_advantages(np.array(scores), config("passk", 3, grpo_norm_by_std=is_normed))
    by = float(np.std(scores, ddof=1)) + 1e-6 if is_normed else 1.0
    assert advantages == pytest.approx([lead / by if score == max(scores) else 0.0 for score in scores])


@pytest.mark.parametrize(
    ("estimator", "more", "expected"),
    [
        ("grpo", {}, 0.8 / (1 + 1e-6)),
        ("grpo", {"grpo_norm_by_std": False}, 0.8),
        ("rloo", {}, 0.0),
        ("maxrl", {}, 0.8),
        ("grpo", {"grpo_std_over": "batch"}, 0.8 / (1 + 1e-6)),
        ("opo", {}, 0.0),
        ("passk", {}, 0.0),
    ],
)
def test_a_run_with_one_sample_a_prompt_has_groups_of_one(
    estimator: str, more: dict[str, Any], expected: float
) -> None:
    assert group_advantages(np.array([0.8]), config(estimator, 1, **more)) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_lone_survivor_of_a_larger_group_has_no_baseline_and_gets_zero(estimator: str) -> None:
    assert group_advantages(np.array([0.8]), config(estimator, 4)).tolist() == [0.0]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@given(scores=st.lists(st.floats(-100, 100), min_size=2, max_size=10))
def test_advantages_of_a_group_sum_to_zero(estimator: str, scores: list[float]) -> None:
    advantages = group_advantages(np.array(scores), config(estimator, 10))
    assert abs(advantages.sum()) <= 1e-6 * max(1.0, np.abs(advantages).max())


def test_the_score_is_the_last_steps_reward_or_the_sum_over_steps() -> None:
    rewards, bounds = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 3, 4])
    assert trajectory_scores(rewards, bounds, "last_step").tolist() == [4.0, 8.0]
    assert trajectory_scores(rewards, bounds, "sum").tolist() == [7.0, 8.0]


def test_scores_too_far_apart_for_the_float32_of_a_shard_are_refused_with_the_trajectory() -> None:
    rows = [
        make_row(uid="p", sample=sample, prompt=[1], response=[2], reward=reward)
        for sample, reward in enumerate([3e38, -3e38])
    ]
    with pytest.raises(InvalidArgumentError, match=r"uid 'p' sample 0: advantage is 6e\+38, which float32 cannot hold"):
        build_batch(from_rows(rows, step_wise=False), config("rloo", 2), run="r", batch=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    groups=st.integers(1, 40).flatmap(
        lambda size: st.lists(
            st.lists(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-100, 100), min_size=size, max_size=size),
            min_size=1,
            max_size=6,
        )
    )
)
def test_many_groups_at_once_get_the_same_bits_as_each_alone(estimator: str, groups: list[list[float]]) -> None:
    settings = config(estimator, 40)
    together = group_advantages(np.array(groups), settings)
    for scores, advantages in zip(groups, together, strict=True):
        assert advantages.tobytes() == group_advantages(np.array(scores), settings).tobytes()


@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), data=st.data())
def test_a_score_does_not_depend_on_the_order_of_the_steps_rewards(rewards: list[float], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(rewards))
    scores = trajectory_scores(np.array([*rewards, *shuffled]), np.array([0, len(rewards), 2 * len(rewards)]), "sum")
    assert scores.tolist() == [math.fsum(rewards)] * 2


def trajectories(*rewards: list[float | list[float]]) -> list[Row]:
    """A prompt's samples, whose steps have these rewards."""
    return [
        make_row(
            uid="p",
            sample=sample,
            step=step,
            last=step == len(of_steps) - 1,
            prompt=[1],
            response=[2] * (len(reward) if isinstance(reward, list) else 1),
            loss_mask=[1] * (len(reward) if isinstance(reward, list) else 1),
            reward=reward,
        )
        for sample, of_steps in enumerate(rewards)
        for step, reward in enumerate(of_steps)
    ]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "rewards",
    [([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]), ([[0.1, 0.2, 0.3]], [[0.3, 0.2, 0.1]])],
    ids=["over_steps", "over_tokens"],
)
def test_equal_rewards_in_another_order_are_equal_scores(
    estimator: str, rewards: tuple[list[float], list[float]] | tuple[list[list[float]], list[list[float]]]
) -> None:
    settings = config(estimator, 2, step_wise=True, trajectory_score="sum", zero_variance_filter="mask")
    scored = planned(from_rows(trajectories(*rewards)), settings, None)
    assert scored.numbers.scores.tolist() == [math.fsum([0.1, 0.2, 0.3])] * 2
    assert scored.credit is not None
    assert scored.credit.advantages.tolist() == [0.0, 0.0]
    assert scored.counts["zero_variance_groups"] == 1
