"""`gigpo`: advantages of steps, compared with those of the same key or number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests import naive
from tests.pipeline.credit import assert_same_however_laid_out
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings

GIGPO: dict[str, Any] = {"advantage_estimator": "gigpo", "trajectory_score": "sum", "step_wise": True}
RAW: dict[str, Any] = {"grpo_norm_by_std": False}


def rows_of(*trajectories: list[float], uid: str = "p") -> list[Row]:
    """A prompt's samples, by the rewards of their steps, each of one token."""
    return [
        make_row(
            uid=uid, sample=sample, step=step, last=step == len(rewards) - 1, prompt=[1], response=[2], reward=reward
        )
        for sample, rewards in enumerate(trajectories)
        for step, reward in enumerate(rewards)
    ]


def advantages(
    rows: list[Row], *, key: str = "index", omega: float = 1.0, gamma: float = 1.0, **settings: Any
) -> list[float]:
    """Of each trained token, in order of samples and steps."""
    groups, samples = len({row["uid"] for row in rows}), len({row["sample"] for row in rows})
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": samples}
    rule = {"key": key, "omega": omega, "gamma": gamma}
    config = parse_config(make_config() | sizes | GIGPO | {"step_groups": rule} | settings)
    credit = planned(from_rows(rows), config, None).credit
    assert credit is not None
    assert credit.of_tokens is not None
    values: list[float] = credit.of_tokens.advantages.tolist()
    return values


def test_a_step_has_its_trajectorys_advantage_and_omega_times_its_own() -> None:
    """Sums 3 and 1: ±1. Returns with a discount of 0.5: 1 + 0.5·2 = 2 and 1 of the first steps, 2 and 0 after them."""
    rows = rows_of([1.0, 2.0], [1.0, 0.0])
    assert advantages(rows, omega=2.0, gamma=0.5, **RAW) == [1 + 2 * 0.5, 1 + 2 * 1.0, -1 - 2 * 0.5, -1 - 2 * 1.0]
    assert advantages(rows, omega=0.0) == pytest.approx([1 / (2**0.5 + 1e-6)] * 2 + [-1 / (2**0.5 + 1e-6)] * 2)


def test_without_the_trajectorys_part_steps_are_samples_of_their_group() -> None:
    """Discounted returns of every turn, normalized over all turns of the task (verifiers #170)."""
    rows = [row | {"step_key": "turn"} for row in rows_of([2.0, 0.5], [1.0], [0.0, 0.0, -1.0])]
    returns = np.array([2.25, 0.5, 1.0, -0.25, -0.5, -1.0])
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    rule = {"key": "step_key", "gamma": 0.5, "trajectory_weight": 0.0}
    assert advantages(rows, step_groups=rule) == pytest.approx(expected.tolist())
    halved = advantages(rows, step_groups=rule | {"trajectory_weight": 0.5, "omega": 0.0})
    whole = advantages(rows, step_groups=rule | {"trajectory_weight": 1.0, "omega": 0.0})
    assert halved == pytest.approx([one / 2 for one in whole])


@pytest.mark.parametrize(("samples", "of_trajectory"), [(1, 5.0), (2, 0.0)])
def test_visits_of_one_state_by_a_trajectory_that_is_alone_are_compared_with_each_other(
    samples: int, of_trajectory: float
) -> None:
    """Returns 5 and 4 in the same state. The trajectory itself has a baseline only in runs of one sample."""
    rows = keyed(rows_of([1.0, 4.0]), "hall", "hall")
    assert advantages(rows, key="step_key", n_samples_per_prompt=samples, **RAW) == [
        of_trajectory + 0.5,
        of_trajectory - 0.5,
    ]


def test_a_step_that_no_other_trajectory_has_gets_its_trajectorys_alone() -> None:
    rows = rows_of([1.0, 5.0], [2.0])
    assert advantages(rows, **RAW) == [2.0 + 2.0, 2.0, -2.0 - 2.0]
    assert advantages(rows_of([1.0, 5.0]), **RAW) == [6.0, 6.0]


def keyed(rows: list[Row], *keys: str) -> list[Row]:
    return [row | {"step_key": key} for row, key in zip(rows, keys, strict=True)]


def test_steps_with_the_same_key_are_compared_also_of_one_trajectory_and_those_without_key_with_none() -> None:
    """Sums 3 and 1: ±1. Returns are 3 and 2, and 1 and 0; hall has 3, 2 and 0, whose mean is 5 / 3."""
    rows = keyed(rows_of([1.0, 2.0], [1.0, 0.0]), "hall", "hall", "", "hall")
    expected = [1 + 3 - 5 / 3, 1 + 2 - 5 / 3, -1.0, -1 + 0 - 5 / 3]
    assert advantages(rows, key="step_key", **RAW) == pytest.approx(expected)
    assert advantages(rows_of([1.0, 2.0], [1.0, 0.0]), key="step_key", **RAW) == [1.0, 1.0, -1.0, -1.0]


def test_without_settings_steps_are_compared_by_key() -> None:
    rows = keyed(rows_of([1.0, 2.0], [1.0, 0.0]), "a", "b", "c", "b")
    assert advantages(rows, step_groups=None, **RAW) == [1.0, 2.0, -1.0, -2.0]


def test_shards_have_the_keys_of_each_rows_steps_and_none_for_padding() -> None:
    rows = keyed(rows_of([0.0, 0.0], [1.0]), "hall", "", "door")
    rows[1] |= {"prompt_token_ids": [1, 2, 5]}
    sizes = {"train_batch_size": 1, "policy_mini_batch_size": 1, "n_samples_per_prompt": 2, "dp_size": 3}
    config = parse_config(make_config() | sizes | GIGPO | {"merge": "prefix"})
    shards = build_batch(from_rows(rows), config, run="r", batch=0).shards
    keys = [naive.read_shard(shard)[1]["step_keys"] for shard in shards]
    assert sorted(keys, key=str) == [[None], [["door"]], [["hall", ""]]]
    bare = build_batch(from_rows(rows_of([0.0], [1.0])), config, run="r", batch=0).shards[0]
    assert "step_keys" not in naive.read_shard(bare)[1]


def test_steps_of_other_groups_are_not_compared() -> None:
    rows = rows_of([1.0, 2.0], [1.0, 0.0])
    both = advantages([*rows, *rows_of([9.0], [7.0], uid="q")])
    assert both[:4] == advantages(rows)


def test_equal_returns_of_steps_add_exactly_nothing() -> None:
    rows = rows_of([0.7, 0.7], [0.7, 0.7], [0.7, 0.7])
    assert advantages(rows) == [0.0] * 6
    assert advantages(rows_of([0.0, 0.7], [1.0, 0.7]), omega=1.0, **RAW) == [-1.0, -0.5, 1.0, 0.5]


def test_the_standard_deviation_of_the_batch_is_that_of_all_returns_of_steps() -> None:
    rows = [*rows_of([1.0, 2.0], [1.0, 0.0]), *rows_of([4.0], [4.0], uid="q")]
    of_trajectories = advantages(rows, omega=0.0, grpo_std_over="batch")
    own = [both - one for both, one in zip(advantages(rows, grpo_std_over="batch"), of_trajectories, strict=True)]
    # Returns are 3, 2, 1, 0, 4, 4: variance 16 / 6 · 6 / 5.
    std = ((sum(one**2 for one in (3, 2, 1, 0, 4, 4)) - 14**2 / 6) / 5) ** 0.5 + 1e-6
    assert own == pytest.approx([1 / std, 1 / std, -1 / std, -1 / std, 0.0, 0.0])


def test_whitening_is_over_trained_tokens() -> None:
    rows = rows_of([1.0, 2.0], [1.0, 0.0])
    raw = advantages(rows, gamma=0.5)
    mean = sum(raw) / 4
    variance = sum((one - mean) ** 2 for one in raw) / 3
    expected = [(one - mean) / (variance + 1e-8) ** 0.5 for one in raw]
    assert advantages(rows, gamma=0.5, whiten="batch") == pytest.approx(expected)


@given(st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=6), st.sampled_from([0.0, 0.5, 1.0]))
def test_with_one_step_each_trajectory_has_grpos_advantage_once_and_omega_times(
    rewards: list[float], omega: float
) -> None:
    rows = rows_of(*[[reward] for reward in rewards])
    once = advantages(rows, omega=0.0)
    assert advantages(rows, omega=omega) == [one + omega * one for one in once]


@LAW
@given(
    batches_and_settings(merge="none", loss_reduction="none"), st.integers(1, 4), st.sampled_from(["index", "step_key"])
)
def test_merging_layout_ranks_and_the_order_of_rows_change_no_advantage(
    drawn: tuple[list[Row], dict[str, Any]], dp_size: int, key: str
) -> None:
    rows, config = drawn
    config |= GIGPO | {"step_groups": {"key": key, "omega": 0.5, "gamma": 0.5}}
    rows = keyed(rows, *("ab"[len(row["response_ids"]) % 2] for row in rows))
    assert_same_however_laid_out(rows, config, dp_size)
