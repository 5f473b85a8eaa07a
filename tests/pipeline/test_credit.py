"""Credit per token and the KL in rewards, as shards have them: per token of the trajectory, whatever rows, ranks and
layout are."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import Row

NAMES = ("values", "ref_logprobs", "old_logprobs")
COLUMNS = [{"name": name, "dtype": "float32", "scope": "response"} for name in NAMES]


def built(rows: list[Row], config: dict[str, Any]) -> BuiltBatch:
    checked = parse_config(config)
    table = from_rows(rows, step_wise=checked.step_wise, columns=checked.columns)
    return build_batch(table, checked, run="r", batch=0)


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
