"""SkyRL's output is taken as it is: recorded ones of SkyRL 0.3.0, and every key of its type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gristmill._wire.rows import from_rows
from gristmill.converters import from_skyrl
from gristmill.errors import InvalidArgumentError
from tests.client.converters.fields import fields_of
from tests.client.converters.recorded import skyrl_output

# `GeneratorOutput` of skyrl/train/generators/base.py (NovaSky-AI/SkyRL a9564572, 2026-08-21).
KEYS = [
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "trajectory_time_splits"),
    *("rollout_expert_indices", "is_last_step", "env_metrics", "pixel_values", "image_grid_thw"),
]
NEEDED = {"rollout_expert_indices", "pixel_values", "image_grid_thw"}


def output(**changes: Any) -> dict[str, Any]:
    """Two samples of a prompt, the second of two steps."""
    made: dict[str, Any] = {
        "prompt_token_ids": [[1, 2], [1, 2], [1, 2, 3, 4]],
        "response_ids": [[3], [3, 4], [5, 6]],
        "rewards": [1.0, 0.0, 0.5],
        "trajectory_ids": [("a", 0), ("a", 1), ("a", 1)],
        "is_last_step": [True, False, True],
    }
    return made | changes


@pytest.mark.parametrize("name", ["whole", "step_wise"])
def test_an_output_is_taken_as_it_is_with_the_ids_of_the_generators_input(name: str) -> None:
    ids, made = skyrl_output(name)
    rows = from_skyrl(made, trajectory_ids=ids)
    assert len(from_rows(rows)) == len(made["response_ids"])
    assert {row["uid"]: row["sample"] for row in rows} == {"a": 1, "b": 1}


def test_steps_of_a_step_wise_output_are_numbered() -> None:
    ids, made = skyrl_output("step_wise")
    rows = from_skyrl(made, trajectory_ids=ids, round=1, policy_version=3)
    assert fields_of(rows, "uid", "sample", "step", "is_last_step")[:3] == [
        ("a", 0, 0, False),
        ("a", 0, 1, True),
        ("a", 1, 0, False),
    ]
    assert fields_of(rows, "reward", "stop_reason", "round", "policy_version")[3] == ([0.0, 1.0], "stop", 1, 3)


def test_an_output_without_ids_says_where_they_are() -> None:
    _, made = skyrl_output("whole")
    with pytest.raises(InvalidArgumentError, match="pass trajectory_ids of the generator's input, or uids"):
        from_skyrl(made)
    rows = from_skyrl(made | {"uids": ["a", "a", "b", "b"]})
    assert fields_of(rows, "uid", "sample") == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_uids_alone_number_samples_by_the_trajectories_that_ended() -> None:
    made = output(trajectory_ids=None, uids=["a", "a", "a"])
    assert fields_of(from_skyrl(made), "sample", "step") == [(0, 0), (1, 0), (1, 1)]
    with pytest.raises(InvalidArgumentError, match="row 2 is of uid 'b', but the trajectory of uid 'a' has no last"):
        from_skyrl(made | {"uids": ["a", "a", "b"]})


def test_every_key_of_the_type_is_taken_or_refused_with_the_remedy() -> None:
    for name in KEYS:
        made = output()
        if name not in made:
            values = {"trajectory_time_splits": {"llm": [1.0], "env": [0.5]}, "rollout_metrics": {"mean": 1.0}}
            made[name] = values.get(name, [[0.0], [0.0, 0.0], [0.0, 0.0]])
        if name == "loss_masks":
            made[name] = [[1], [1, 1], [1, 1]]
        if name == "stop_reasons":
            made[name] = ["stop"] * 3
        if name in NEEDED:
            with pytest.raises(InvalidArgumentError, match=rf"{name} \(.*declare it as a column of the run"):
                from_skyrl(made)
        else:
            assert len(from_skyrl(made)) == 3


def test_routed_experts_and_images_are_columns_of_the_rows() -> None:
    routes = [np.arange(count * 2, dtype=np.uint8).reshape(count, 1, 2) for count in (2, 3, 6)]
    images = [torch.ones(4, 2), None, torch.zeros(1, 2)]
    made = output(rollout_expert_indices=routes, pixel_values=images)
    rows = from_skyrl(made, columns=["rollout_expert_indices", "pixel_values"])
    assert fields_of(rows, "rollout_expert_indices")[0] == [[[0, 1]], [[2, 3]]], "the engine ran two of three tokens"
    assert [len(row["rollout_expert_indices"]) for row in rows] == [2, 3, 6]
    assert fields_of(rows, "pixel_values") == [[[1.0, 1.0]] * 4, None, [[0.0, 0.0]]]
    assert "pixel_values" not in rows[1]
    with pytest.raises(InvalidArgumentError, match=r"uid 'a' sample 0 step 0: rollout_expert_indices has shape"):
        from_skyrl(output(rollout_expert_indices=routes[::-1]), columns=["rollout_expert_indices"])


def test_a_key_that_skyrl_does_not_have_is_a_column_or_ignored_by_name() -> None:
    made = output(difficulty=[1, 2, 3])
    with pytest.raises(
        InvalidArgumentError, match=r"unknown key difficulty; declare it as a column of the run and pass"
    ):
        from_skyrl(made)
    assert fields_of(from_skyrl(made, columns=["difficulty"]), "difficulty") == [1, 2, 3]
    assert "difficulty" not in from_skyrl(made, ignore=["difficulty"])[0]
    with pytest.raises(InvalidArgumentError, match="difficulty has 1 entries, but response_ids has 3"):
        from_skyrl(output(difficulty=[1]), columns=["difficulty"])
