"""`length_penalty`: what the length of a trajectory takes from its score."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline.planning import Plan
from tests.pipeline.credit import assert_same_however_laid_out
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings

RAW = {"grpo_norm_by_std": False}


def scored(rows: list[Row], **settings: Any) -> Plan:
    groups, samples = len({row["uid"] for row in rows}), len({row["sample"] for row in rows})
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": samples}
    config = parse_config(make_config() | sizes | {"step_wise": True} | settings)
    return planned(from_rows(rows), config, None)


def advantages(rows: list[Row], **settings: Any) -> list[float]:
    credit = scored(rows, **settings).credit
    assert credit is not None
    values: list[float] = credit.advantages.tolist()
    return values


def rows_of(*responses: int, rewards: list[float], uid: str = "p") -> list[Row]:
    """A prompt's samples of one step, by the lengths of their responses."""
    return [
        make_row(uid=uid, sample=sample, prompt=[1], response=[2] * length, reward=reward)
        for sample, (length, reward) in enumerate(zip(responses, rewards, strict=True))
    ]


def test_a_score_loses_the_groups_mean_times_its_share_of_the_longest_response() -> None:
    """Scores 1 and 3 of mean 2, of 4 and 2 tokens: 1 - 2·0.5·1 = 0 and 3 - 2·0.5·0.5 = 2.5, of mean 1.25."""
    rows = rows_of(4, 2, rewards=[1.0, 3.0])
    assert advantages(rows, length_penalty={"output_tokens": 0.5}, **RAW) == [-1.25, 1.25]
    assert scored(rows, length_penalty={"output_tokens": 0.5}).numbers.scores.tolist() == [1.0, 3.0]


def test_each_group_has_its_own_mean_and_maximum() -> None:
    rows = [*rows_of(4, 2, rewards=[1.0, 3.0]), *rows_of(1, 8, rewards=[4.0, 4.0], uid="q")]
    assert advantages(rows, length_penalty={"output_tokens": 0.5}, **RAW) == [-1.25, 1.25, 0.875, -0.875]


def test_turns_and_input_tokens_are_of_the_whole_trajectory_and_shared_tokens_count_once() -> None:
    """Sample 0 has 2 prompt tokens, and 3 observations at its second step; the third continues the first step, with 1
    other token. Sample 1 has 3 other tokens in one step."""
    rows = [
        make_row(sample=0, step=0, last=False, prompt=[1, 2], response=[3], reward=0.0),
        make_row(sample=0, step=1, last=False, prompt=[1, 2, 3, 4, 5, 6], response=[7], reward=0.0),
        make_row(sample=0, step=2, prompt=[1, 2, 3, 9], response=[7], reward=2.0),
        make_row(sample=1, prompt=[1, 2, 4], response=[3], reward=2.0),
    ]
    by_turns = advantages(rows, length_penalty={"turns": 0.75}, **RAW)
    assert by_turns == [-0.5, 0.5]  # 2 - 2·0.75 = 0.5 and 2 - 2·0.25 = 1.5
    by_input = advantages(rows, length_penalty={"input_tokens": 0.5}, **RAW)
    assert by_input == [-0.25, 0.25]  # 6 and 3 tokens: 2 - 1 = 1 and 2 - 0.5 = 1.5
    both = advantages(rows, length_penalty={"input_tokens": 0.5, "turns": 0.75}, **RAW)
    assert both == [-0.75, 0.75]


def test_equal_scores_of_equal_lengths_stay_exactly_equal() -> None:
    rows = rows_of(*[3] * 7, rewards=[0.7] * 7)
    assert advantages(rows, length_penalty={"output_tokens": 0.1, "input_tokens": 0.3, "turns": 0.7}) == [0.0] * 7


def test_the_standard_deviation_of_the_batch_is_that_of_penalized_scores() -> None:
    rows = rows_of(4, 2, rewards=[1.0, 3.0])
    settings: dict[str, Any] = {"length_penalty": {"output_tokens": 0.5}}
    assert advantages(rows, grpo_std_over="batch", **settings) == advantages(rows, **settings)


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(-9, 9)), min_size=1, max_size=6))
def test_a_penalty_of_0_changes_nothing(samples: list[tuple[int, float]]) -> None:
    rows = rows_of(*[length for length, _ in samples], rewards=[reward for _, reward in samples])
    assert advantages(rows, length_penalty={}) == advantages(rows)


@LAW
@given(batches_and_settings(merge="none", loss_reduction="none"), st.integers(1, 4))
def test_merging_layout_ranks_and_the_order_of_rows_change_no_advantage(
    drawn: tuple[list[Row], dict[str, Any]], dp_size: int
) -> None:
    rows, config = drawn
    penalty = {"output_tokens": 0.25, "input_tokens": 0.5, "turns": 0.125}
    config |= {"advantage_estimator": "grpo", "length_penalty": penalty}
    assert_same_however_laid_out(rows, config, dp_size)
