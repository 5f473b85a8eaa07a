"""TRL's generations and its asynchronous samples become rows: recorded ones of TRL 1.16.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gristmill._wire.rows import from_rows
from gristmill.converters import from_trl, from_trl_async
from gristmill.errors import InvalidArgumentError
from tests.client.converters.fields import fields_of
from tests.client.converters.recorded import trl_output, trl_samples

REWARDS = [5.0, 2.0, 3.0, 1.0]


def convert(output: dict[str, Any] | None = None, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"uids": ["a", "b"], "rewards": REWARDS, "num_generations": 2}
    return from_trl(trl_output() if output is None else output, **(given | options))


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["arrays", "tensors"])
def test_padding_is_taken_off_and_tokens_of_tools_are_not_trained(kind: Any) -> None:
    rows = convert(trl_output(kind), rewards=kind(REWARDS))
    assert fields_of(rows, "prompt_token_ids", "response_ids", "loss_mask") == [
        ([2, 3], [8, 20, 21, 9, 1], [1, 0, 0, 1, 1]),
        ([2, 3], [10, 1], [1, 1]),
        ([4, 5, 6, 7], [11, 12, 1], [1, 1, 1]),
        ([4, 5, 6, 7], [13], [1]),
    ]
    assert fields_of(rows, "rollout_logprobs")[1] == [-0.25, -0.25]
    assert fields_of(rows, "uid", "sample", "reward") == [("a", 0, 5.0), ("a", 1, 2.0), ("b", 0, 3.0), ("b", 1, 1.0)]


def test_uids_may_be_given_row_by_row() -> None:
    assert fields_of(convert(uids=["a", "b", "a", "b"], num_generations=None), "uid", "sample") == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]


def test_samples_may_be_numbered_and_end_tokens_give_stop_reasons() -> None:
    rows = convert(uids=["a", "a", "b", "b"], num_generations=None, samples=[6, 7, 0, 1], end_tokens=[1])
    assert fields_of(rows, "uid", "sample", "stop_reason") == [
        ("a", 6, "stop"),
        ("a", 7, "stop"),
        ("b", 0, "stop"),
        ("b", 1, "length"),
    ]
    assert "stop_reason" not in convert()[0]


def test_advantages_are_given_on_request_a_row_or_a_token() -> None:
    output = trl_output()
    assert fields_of(convert(advantages=True), "advantage") == output["advantages"].tolist()
    output["advantages"] = np.arange(20.0).reshape(4, 5)
    assert fields_of(convert(output, advantages=True), "advantage")[1] == [5.0, 6.0]
    del output["advantages"]
    with pytest.raises(InvalidArgumentError, match="advantages is missing"):
        convert(output, advantages=True)


def test_without_a_tool_mask_the_whole_completion_is_trained() -> None:
    output = trl_output()
    del output["tool_mask"]
    assert fields_of(convert(output), "loss_mask")[0] == [1, 1, 1, 1, 1]


def test_images_are_cut_by_row_and_token_types_with_the_tokens() -> None:
    grid = np.array([[1, 2, 2], [1, 2, 1], [1, 1, 1]])
    output = trl_output() | {
        "pixel_values": np.arange(7.0)[:, None],
        "image_grid_thw": grid,
        "num_images": [1, 0, 2, 0],
        "mm_token_type_ids": np.tile(np.arange(9), (4, 1)),
    }
    rows = convert(output, columns=["pixel_values", "image_grid_thw", "mm_token_type_ids"])
    assert fields_of(rows, "pixel_values") == [[[0], [1], [2], [3]], [], [[4], [5], [6]], []]
    assert fields_of(rows, "image_grid_thw") == [[[1, 2, 2]], [], [[1, 2, 1], [1, 1, 1]], []]
    assert fields_of(rows, "mm_token_type_ids")[1] == [2, 3, 4, 5]
    tiles = trl_output() | {
        "pixel_values": np.arange(5.0)[:, None],
        "num_images": [1, 0, 1, 0],
        "num_tiles": [3, 0, 2, 0],
    }
    assert fields_of(convert(tiles, columns=["pixel_values"]), "pixel_values")[2] == [[3], [4]]
    tiles["pixel_values"] = np.ones((4, 1))
    with pytest.raises(InvalidArgumentError, match="pixel_values has 4 entries for 2 images"):
        convert(tiles, columns=["pixel_values"])
    with pytest.raises(InvalidArgumentError, match=r"pixel_values \(the images of all rows\) is not a row field"):
        convert(tiles)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uids": ["a"]}, "1 uids of 2 generations each for 4 rows; pass one uid per group"),
        ({"uids": ["a", "a"]}, "uid 'a' names two groups; pass a repeated prompt in another round"),
        ({"uids": ["a"], "num_generations": None}, "uids has 1 entries for 4 rows"),
        ({"uids": [1.5, "a"]}, r"uids\[0\]: the group's uid is 1.5"),
        ({"samples": [0]}, "samples has 1 entries for 4 rows"),
        ({"rewards": [1.0]}, r"rewards has shape \(1,\)"),
        ({"rewards": np.ones((4, 2))}, "the weighted sum of the reward functions"),
        ({"rewards": [1.0, float("nan"), 1.0, 1.0]}, "row 1: the reward is nan"),
    ],
)
def test_groups_and_rewards_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        convert(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_mask": None}, "prompt_mask is missing"),
        ({"prompt_ids": np.ones(4)}, "prompt_ids has shape"),
        ({"tool_mask": np.ones((4, 4))}, r"tool_mask has shape \(4, 4\); expected \(4, 5\)"),
        ({"completion_mask": np.eye(4, 5)}, "row 1: prompt_mask and completion_mask has zeros between tokens"),
        ({"completion_mask": np.zeros((4, 5))}, "row 0: completion_mask is 0 on every token.*overlong_filter"),
        ({"surprise": np.ones(4)}, "unknown key surprise"),
    ],
)
def test_what_is_missing_or_not_known_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        convert(trl_output() | changes)


def test_asynchronous_samples_are_cut_at_the_first_trained_token() -> None:
    rows = from_trl_async(trl_samples(), num_generations=2)
    assert fields_of(rows, "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs") == [
        ([2, 3], [4, 5, 20, 21, 6, 1], [1, 1, 0, 0, 1, 1], [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]),
        ([2, 3], [7, 1], [1, 1], [-0.5, -0.5]),
    ]
    assert fields_of(rows, "uid", "sample", "reward", "policy_version") == [("17", 0, 4.0, 6), ("17", 1, 2.0, 6)]
    assert from_rows(rows).rewards.tolist() == [4.0, 2.0]


def test_asynchronous_samples_bring_advantages_and_columns_on_request() -> None:
    first, second = trl_samples()
    first.entropy, second.entropy = 0.5, 0.25
    rows = from_trl_async([first, second], num_generations=2, advantages=True, policy_version=1, columns=["entropy"])
    assert fields_of(rows, "advantage", "entropy", "policy_version") == [
        (first.advantage, 0.5, 1),
        (second.advantage, 0.25, 1),
    ]
    with pytest.raises(InvalidArgumentError, match="unknown key entropy"):
        from_trl_async([first, second], num_generations=2)


def changed(**changes: Any) -> list[Any]:
    first, second = trl_samples()
    return [SimpleNamespace(**(vars(first) | changes)), second]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (trl_samples()[:1], "group 17 has 1 samples for 2 generations; pass whole groups"),
        ([*trl_samples(), *trl_samples()[:1]], "group 17 has 3 samples for 2 generations.*fork_threshold_tokens"),
        (changed(metrics={"reward": float("nan")}), "uid '17' sample 0: the reward in metrics is nan"),
        (changed(metrics={}), "the reward in metrics is None"),
        (changed(completion_mask=np.zeros(8)), "the mask trains no token"),
        (changed(old_log_probs=np.zeros(3)), "old_log_probs has 3 values for 8 tokens"),
    ],
)
def test_asynchronous_samples_that_are_not_whole_are_refused(samples: list[Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_trl_async(samples, num_generations=2)
