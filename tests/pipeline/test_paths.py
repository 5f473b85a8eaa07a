"""Rows whose paths share steps, or keep a part of one: where values stand, and that each token is trained once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch, scored_batch
from gristmill_service.pipeline.rows.joins import Mismatch
from gristmill_service.pipeline.rows.merge import Rows, rows_of_paths
from gristmill_service.pipeline.rows.validate import Received
from tests import naive
from tests.strategies import Row

STEPS = [
    ([1, 2], [3, 4]),
    ([1, 2, 3, 4, 9], [5, 6]),
    ([1, 2, 3, 4, 8], [7]),  # A fork of step 0.
    ([1, 2, 3, 4, 9, 5, 10], [11, 12]),  # Behind step 1, whose 6 it has not.
    ([1, 2, 3, 4, 9, 5, 6, 13], [14]),  # Behind step 1, all of it.
]
PATHS = [[0, 1, 3], [0, 2], [0, 1, 4]]
KEPT = [2, 1, 2, 2, 1, 2, 2, 1]
SHARED = [0, 0, 0, 2, 0, 2, 1, 0]


def _by_hand(received: Received, config: RunConfig) -> tuple[Rows, list[Mismatch]]:
    steps = [step for path in PATHS for step in path]
    edges = np.cumsum([0, *map(len, PATHS)])
    return rows_of_paths(received, edges, *(np.array(values, np.int64) for values in (steps, KEPT, SHARED))), []


@pytest.fixture(params=["left_padded", "packed"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(scored_batch, "merge", _by_hand)
    return {"layout": request.param}


def built(settings: dict[str, Any], changes: dict[int, Row] | None = None) -> BuiltBatch:
    rows = [
        {
            "uid": "p",
            "sample": 0,
            "step": step,
            "is_last_step": step == len(STEPS) - 1,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [1] * len(response),
            "rollout_logprobs": [-float(token) for token in response],
            "reward": step + 1.0,
            "stop_reason": f"reason {step}",
            "policy_version": 9 - step,
            **(changes or {}).get(step, {}),
        }
        for step, (prompt, response) in enumerate(STEPS)
    ]
    config = {
        "train_batch_size": 1,
        "n_samples_per_prompt": 1,
        "policy_mini_batch_size": 1,
        "micro_batch": {"size": 2},
        "dp_size": 2,  # One padding row.
        "step_wise": True,
        **settings,
    }
    return build_batch(from_rows(rows), parse_config(config), run="r", batch=0)


def rows_of(batch: BuiltBatch) -> list[Row]:
    rows = [row for shard in batch.shards for row in naive.shard_rows(shard)]
    return [row for row in rows if not row["is_padding"]]


def column(batch: BuiltBatch, name: str) -> list[list[float]]:
    return [row[name].tolist() for row in rows_of(batch)]


def test_a_row_has_the_tokens_of_its_last_step(settings: dict[str, Any]) -> None:
    batch = built(settings)
    assert column(batch, "sequences") == [[*STEPS[end][0], *STEPS[end][1]] for *_, end in PATHS]
    assert [int(row["response_mask"].sum()) for row in rows_of(batch)] == [7, 4, 7]


def test_a_token_is_trained_once_and_what_is_not_kept_is_observation(settings: dict[str, Any]) -> None:
    batch = built(settings)
    assert column(batch, "loss_mask") == [[1, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 1]]
    assert batch.plan.mini_batches[0].loss_tokens == 8


def test_shared_tokens_keep_their_logprobs(settings: dict[str, Any]) -> None:
    expected = [[-3, -4, 0, -5, 0, -11, -12], [-3, -4, 0, -7], [-3, -4, 0, -5, -6, 0, -14]]
    assert column(built(settings), "rollout_logprobs") == expected


def test_a_reward_stands_once_on_the_last_token_that_is_kept(settings: dict[str, Any]) -> None:
    assert column(built(settings), "rewards") == [[0, 1, 0, 2, 0, 0, 4], [0, 0, 0, 3], [0, 0, 0, 0, 0, 0, 5]]


def test_rewards_per_token_stand_where_their_token_is_trained(settings: dict[str, Any]) -> None:
    each = {step: {"reward": [float(token) for token in response]} for step, (_, response) in enumerate(STEPS)}
    batch = built(settings, each)
    assert column(batch, "rewards") == [[3, 4, 0, 5, 0, 11, 12], [0, 0, 0, 7], [0, 0, 0, 0, 6, 0, 14]]


def test_advantages_per_token_have_the_scale_of_the_row_that_they_stand_in(settings: dict[str, Any]) -> None:
    each = {step: {"advantage": [15.0] * len(response)} for step, (_, response) in enumerate(STEPS)}
    settings |= {"advantage_estimator": "none", "loss_reduction": "sequence_mean"}
    # 1 / (3 rows x the row's loss tokens).
    assert column(built(settings, each), "advantages") == [
        [1, 1, 0, 1, 0, 1, 1],
        [5, 5, 0, 5],
        [2.5, 2.5, 0, 2.5, 2.5, 0, 2.5],
    ]


def test_a_mask_in_part_and_a_filter_hold_in_every_row(settings: dict[str, Any]) -> None:
    batch = built(settings | {"overlong_filter": ["reason 3"]}, {0: {"loss_mask": [0, 1]}})
    assert column(batch, "loss_mask") == [[0, 1, 0, 1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 1]]
    assert batch.plan.mini_batches[0].loss_tokens == 5


def test_a_step_of_which_nothing_is_kept_leaves_nothing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.pipeline.test_paths.KEPT", [0, 1, 2, 0, 1, 0, 2, 1])
    monkeypatch.setattr("tests.pipeline.test_paths.SHARED", [0, 0, 0, 0, 0, 0, 1, 0])
    batch = built(settings)
    assert column(batch, "loss_mask") == [[0, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 1]]
    assert column(batch, "rewards") == [[0, 0, 0, 2, 0, 0, 4], [0, 0, 0, 3], [0, 0, 0, 0, 0, 0, 5]]


def test_a_row_says_its_paths_ends_and_its_oldest_version(settings: dict[str, Any]) -> None:
    batch = built(settings)
    rows = rows_of(batch)
    assert [(row["step_first"], row["step_last"], row["policy_version"]) for row in rows] == [
        (0, 3, 6),
        (0, 2, 7),
        (0, 4, 5),
    ]
    assert [bool(row["is_last_step"]) for row in rows] == [False, False, True]
    reasons = [reason for shard in batch.shards for reason in naive.read_shard(shard)[1]["stop_reasons"]]
    assert reasons == ["reason 3", "reason 2", "reason 4", "padding"]
