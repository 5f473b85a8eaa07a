"""`otb`: the reward to go of each token less the baseline of its group's tokens with the same index."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.credit import trained_tokens
from gristmill_service.pipeline.credit.kl import check_credit_columns
from tests import naive
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row

COLUMNS = [{"name": name, "dtype": "float64", "scope": "response"} for name in ("old_logprobs", "sum_pi_squared")]


def row_of(
    uid: str, sample: int, rewards: list[float], logprobs: list[float], squares: list[float], **more: Any
) -> Row:
    one = make_row(uid, sample, response=[7] * len(rewards), reward=rewards, **more)
    return one | {"old_logprobs": logprobs, "sum_pi_squared": squares}


def config_of(rows: list[Row], **settings: Any) -> dict[str, Any]:
    groups = len({row["uid"] for row in rows})
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": 4}
    return make_config() | sizes | {"advantage_estimator": "otb", "columns": COLUMNS} | settings


def credit(rows: list[Row], **settings: Any) -> tuple[list[float], list[float]]:
    """Advantages and returns of the trained tokens."""
    config = parse_config(config_of(rows, **settings))
    scored = planned(from_rows(rows, columns=config.columns), config, None)
    assert scored.credit is not None
    assert scored.credit.of_tokens is not None
    returns = scored.credit.of_tokens.returns
    assert returns is not None
    tokens = scored.credit.of_tokens.tokens
    return scored.credit.of_tokens.advantages.tolist(), tokens.take(returns).tolist()


def test_the_baseline_by_hand() -> None:
    """Weights 1 - 2π + Σπ² of 1.5 and 0.5 for the first tokens; the second trajectory alone has a second token."""
    rows = [
        row_of("p", 0, [1.0], [log(0.25)], [1.0]),
        row_of("p", 1, [3.0, 2.0], [log(0.5), log(0.5)], [0.5, 0.5]),
    ]
    advantages, returns = credit(rows)
    baseline = (1.0 * 1.5 + 5.0 * 0.5) / (2.0 + 1e-8)
    assert returns == [1.0, 5.0, 2.0]
    assert advantages == pytest.approx([1.0 - baseline, 5.0 - baseline, 2.0], rel=1e-12)


def test_a_group_of_one_has_no_baseline() -> None:
    assert credit([row_of("p", 0, [1.0, 2.0], [-1.0, -1.0], [0.5, 0.5])]) == ([3.0, 2.0], [3.0, 2.0])


def test_rounded_probabilities_of_nearly_1_leave_a_baseline_between_the_returns() -> None:
    """Weights of 6e-7 and -6e-7 cancelled each other, and rewards of 1 and 0 became advantages of -59 and -60."""
    rows = [row_of("p", 0, [1.0], [-3e-7], [1.0]), row_of("p", 1, [0.0], [0.0], [1 - 6e-7])]
    assert credit(rows)[0] == pytest.approx([0, -1], abs=0.02)


def test_observations_are_skipped() -> None:
    plain = [row_of("p", sample, [sample, 1.0], [-1.0, -2.0], [0.5, 0.25]) for sample in range(2)]
    observed = [
        row_of("p", sample, [sample, 0.0, 1.0], [-1.0, -9.0, -2.0], [0.5, 0.9, 0.25], loss_mask=[1, 0, 1])
        for sample in range(2)
    ]
    assert credit(observed) == credit(plain)


NUMBERS = st.integers(-8, 8).map(float)
TOKENS = st.tuples(NUMBERS, st.floats(-5, 0, width=32), st.floats(0, 1, width=32), st.integers(0, 1))
BATCHES = st.lists(st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=4), min_size=1, max_size=4)
Drawn = list[list[list[tuple[float, float, float, int]]]]


def rows_of(batch: Drawn) -> list[Row]:
    return [
        row_of(
            f"p{group}",
            sample,
            *([token[at] for token in tokens] for at in range(3)),
            loss_mask=[token[3] for token in tokens],
        )
        for group, trajectories in enumerate(batch)
        for sample, tokens in enumerate(trajectories)
    ]


def naive_advantages(trajectories: list[list[tuple[float, float, float, int]]]) -> list[float]:
    """Of one group, token by token."""
    returns, energies = list[list[float]](), list[list[float]]()
    for tokens in trajectories:
        rewards, weights = list[float](), list[float]()
        for reward, logprob, square, mask in tokens:
            if mask:
                rewards.append(reward)
                weights.append(max(0.0, 1 - 2 * exp(logprob) + square))
            elif rewards:
                rewards[-1] += reward
        returns.append([sum(rewards[at:]) for at in range(len(rewards))])
        energies.append([sum(weights[: at + 1]) for at in range(len(weights))])
    advantages = []
    for own in returns:
        for at, value in enumerate(own):
            pairs = [(g[at], w[at]) for g, w in zip(returns, energies, strict=True) if len(g) > at]
            weight = sum(w for _, w in pairs) + 1e-8
            advantages.append(value - sum(g * w for g, w in pairs) / weight if len(pairs) > 1 else value)
    return advantages


@given(BATCHES)
def test_it_is_what_the_plain_loop_makes_of_each_group(batch: Drawn) -> None:
    expected = [one for trajectories in batch for one in naive_advantages(trajectories)]
    np.testing.assert_allclose(credit(rows_of(batch))[0], expected, rtol=1e-6, atol=1e-6)


@given(BATCHES, st.integers(1, 8))
def test_a_groups_bits_depend_neither_on_the_rest_of_the_batch_nor_on_its_parts(batch: Drawn, most: int) -> None:
    rows = rows_of(batch)
    together = credit(rows)[0]
    groups = [[row for row in rows if row["uid"] == uid] for uid in dict.fromkeys(row["uid"] for row in rows)]
    assert together == [one for group in groups for one in credit(group)[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_tokens.TrainedTokens.parts, "__defaults__", (most, None))
        assert credit(rows)[0] == together


@LAW
@given(BATCHES, st.integers(1, 4), st.sampled_from(["left_padded", "packed"]))
def test_layout_and_ranks_change_no_advantage(batch: Drawn, dp_size: int, layout: str) -> None:
    rows = rows_of(batch)

    def trained(**changes: Any) -> list[Any]:
        config = parse_config(config_of(rows) | changes)
        shards = build_batch(from_rows(rows, columns=config.columns), config, run="r", batch=0).shards
        return sorted(
            (uid, int(row["sample"]), advantage)
            for shard in shards
            for row, uid in zip(naive.shard_rows(shard), naive.read_shard(shard)[1]["uids"], strict=True)
            for advantage in row["advantages"][row["loss_mask"] == 1].tolist()
        )

    assert trained(layout=layout, dp_size=dp_size) == trained()


@pytest.mark.parametrize("square", [-0.5, 1.5])
def test_a_sum_of_squared_probabilities_outside_of_0_to_1_is_refused_with_its_row(square: float) -> None:
    """Weights that cancel each other made advantages of 1e8 of rewards of 1."""
    rows = [row_of("p", 0, [1.0, 1.0], [-1.0, -1.0], [0.0, 1.004]), row_of("p", 1, [0.0], [0.0], [square])]
    config = parse_config(config_of(rows))
    check_credit_columns(from_rows(rows[:1], columns=config.columns), config)
    message = rf"sample 1 step 0: sum_pi_squared\[0\] is {square}, and a sum of squared probabilities is from 0 to 1"
    with pytest.raises(InvalidArgumentError, match=message):
        check_credit_columns(from_rows(rows, columns=config.columns), config)


def test_a_run_that_does_not_declare_its_columns_is_refused() -> None:
    message = "columns: old_logprobs is missing, and advantage_estimator: otb is computed from it; declare it"
    with pytest.raises(InvalidArgumentError, match=message):
        parse_config(make_config() | {"advantage_estimator": "otb"})
