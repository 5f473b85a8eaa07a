"""Credit per token and the KL in rewards, as shards have them: per token of the trajectory, whatever rows, ranks and
layout are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, rollouts, settings_for

NAMES = ("values", "ref_logprobs", "old_logprobs")
COLUMNS = [{"name": name, "dtype": "float32", "scope": "response"} for name in NAMES]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], dict[str, Any]]:
    rows = [dict(row) for row in draw(rollouts(most_prompts=3))]
    for row in rows:
        for name in NAMES:
            count = len(row["response_ids"])
            row[name] = draw(st.lists(st.sampled_from([-1.5, -0.25, 0.0, 0.5]), min_size=count, max_size=count))
    estimator = draw(st.sampled_from(["gae", "reinforce++", "grpo", "rloo"]))
    config = draw(settings_for(rows, columns=COLUMNS, advantage_estimator=estimator)) | {
        "gamma": draw(st.sampled_from([1.0, 0.5])),
        "lambda": draw(st.sampled_from([1.0, 0.75])),
        "loss_reduction": "none",
    }
    if estimator in ("gae", "reinforce++"):
        config["whiten"] = draw(st.sampled_from(["none", "batch", "mini_batch"]))
    if draw(st.booleans()):
        config["kl_in_reward"] = {"coef": 0.5, "estimator": draw(st.sampled_from(["k1", "k2", "k3"]))}
    return rows, config


def built(rows: list[Row], config: dict[str, Any]) -> BuiltBatch:
    checked = parse_config(config)
    table = from_rows(rows, step_wise=checked.step_wise, columns=checked.columns)
    return build_batch(table, checked, run="r", batch=0)


def kl(config: dict[str, Any], row: Row, token: int) -> float:
    difference = row["old_logprobs"][token] - row["ref_logprobs"][token]
    match config.get("kl_in_reward", {}).get("estimator"):
        case "k1":
            return float(difference)
        case "k2":
            return float(difference**2 / 2)
        case "k3":
            return float(np.exp(-difference) - 1 + difference)
    return 0.0


def plain_credit(rows: list[Row], config: dict[str, Any]) -> dict[tuple[str, int, int, int], tuple[float, float]]:
    """Advantage and return of each trained token, by a loop from the end of its trajectory."""
    credit: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    for key in {(row["uid"], row["sample"]) for row in rows}:
        trained: list[tuple[int, int]] = []
        rewards: list[float] = []
        values: list[float] = []
        for row in (row for row in rows if (row["uid"], row["sample"]) == key):
            for token, reward in enumerate(naive.rewards_of(row)):
                if row["loss_mask"][token]:
                    trained.append((row["step"], token))
                    rewards.append(reward - 0.5 * kl(config, row, token))
                    values.append(row["values"][token])
                elif rewards:
                    rewards[-1] += reward
        gamma = config["gamma"]
        if config["advantage_estimator"] == "gae":
            after = advantage = 0.0
            for place in reversed(range(len(trained))):
                delta = rewards[place] + gamma * after - values[place]
                advantage = delta + gamma * config["lambda"] * advantage
                after = values[place]
                credit[*key, *trained[place]] = (advantage, advantage + after)
        else:
            to_go = 0.0
            for place in reversed(range(len(trained))):
                to_go = rewards[place] + gamma * to_go
                credit[*key, *trained[place]] = (to_go, to_go)
    return credit


def trained_tokens(batch: BuiltBatch, rows: list[Row], config: dict[str, Any], model: str = "policy") -> dict[Any, Any]:
    """Advantage, return and mini-batch of each trained token of the shards, by its trajectory, step and place."""
    groups = naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))
    tokens: dict[Any, Any] = {}
    for shard in batch.shards:
        if shard.address.model != model:
            continue
        for row in naive.shard_rows(shard):
            if row["row"] < 0:
                continue
            group = groups[int(row["row"])]
            for place, source in enumerate(group.sources):
                if row["loss_mask"][place]:
                    assert source is not None
                    key = (group.steps[0]["uid"], group.steps[0]["sample"], *source)
                    assert key not in tokens
                    returns = row["returns"][-len(row["loss_mask"]) :] if "returns" in row else None
                    tokens[key] = (
                        float(row["advantages"][place]),
                        None if returns is None else float(returns[place]),
                        shard.address.mini_batch,
                    )
    return tokens


def without_realigned(rows: list[Row], config: dict[str, Any]) -> list[Row]:
    return naive.without_realigned(rows, config["merge"], config.get("retokenized_tail", 0))


def whitened(values: np.ndarray) -> np.ndarray:
    if len(values) < 2 or np.ptp(values) == 0:
        return np.zeros(len(values))
    result: np.ndarray = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return result


@LAW
@given(batches())
def test_each_trained_token_has_the_credit_of_a_plain_loop(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    batch = built(rows, config)
    for model in ("policy", "critic") if "critic_mini_batch_size" in config else ("policy",):
        actual = trained_tokens(batch, rows, config, model)
        if config["advantage_estimator"] in ("gae", "reinforce++"):
            expected = plain_credit(without_realigned(rows, config), config)
            assert actual.keys() == expected.keys()
            parts = [actual[key][2] if config["whiten"] == "mini_batch" else 0 for key in actual]
            wanted = np.array([expected[key][0] for key in actual])
            if config["whiten"] != "none":
                for part in set(parts):
                    chosen = np.array(parts) == part
                    wanted[chosen] = whitened(wanted[chosen])
            np.testing.assert_allclose([one for one, _, _ in actual.values()], wanted, rtol=1e-4, atol=1e-4)
            wanted_returns = [expected[key][1] for key in actual]
            np.testing.assert_allclose([one for _, one, _ in actual.values()], wanted_returns, rtol=1e-5, atol=1e-6)


@LAW
@given(batches())
def test_group_estimators_take_the_kl_as_a_change_of_the_score(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    config |= {"advantage_estimator": "grpo", "grpo_norm_by_std": False, "trajectory_score": "sum", "whiten": "none"}
    changed = []
    for row in without_realigned(rows, config):
        penalties = [0.5 * kl(config, row, token) * row["loss_mask"][token] for token in range(len(row["loss_mask"]))]
        rewards = np.array(naive.rewards_of(row)) - penalties
        changed.append(row | {"reward": rewards.tolist() if isinstance(row["reward"], list) else float(rewards.sum())})
    with_kl = trained_tokens(built(rows, config), rows, config)
    plain = {name: value for name, value in config.items() if name != "kl_in_reward"}
    without = trained_tokens(built(changed, plain), rows, config)
    assert with_kl.keys() == without.keys()
    for key, (advantage, _, _) in with_kl.items():
        assert advantage == pytest.approx(without[key][0], abs=1e-5)


def test_the_rewards_of_shards_have_the_kl_in_them() -> None:
    row: Row = make_row(
        prompt=[1], response=[2, 3], values=[0.0, 0.0], ref_logprobs=[-1.0, -2.0], old_logprobs=[-0.5, -2.0]
    )
    config = make_config(
        columns=COLUMNS,
        advantage_estimator="reinforce++",
        kl_in_reward={"coef": 0.5, "estimator": "k1"},
        step_wise=False,
    )
    [shard] = built([row], config).shards
    tensors, _ = naive.read_shard(shard)
    assert tensors["rewards"].tolist() == [[-0.25, 1.0]]
    assert tensors["returns"].tolist() == tensors["advantages"].tolist() == [[0.75, 1.0]]


def test_a_sum_a_row_changes_scores_as_its_tokens_would() -> None:
    def rows(scores: list[float], sums: list[float]) -> list[Row]:
        return [
            {"uid": "a", "sample": sample, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1],
             "reward": score, "kl": total}
            for sample, (score, total) in enumerate(zip(scores, sums, strict=True))
        ]  # fmt: skip

    config = make_config(
        n_samples_per_prompt=2,
        micro_batch={"size": 2},
        columns=[{"name": "kl", "dtype": "float32", "scope": "row"}],
        advantage_estimator="rloo",
        kl_in_reward={"coef": 0.5, "column": "kl"},
        step_wise=False,
    )
    [shard] = built(rows([1.0, 0.0], [2.0, 0.5]), config).shards
    assert naive.read_shard(shard)[0]["advantages"].tolist() == [[0.25], [-0.25]]


def test_rows_without_the_logprobs_that_the_kl_is_taken_from_are_refused() -> None:
    config = make_config(
        columns=COLUMNS[1:2], kl_in_reward={"coef": 0.5, "estimator": "k1"}, kl_from="rollout_logprobs", step_wise=False
    )
    row: Row = make_row(prompt=[1], response=[2], ref_logprobs=[-1.0])
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0 step 0: rollout_logprobs is missing"):
        built([row], config)
