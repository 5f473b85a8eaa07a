"""What an environment of Atropos posts, as rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.environments.atropos.routes import takes_of
from gristmill.environments.atropos.scored_data import CONTEXT, ScoredData, Takes, rows_of
from gristmill.errors import InvalidArgumentError, UnsupportedError

NOTHING_MORE = Takes({}, advantages=False)


def group(**fields: Any) -> ScoredData:
    """One sample: two tokens of prompt, one sampled, one of a tool, one sampled."""
    plain = {"tokens": [[1, 2, 3, 4, 5]], "masks": [[-100, -100, 3, -100, 5]], "scores": [1.0]}
    return msgspec.convert(plain | fields, ScoredData)


def row(takes: Takes = NOTHING_MORE, **fields: Any) -> dict[str, Any]:
    (found,) = rows_of(group(**fields), takes)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def test_the_prompt_ends_where_the_first_token_was_sampled() -> None:
    assert row() == {
        "sample": 0,
        "prompt_token_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "loss_mask": [1, 0, 1],
        "reward": 1.0,
    }


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=2, max_size=20))
def test_a_row_trains_the_tokens_of_the_mask_but_for_the_first_which_nothing_predicts(
    sequence: list[tuple[int, bool]],
) -> None:
    tokens = [token for token, _ in sequence]
    masks = [token if sampled else CONTEXT for token, sampled in sequence]
    found = row(tokens=[tokens], masks=[masks])
    assert found["prompt_token_ids"] + found["response_ids"] == tokens
    assert found["prompt_token_ids"]
    trained = [0] * len(found["prompt_token_ids"]) + found["loss_mask"]
    assert trained == [0] + [int(sampled) for _, sampled in sequence[1:]]


def test_log_probabilities_of_context_are_none() -> None:
    assert row(inference_logprobs=[[1.0, 1.0, -0.5, 1.0, -0.25]])["rollout_logprobs"] == [-0.5, 0.0, -0.25]


def test_advantages_go_to_a_run_that_takes_them() -> None:
    found = row(Takes({}, advantages=True), advantages=[[9.0, 9.0, 0.5, 9.0, -0.5]])
    assert found["advantage"] == [0.5, 0.0, -0.5]


def test_a_sample_without_advantage_is_not_trained_and_keeps_its_score() -> None:
    found = row(overrides=[{"set_advantage_to_zero": True}])
    assert (found["loss_mask"], found["reward"]) == ([0, 0, 0], 1.0)


def test_columns_that_the_run_declares_get_what_was_given_for_them() -> None:
    config = {
        "columns": [
            {"name": "ref_logprobs", "dtype": "float32", "scope": "response"},
            {"name": "distill_token_ids", "dtype": "int32", "scope": "token", "shape": [1]},
            {"name": "temperature", "dtype": "float32", "scope": "row"},
            {"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"},
        ]
    }
    takes = takes_of(config)
    assert takes.columns.keys() == {"ref_logprobs", "distill_token_ids", "temperature"}
    ids = [[[7], [7], [7], [7], [7]]]
    found = row(takes, ref_logprobs=[[0, 0, -1, -2, -3]], distill_token_ids=ids, generation_params={"temperature": 0.5})
    assert (found["ref_logprobs"], found["distill_token_ids"], found["temperature"]) == ([-1, -2, -3], ids[0], 0.5)
    assert row(takes, overrides=[{"temperature": 0.7}])["temperature"] == 0.7
    assert row(takes)["temperature"] == 1.0


def test_what_says_nothing_of_training_is_left_out() -> None:
    extra: dict[str, Any] = {
        "messages": [[{"role": "user", "content": "?"}]],
        "generation_params": {"temperature": 0.5},
    }
    empty: dict[str, Any] = {
        "images": [None],
        "advantages": [],
        "ref_logprobs": [],
        "overrides": [],
        "group_overrides": {},
    }
    assert row(NOTHING_MORE, **extra, **empty, unknown=3) == row()


@pytest.mark.parametrize(
    ("fields", "takes", "message"),
    [
        ({"tokens": [], "masks": [], "scores": []}, NOTHING_MORE, "tokens is empty"),
        ({"scores": [1.0, 2.0]}, NOTHING_MORE, "scores has 2 entries for 1 samples"),
        ({"masks": [[-100]]}, NOTHING_MORE, "sample 0: masks has 1 entries for 5 tokens"),
        ({"masks": [[0, 0, 1, 0, 1]]}, NOTHING_MORE, "masks has 0 at 0, where the token is 1; give the token"),
        ({"tokens": [[1]], "masks": [[1]]}, NOTHING_MORE, "it has 1 tokens"),
        ({"inference_logprobs": [[0.0]]}, NOTHING_MORE, "inference_logprobs has 1 entries for 5 tokens"),
        ({"advantages": [[0.0] * 5]}, NOTHING_MORE, "create it with advantage_estimator: none"),
        ({}, Takes({}, advantages=True), "none were given; create it with another estimator"),
        ({"ref_logprobs": [[0.0] * 5]}, NOTHING_MORE, "create it with the column ref_logprobs"),
        ({"overrides": [{"temperature": 2.0}]}, NOTHING_MORE, "create it with the column temperature"),
    ],
)
def test_what_cannot_be_a_row_is_refused_with_the_remedy(fields: dict[str, Any], takes: Takes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rows_of(group(**fields), takes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": ["data:image/png"]}, "images are not taken"),
        ({"overrides": [{"weight": 2}]}, "overrides has 'weight'"),
        ({"group_overrides": {"weight": 2}}, "group_overrides has 'weight'"),
    ],
)
def test_what_a_row_cannot_hold_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        rows_of(group(**fields), NOTHING_MORE)


def test_a_group_has_one_name_whoever_posts_it_again() -> None:
    assert group().uid("game_0") == group(messages=[]).uid("game_0")
    assert len({group().uid("game_0"), group().uid("game_1"), group(scores=[0.0]).uid("game_0")}) == 3
