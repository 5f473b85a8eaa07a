"""Comparison groups: the trajectories of one agent, and of one episode, are compared with each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests.pipeline.credit import advantages_of, assert_same_however_laid_out
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings

RAW: dict[str, Any] = {"advantage_estimator": "grpo", "grpo_norm_by_std": False}
PLAYED = [("proposer", "", 1.0), ("solver", "x", 0.0), ("solver", "x", 1.0), ("solver", "y", 3.0), ("solver", "y", 5.0)]
"""Agent, episode and score of the samples of one prompt."""


def rows_of(played: list[tuple[str, str, float]], uid: str = "p") -> list[Row]:
    return [
        make_row(uid=uid, sample=sample, reward=score, agent=agent, episode=episode)
        for sample, (agent, episode, score) in enumerate(played)
    ]


def config_of(rows: list[Row], **settings: Any) -> dict[str, Any]:
    groups, samples = len({row["uid"] for row in rows}), 1 + max(row["sample"] for row in rows)
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": samples}
    return make_config() | sizes | RAW | settings


def advantages(rows: list[Row], **settings: Any) -> list[float]:
    return [advantage for _, _, advantage in advantages_of(rows, config_of(rows, **settings))]


def test_the_trajectories_of_an_agent_are_compared_with_each_other() -> None:
    """The mean of the solvers is 2.25; the proposer compares with none."""
    assert advantages(rows_of(PLAYED)) == [0.0, -2.25, -1.25, 0.75, 2.75]


def test_agents_in_episode_agents_are_compared_within_their_episode() -> None:
    """As prime-rl's hierarchical GRPO: solvers with the solvers of the same proposal."""
    assert advantages(rows_of(PLAYED), episode_agents=["solver"]) == [0.0, -0.5, 0.5, -1.0, 1.0]
    two = [("proposer", "", 2.0), *PLAYED]
    assert advantages(rows_of(two), episode_agents=["solver"]) == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


def test_without_agents_the_prompt_group_is_compared_whatever_the_episodes() -> None:
    plain = [("", episode, score) for _, episode, score in PLAYED]
    assert advantages(rows_of(plain), episode_agents=["solver"]) == [-1.0, -2.0, -1.0, 1.0, 3.0]


def test_a_length_penalty_is_relative_to_the_comparison_group() -> None:
    rows = rows_of([("a", "", 1.0), ("a", "", 1.0), ("b", "", 1.0), ("b", "", 1.0)])
    rows[0] |= {"response_ids": [7, 7], "loss_mask": [1, 1]}
    rows[3] |= {"response_ids": [7] * 4, "loss_mask": [1] * 4}
    advantages_by_sample = {
        sample: advantage
        for _, sample, advantage in advantages_of(rows, config_of(rows, length_penalty={"output_tokens": 1.0}))
    }
    assert advantages_by_sample == {0: -0.25, 1: 0.25, 2: 0.375, 3: -0.375}


def test_equal_scores_of_one_agent_are_masked_and_others_are_trained() -> None:
    rows = rows_of([("a", "", 1.0), ("a", "", 1.0), ("b", "", 0.0), ("b", "", 1.0)])
    config = parse_config(config_of(rows, zero_variance_filter="mask"))
    scored = planned(from_rows(rows), config, None)
    assert scored.trained.tolist() == [False, False, True, True]
    assert scored.counts["zero_variance_groups"] == 1
    assert build_batch(from_rows(rows), config, run="r", batch=0).stats().groups.zero_variance == 0
    nothing = rows_of([("a", "", 1.0), ("a", "", 1.0), ("b", "", 0.0)])
    stats = build_batch(from_rows(nothing), parse_config(config_of(nothing)), run="r", batch=0).stats()
    assert stats.groups.zero_variance == 1


def test_a_trajectory_has_one_agent() -> None:
    rows = [make_row(step=step, last=step == 1, agent=agent) for step, agent in enumerate(["a", "b"])]
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0 step 1: agent 'b' differs from 'a' on step 0"):
        planned(from_rows(rows), parse_config(make_config()), None)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "passk", "maxrl", "gigpo"])
@given(batches_and_settings(merge="none", loss_reduction="none"), st.integers(1, 4), st.randoms())
@LAW
def test_agents_are_compared_alike_however_rows_are_merged_and_laid_out(
    estimator: str, batch: tuple[list[Row], dict[str, Any]], dp_size: int, random: Any
) -> None:
    rows, config = batch
    played: dict[Any, Any] = {}
    for row in rows:
        who = played.setdefault((row["uid"], row["sample"]), (random.choice("ab"), random.choice("xy")))
        row |= dict(zip(("agent", "episode"), who, strict=True))
    config = config | {"advantage_estimator": estimator, "trajectory_score": "sum", "episode_agents": ["a"]}
    assert_same_however_laid_out(rows, config, dp_size)
