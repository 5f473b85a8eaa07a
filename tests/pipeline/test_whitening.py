"""`whiten` with every estimator: over which tokens or trajectories, and that nothing else matters."""

from __future__ import annotations

from math import sqrt
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit.whitening import whitened, whitened_with_counts
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings

WHITEN = ["batch", "mini_batch", "trajectories"]


def shards_of(rows: list[Row], config: dict[str, Any]) -> list[dict[str, Any]]:
    """The real rows of the policy's shards, each with its uid."""
    batch = build_batch(from_rows(rows, step_wise=config["step_wise"]), parse_config(config), run="r", batch=0)
    return [
        row | {"uid": uid}
        for shard in batch.shards
        if shard.address.model == "policy"
        for row, uid in zip(naive.shard_rows(shard), naive.read_shard(shard)[1]["uids"], strict=True)
        if not row["is_padding"]
    ]


def trained(rows: list[Row], config: dict[str, Any]) -> list[tuple[str, int, float]]:
    """The advantage of each trained token, sorted by trajectory."""
    return sorted(
        (row["uid"], int(row["sample"]), advantage)
        for row in shards_of(rows, config)
        for advantage in row["advantages"][row["loss_mask"] == 1].tolist()
    )


def sent(*advantages: Any, masks: list[list[int]] | None = None, **settings: Any) -> list[list[float]]:
    """The advantages of rows of prompts of one sample each, for which clients sent these."""
    masks = masks or [[1]] * len(advantages)
    rows = [
        make_row(uid=f"p{number}", prompt=[1], response=[2] * len(mask), loss_mask=mask) | {"advantage": advantage}
        for number, (advantage, mask) in enumerate(zip(advantages, masks, strict=True))
    ]
    config = make_config(train_batch_size=len(rows), n_samples_per_prompt=1, step_wise=False)
    config |= {"policy_mini_batch_size": len(rows), "advantage_estimator": "none", "layout": "packed", **settings}
    return [row["advantages"].tolist() for row in shards_of(rows, config)]


def test_a_batch_is_whitened_over_its_trained_tokens() -> None:
    """Mean (1 + 3 · 3) / 4, variance (1 · 1.5² + 3 · 0.5²) / 3. An observation has its trajectory's advantage."""
    whitened = sent(1.0, 3.0, masks=[[1, 0], [1, 1, 1]], whiten="batch")
    assert whitened == [[pytest.approx(-1.5)] * 2, [pytest.approx(0.5)] * 3]


def test_a_mini_batch_is_whitened_by_itself() -> None:
    one = sqrt(0.5)
    whitened = sent(1.0, 3.0, 50.0, 50.0, policy_mini_batch_size=2, whiten="mini_batch")
    assert whitened == [[pytest.approx(-one)], [pytest.approx(one)], [0.0], [0.0]]


def test_trajectories_count_once_each_however_long_they_are() -> None:
    one = sqrt(0.5)
    whitened = sent(1.0, 3.0, masks=[[1], [1, 1, 1]], whiten="trajectories")
    assert whitened == [[pytest.approx(-one)], [pytest.approx(one)] * 3]


@pytest.mark.parametrize("whiten", ["batch", "mini_batch"])
def test_advantages_that_clients_sent_for_tokens_are_whitened_and_0_where_nothing_is_trained(whiten: str) -> None:
    whitened = sent([1.0, 9.0], [3.0, 3.0, 3.0], masks=[[1, 0], [1, 1, 1]], whiten=whiten)
    assert whitened == [[pytest.approx(-1.5), 0.0], [pytest.approx(0.5)] * 3]


def test_trajectories_cannot_be_whitened_if_clients_sent_advantages_for_tokens() -> None:
    message = "advantage has one number per token, and whiten: trajectories needs one per trajectory; send that"
    with pytest.raises(InvalidArgumentError, match=message):
        sent([1.0], [2.0], whiten="trajectories")


@pytest.mark.parametrize("whiten", WHITEN)
@given(score=st.floats(-1e6, 1e6, width=32), samples=st.integers(1, 4), groups=st.integers(1, 4))
def test_equal_scores_give_exactly_zero(whiten: str, score: float, samples: int, groups: int) -> None:
    rows = [
        make_row(uid=f"p{group}", sample=sample, prompt=[1], response=[2], reward=score)
        for group in range(groups)
        for sample in range(samples)
    ]
    config = make_config(train_batch_size=groups, n_samples_per_prompt=samples, policy_mini_batch_size=1)
    advantages = [one for _, _, one in trained(rows, config | {"step_wise": False, "whiten": whiten})]
    assert advantages == [0.0] * len(rows)


@pytest.mark.parametrize("whiten", WHITEN)
def test_an_advantage_that_float32_cannot_hold_is_refused_also_if_whitening_would_shrink_it(whiten: str) -> None:
    rows = [
        make_row(sample=sample, prompt=[1], response=[2], reward=reward) for sample, reward in enumerate([3e38, -3e38])
    ]
    config = make_config(n_samples_per_prompt=2, advantage_estimator="rloo", step_wise=False, whiten=whiten)
    with pytest.raises(InvalidArgumentError, match=r"advantage is 6e\+38, which float32 cannot hold"):
        shards_of(rows, config)


def test_an_advantage_that_no_token_has_is_shifted_and_scaled_like_those_of_tokens() -> None:
    assert whitened_with_counts(np.array([0.7, 0.7, 0.9]), np.array([2.0, 1.0, 0.0])).tolist() == [
        0.0,
        0.0,
        pytest.approx(0.2 / 1e-4),
    ]
    assert whitened_with_counts(np.array([0.7, 0.9]), np.zeros(2)).tolist() == [0.0, 0.0]
    # One trained token has no variance, also for the trajectories that train none.
    assert whitened_with_counts(np.array([0.7, 0.9]), np.array([0.0, 1.0])).tolist() == [0.0, 0.0]


COUNTED = st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 5)), min_size=1, max_size=20)


def columns(counted: list[tuple[float, int]]) -> tuple[Float64s, Float64s]:
    return np.array([advantage for advantage, _ in counted]), np.array([float(count) for _, count in counted])


@given(COUNTED)
def test_counts_stand_for_repeated_advantages(counted: list[tuple[float, int]]) -> None:
    advantages, counts = columns(counted)
    result = np.repeat(whitened_with_counts(advantages, counts), counts.astype(np.int64))
    np.testing.assert_allclose(result, whitened(np.repeat(advantages, counts.astype(np.int64))), rtol=1e-9, atol=1e-9)


@given(COUNTED, st.randoms())
def test_the_order_of_trajectories_changes_no_bit(counted: list[tuple[float, int]], shuffler: Random) -> None:
    order = shuffler.sample(range(len(counted)), len(counted))
    advantages, counts = columns(counted)
    shuffled = whitened_with_counts(advantages[order], counts[order])
    assert whitened_with_counts(advantages, counts)[order].tobytes() == shuffled.tobytes()


@LAW
@given(batches_and_settings(merge="none", loss_reduction="none"), st.sampled_from(WHITEN), st.integers(1, 4))
def test_merging_layout_ranks_and_the_order_of_rows_change_no_whitened_advantage(
    drawn: tuple[list[Row], dict[str, Any]], whiten: str, dp_size: int
) -> None:
    rows, config = drawn
    config |= {"whiten": whiten}
    expected = trained(rows, config)
    assert trained(rows, config | {"merge": "prefix"}) == expected
    assert trained(rows, config | {"merge": "tree"}) == expected
    assert trained(rows, config | {"layout": "packed", "pad_width": "shard", "dp_size": dp_size}) == expected
    in_order = [row for uid in dict.fromkeys(row["uid"] for row in rows) for row in rows[::-1] if row["uid"] == uid]
    assert trained(in_order, config) == expected
