"""Fields under another framework's names are refused with the name that they have here."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill._wire.foreign_names import renamings
from gristmill._wire.rows import from_rows
from gristmill._wire.tables import ARRAYS, SCALARS
from gristmill.converters import from_skyrl
from gristmill.errors import InvalidArgumentError

ROW: dict[str, Any] = {
    "uid": "a",
    "sample": 0,
    "prompt_token_ids": [1, 2],
    "response_ids": [3],
    "loss_mask": [1],
    "reward": 1.0,
}
OUTPUT: dict[str, Any] = {"prompt_token_ids": [[1]], "response_ids": [[2]], "uids": ["a"]}
FIELDS = (*SCALARS, *ARRAYS)


def refused(row: dict[str, Any]) -> str:
    with pytest.raises(InvalidArgumentError) as refusal:
        from_rows([row], step_wise=False)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("responses", "response_ids"),
        ("completion_ids", "response_ids"),
        ("prompts", "prompt_token_ids"),
        ("response_mask", "loss_mask"),
        ("rewards", "reward"),
        ("data_source", "tag"),
    ],
)
def test_a_row_with_another_name_gets_the_right_one(theirs: str, ours: str) -> None:
    row = {name: value for name, value in ROW.items() if name != ours} | {theirs: ROW.get(ours, "math")}
    assert f"unknown field {theirs}; rename {theirs} to {ours}; expected " in refused(row)


@pytest.mark.parametrize("theirs", ["old_log_probs", "logprobs", "rollout_log_probs", "sampling_per_token_logps"])
def test_log_probabilities_of_the_sampler_have_one_name(theirs: str) -> None:
    assert f"rename {theirs} to rollout_logprobs" in refused(ROW | {theirs: [0.0]})


def test_all_names_of_a_row_are_named_at_once() -> None:
    row = {"uid": "a", "sample": 0, "prompts": [1], "responses": [2], "response_mask": [1], "attention_mask": [1, 1]}
    message = refused(row)
    assert "; omit attention_mask, because the service computes it" in message
    assert (
        "; rename prompts to prompt_token_ids; rename response_mask to loss_mask; rename responses to response_ids"
        in message
    )


def test_prompt_and_response_in_one_are_to_be_cut() -> None:
    assert "split input_ids into prompt_token_ids and response_ids" in refused(ROW | {"input_ids": [1, 2, 3]})


def test_a_file_of_nemo_rls_rollouts_is_refused_with_what_each_name_is_here() -> None:
    """Its log-probabilities and masks are those of all tokens."""
    row = {"uid": "a", "sample": 0, "rewards": 1.0, "advantages": 0.5, "input_lengths": 3, "token_ids": [1, 2, 3]}
    message = refused(row | {"token_loss_mask": [0, 0, 1], "generation_logprobs": [0.0, 0.0, -0.5]})
    assert (
        "; omit advantages, or rename it to advantage for a run with advantage_estimator: none; "
        "rename generation_logprobs to rollout_logprobs, and keep its values of the response; "
        "omit input_lengths, because the service computes it; rename rewards to reward; "
        "split token_ids into prompt_token_ids and response_ids; "
        "rename token_loss_mask to loss_mask, and keep its values of the response; expected" in message
    )


def test_a_field_that_is_there_already_is_not_proposed_again() -> None:
    assert "unknown field responses; expected" in refused(ROW | {"responses": [3]})


def test_many_foreign_names_make_no_long_message() -> None:
    assert renamings([f"logprobs{index}" for index in range(99)], (), FIELDS) == ""
    assert len(renamings(["responses"] * 99, (), FIELDS)) < 400


def test_a_generator_output_has_names_of_its_own() -> None:
    for theirs, ours in (("response_mask", "loss_masks"), ("loss_mask", "loss_masks"), ("scores", "rewards")):
        with pytest.raises(InvalidArgumentError, match=f"unknown key {theirs}; rename {theirs} to {ours}"):
            from_skyrl(OUTPUT | {theirs: [[1]]})
    with pytest.raises(InvalidArgumentError, match=r"response_ids is missing.*; rename responses to response_ids"):
        from_skyrl({"prompt_token_ids": [[1]], "responses": [[2]]})
