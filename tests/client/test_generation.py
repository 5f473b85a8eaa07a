"""A generator output becomes rows; one with missing data is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from gristmill._wire.codecs.row_codec import encode
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill.converters import from_skyrl
from gristmill.errors import InvalidArgumentError
from tests.strategies import LAW, Row, rollouts


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


OUTPUT: dict[str, Any] = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 4], [1, 2]],
    "response_ids": [[3], [5, 6], [7]],
    "rewards": [0.0, 1.0, 0.5],
    "loss_masks": [[1], [0, 1], [1]],
    "stop_reasons": ["tool_calls", "stop", "stop"],
    "rollout_logprobs": [[-0.1], [-0.2, -0.3], [-0.4]],
    "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 0), TrajectoryID("a", 1)],
    "is_last_step": [False, True, True],
    "rollout_metrics": {"mean": 1.0},
    "rollout_expert_indices": None,
}


def from_generator_output(output: dict[str, Any], **options: Any) -> Steps:
    return from_rows(from_skyrl(output, **options))


def output(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (OUTPUT | changes).items() if value is not ...}


def test_rows_of_one_trajectory_are_numbered_in_their_order() -> None:
    table = from_generator_output(output(), round=2, attempt=1, policy_version=5)
    assert [table.name(row) for row in range(3)] == [
        "uid 'a' sample 0 round 2 step 0",
        "uid 'a' sample 0 round 2 step 1",
        "uid 'a' sample 1 round 2 step 0",
    ]
    assert table.is_last_steps.tolist() == [False, True, True]
    assert table.stop_reasons == ["tool_calls", "stop", "stop"]
    assert set(table.attempts.tolist()) == {1}
    assert set(table.policy_versions.tolist()) == {5}


@pytest.mark.parametrize(
    "identity",
    [
        {"trajectory_ids": [("a", 0), ["a", 0], ("a", np.int64(1))]},
        {"trajectory_ids": ..., "uids": ["a", "a", "a"], "samples": np.array([0, 0, 1])},
    ],
)
def test_trajectories_are_named_in_any_of_three_ways(identity: dict[str, Any]) -> None:
    assert encode(from_generator_output(output(**identity))) == encode(from_generator_output(output()))


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
def test_lists_arrays_and_tensors_say_the_same(make: Callable[[object], Any]) -> None:
    names = ("prompt_token_ids", "response_ids", "loss_masks")
    arrays = {name: [make(values) for values in OUTPUT[name]] for name in names} | {"rewards": make(OUTPUT["rewards"])}
    assert encode(from_generator_output(output(**arrays))) == encode(from_generator_output(output()))


@LAW
@given(rollouts())
def test_a_generator_output_is_its_rows(rows: list[Row]) -> None:
    names = {"prompt_token_ids": "prompt_token_ids", "response_ids": "response_ids", "loss_masks": "loss_mask"}
    names |= {"rewards": "reward", "stop_reasons": "stop_reason", "is_last_step": "is_last_step"}
    names |= {"rollout_logprobs": "rollout_logprobs"} if "rollout_logprobs" in rows[0] else {}
    made = {name: [row[field] for row in rows] for name, field in names.items()}
    made["trajectory_ids"] = [(row["uid"], row["sample"]) for row in rows]
    expected = from_rows([row | {"policy_version": -1} for row in rows])
    assert encode(from_generator_output(made)) == encode(expected)


def test_without_loss_masks_every_token_is_trained_and_without_is_last_step_each_row_is_a_trajectory() -> None:
    table = from_generator_output(
        {"prompt_token_ids": [[1], [1]], "response_ids": [[2, 3], [4]], "trajectory_ids": [("a", 0), ("a", 1)]}
    )
    assert [mask.tolist() for mask in table.loss_mask.arrays()] == [[1, 1], [1]]
    assert table.is_last_steps.all()
    assert table.rewards_pending.all()


def test_no_reward_is_0_before_the_last_step_and_pending_on_it() -> None:
    table = from_generator_output(output(rewards=None))
    assert table.rewards_pending.tolist() == [False, True, True]
    table = from_generator_output(output(rewards=[None, [0.0, 1.0], [1.0]]))
    assert not table.rewards_pending.any()
    assert table.token_rewards is not None
    assert table.token_rewards.values.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": ...}, "response_ids is missing"),
        ({"rewards": [1.0]}, "rewards has 1 entries, but response_ids has 3"),
        ({"trajectory_ids": None}, "pass trajectory_ids of the generator's input, or uids"),
        ({"trajectory_ids": None, "uids": ["b", "a", "a"]}, "row 1 is of uid 'a', but the trajectory of uid 'b' has"),
        ({"trajectory_ids": ["a", "b", "c"]}, "row 0 is of 'a'; expected a uid"),
        ({"trajectory_ids": [("a", 0), ("a", True), ("a", 1)]}, r"row 1 is of \('a', True\)"),
        ({"rollout_expert_indices": [[1], [2], [3]]}, "rollout_expert_indices .*declare it as a column of the run"),
        ({"surprise": [1, 2, 3]}, "unknown key surprise; declare it as a column of the run"),
        ({"response_ids": [[3], [], [7]]}, "uid 'a' sample 0 step 1: "),
        ({"rewards": [0.0, float("nan"), 1.0]}, "uid 'a' sample 0 step 1: reward is nan"),
        ({"loss_masks": [[1], [0, 1], [1, 1]]}, "uid 'a' sample 1 step 0: loss_mask has 2 values"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_generator_output(output(**changes))
