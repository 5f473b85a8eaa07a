"""slime's samples become rows by their group and rollout, and are refused where those are not clear."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.converters import from_slime
from gristmill.errors import InvalidArgumentError
from tests.client.converters.fields import fields_of, same
from tests.client.converters.stand_ins import Sample, Status


def sample(number: int = 4, **changes: Any) -> Sample:
    """Group 2 with two samples: each has a turn, a tool's answer and a turn."""
    made: dict[str, Any] = {
        "group_index": number // 2,
        "index": number,
        "tokens": [1, 2, 3, 4, 5, 6],
        "response_length": 4,
        "loss_mask": [1, 0, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, 0.0, -0.25],
        "reward": float(number),
        "status": Status.COMPLETED,
        "weight_versions": ["12", "9"],
    }
    return Sample(**(made | changes))


def test_tokens_are_cut_at_the_response_and_each_call_has_its_own_weights() -> None:
    (row,) = from_slime([sample()], round=3)
    assert fields_of([row], "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs") == [
        ([1, 2], [3, 4, 5, 6], [1, 0, 0, 1], [-0.5, 0.0, 0.0, -0.25])
    ]
    assert fields_of([row], "uid", "round", "reward", "stop_reason") == [("2", 3, 4.0, "stop")]
    assert fields_of([row], "policy_versions") == [[12, -1, -1, 9]]
    # It is unknown which of these sampled which token.
    unclear = from_slime([sample(4, weight_versions=["12", "9", "11"]), sample(5, remove_sample=True)])
    assert fields_of(unclear, "policy_version") == [9, 9]


def test_samples_are_numbered_by_their_index_however_they_are_nested_and_ordered() -> None:
    rows = from_slime([[sample(5), sample(4)], [[sample(7)], [sample(6)]]])
    assert fields_of(rows, "uid", "sample", "reward") == [("2", 1, 5.0), ("2", 0, 4.0), ("3", 1, 7.0), ("3", 0, 6.0)]


def test_samples_of_one_rollout_are_its_steps_and_count_their_reward_once() -> None:
    siblings = [sample(4, rollout_id=4), sample(4, rollout_id=4, tokens=[7, 8, 9], response_length=1, loss_mask=[1])]
    siblings[1].rollout_log_probs = [-0.5]
    rows = from_slime([*siblings, sample(5)])
    assert fields_of(rows, "sample", "step", "is_last_step", "reward") == [
        (0, 0, False, 0.0),
        (0, 1, True, 4.0),
        (1, 0, True, 5.0),
    ]
    siblings[0].reward = 1.0
    with pytest.raises(
        InvalidArgumentError, match=r"uid '2' sample 0: its 2 rows have the rewards .*the trajectory's reward"
    ):
        from_slime(siblings)


def test_without_a_loss_mask_all_is_trained_and_a_removed_sample_is_not() -> None:
    rows = from_slime([sample(4, loss_mask=None), sample(5, remove_sample=True)])
    assert fields_of(rows, "loss_mask") == [[1, 1, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("status", "reason"), [("completed", "stop"), ("truncated", "length"), ("aborted", "abort"), ("failed", "failed")]
)
def test_the_status_is_the_stop_reason(status: str, reason: str) -> None:
    assert fields_of(from_slime([sample(status=Status(status))]), "stop_reason") == [reason]


def test_samples_may_be_mappings_as_slime_writes_them() -> None:
    made = [asdict(sample(index)) | {"status": "completed"} for index in (4, 5)]
    assert same(from_slime(made), from_slime([sample(4), sample(5)]))


def test_versions_that_are_no_numbers_are_unknown_and_a_given_version_replaces_them() -> None:
    samples = [sample(4, weight_versions=["default"]), sample(5, weight_versions=[])]
    assert fields_of(from_slime(samples), "policy_version") == [-1, -1]
    (row,) = from_slime([sample(4, weight_versions=["default", "3"])])
    assert fields_of([row], "policy_versions") == [[-1, -1, -1, 3]]
    assert fields_of(from_slime(samples, policy_version=8), "policy_version") == [8, 8]


def test_a_reward_of_several_is_named_and_one_that_is_not_there_is_pending() -> None:
    several = sample(reward={"accuracy": 0.5, "format": 1.0})
    assert fields_of(from_slime([several], reward_key="accuracy"), "reward") == [0.5]
    with pytest.raises(InvalidArgumentError, match="reward has 'accuracy', 'format', and reward_key is None"):
        from_slime([several])
    assert fields_of(from_slime([sample(reward=None)]), "reward") == [None]


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
def test_a_sample_that_was_aborted_without_a_reward_says_so_in_place_of_its_tokens(status: Status) -> None:
    lost = sample(5, reward=None, status=status, tokens=[0, 0], response_length=0, loss_mask=None)
    rows = from_slime([sample(4), lost], tags=["math", "math"], round=2, attempt=1)
    assert fields_of(rows[:1], "uid", "sample", "reward") == [("2", 0, 4.0)]
    names = {"uid": "2", "round": 2, "sample": 1, "attempt": 1, "tag": "math"}
    assert rows[1:] == [{**names, "aborted": status.value}]
    scored = sample(5, reward=0.0, status=status)
    assert fields_of(from_slime([sample(4), scored]), "reward") == [4.0, 0.0]


def test_a_rollout_of_which_a_sample_was_aborted_is_aborted_whole() -> None:
    turns = [sample(4, rollout_id=4, reward=None), sample(4, rollout_id=4, reward=None, status=Status.ABORTED)]
    rows = from_slime([*turns, sample(5)])
    assert fields_of(rows, "sample", "reward") == [(1, 5.0), (0, None)]
    assert rows[1]["aborted"] == "aborted"
    turns[0].reward = 1.0
    with pytest.raises(InvalidArgumentError, match="its 2 rows have the rewards"):
        from_slime(turns)


def test_the_candidates_of_score_centering_are_columns() -> None:
    made = sample()
    made.__dict__ |= {"rollout_topk_token_ids": [[3, 9]] * 4, "rollout_topk_log_probs": [[-0.5, -1.0]] * 4}
    with pytest.raises(
        InvalidArgumentError, match=r"rollout_topk_log_probs \(the logprobs of rollout_topk_token_ids\)"
    ):
        from_slime([made])
    names = ["rollout_topk_token_ids", "rollout_topk_log_probs"]
    assert fields_of(from_slime([made], columns=names), *names) == [([[3, 9]] * 4, [[-0.5, -1.0]] * 4)]


def test_columns_are_what_the_sample_holds_and_routes_those_that_the_engine_reported() -> None:
    routes = torch.arange(5 * 2 * 2, dtype=torch.int32).reshape(5, 2, 2)
    rows = from_slime(
        [
            sample(4, teacher_log_probs=[-1.0, 0, 0, -2.0], rollout_routed_experts=routes),
            sample(5, multimodal_train_inputs={"pixel_values": torch.ones(2, 3)}),
        ],
        columns=["teacher_log_probs", "rollout_routed_experts", "pixel_values"],
    )
    assert fields_of(rows, "teacher_log_probs") == [[-1.0, 0, 0, -2.0], None]
    assert rows[0]["rollout_routed_experts"].tolist() == routes.tolist()
    assert ["pixel_values" in row for row in rows] == [False, True]
    assert np.array_equal(rows[1]["pixel_values"], np.ones((2, 3)))


def test_the_tokens_that_top_p_kept_are_one_column_with_their_offsets() -> None:
    kept: dict[str, Any] = {"rollout_top_p_token_ids": torch.tensor([7, 8, 9]), "response_length": 4}
    kept["rollout_top_p_token_offsets"] = [0, 2, 2, 2, 3]
    (row,) = from_slime([sample(**kept)], columns=["rollout_top_p_token_ids"])
    assert row["rollout_top_p_token_ids"].tolist() == [7, 8, 9]
    assert row["rollout_top_p_token_ids_offsets"].tolist() == [0, 2, 2, 2, 3]
    with pytest.raises(
        InvalidArgumentError, match=r"rollout_top_p_token_ids \(the tokens that top-p kept\) is not a row field"
    ):
        from_slime([sample(**kept)])
    del kept["rollout_top_p_token_offsets"]
    with pytest.raises(InvalidArgumentError, match="rollout_top_p_token_ids has no rollout_top_p_token_offsets"):
        from_slime([sample(**kept)], columns=["rollout_top_p_token_ids"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_index": None}, "sample 0 has no group_index"),
        ({"index": None, "rollout_id": None}, "sample 0 has no index"),
        ({"status": Status.PENDING}, r"sample 0 \(uid '2' index 4\): status is 'pending', not one of completed"),
        ({"response_length": 0}, "response_length is 0 of 6 tokens"),
        ({"response_length": 6}, "response_length is 6 of 6 tokens"),
        ({"tokens": "text"}, "tokens is not an array of numbers"),
        (
            {"teacher_log_probs": [0.0]},
            r"teacher_log_probs \(the teacher's logprobs\) is not a row field; declare it",
        ),
        ({"train_metadata": {"loss": "sft"}}, "train_metadata"),
        ({"multimodal_train_inputs": {"pixel_values": [[1.0]]}}, "unknown key pixel_values"),
    ],
)
def test_what_is_unclear_or_would_be_lost_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_slime([sample(**changes)])


def test_an_attribute_that_slime_does_not_have_is_refused_until_it_is_named() -> None:
    made = sample()
    made.__dict__["difficulty"] = 3
    with pytest.raises(InvalidArgumentError, match=r"unknown key difficulty; .*columns=\['difficulty'\]"):
        from_slime([made])
    assert fields_of(from_slime([made], columns=["difficulty"]), "difficulty") == [3]
    assert "difficulty" not in from_slime([made], ignore=["difficulty"])[0]


def test_routes_of_more_tokens_than_there_are_are_refused() -> None:
    made = sample(rollout_routed_experts=np.zeros((7, 2, 2), np.int32))
    with pytest.raises(InvalidArgumentError, match=r"rollout_routed_experts has shape \(7, 2, 2\)"):
        from_slime([made], columns=["rollout_routed_experts"])
