"""prime-rl's flat token sequences are cut into prompt and response, and their traces are trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gristmill.converters import from_prime_rl
from gristmill.errors import InvalidArgumentError
from tests.client.converters.fields import fields_of
from tests.client.converters.stand_ins import EncodedTensor, RoutedExperts, TrainingSample


def sample(**changes: Any) -> TrainingSample:
    """Two turns with an observation between them."""
    made: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4, 5, 6],
        "mask": [False, False, True, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25, -0.125],
        "temperatures": [0.5] * 6,
        "env_name": "math",
        "advantages": [0.0, 0.0, 1.5, 0.0, 1.5, 1.5],
    }
    return TrainingSample(**(made | changes))


def convert(*traces: Any, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"uids": ["a"] * len(traces), "rewards": [1.0] * len(traces)}
    return from_prime_rl(traces, **(given | options))


def test_all_before_the_first_trained_token_is_the_prompt() -> None:
    (row,) = convert(sample(), policy_version=3)
    assert fields_of([row], "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs") == [
        ([1, 2], [3, 4, 5, 6], [True, False, True, True], [-0.5, 0.0, -0.25, -0.125])
    ]
    assert fields_of([row], "uid", "sample", "step", "is_last_step", "reward", "policy_version") == [
        ("a", 0, 0, True, 1.0, 3)
    ]
    assert "advantage" not in row


def test_traces_are_numbered_in_their_group_and_branches_are_steps() -> None:
    branches = [sample(), sample(mask=[False] * 5 + [True])]
    rows = convert(sample(), branches, sample(), uids=[7, 7, 8], rewards=[0.0, 0.5, 1.0])
    assert fields_of(rows, "uid", "sample", "step", "is_last_step", "reward") == [
        ("7", 0, 0, True, 0.0),
        ("7", 1, 0, False, 0.0),
        ("7", 1, 1, True, 0.5),
        ("8", 0, 0, True, 1.0),
    ]
    assert fields_of(rows, "prompt_token_ids")[2] == [1, 2, 3, 4, 5]


def test_advantages_are_given_on_request() -> None:
    assert fields_of(convert(sample(), advantages=True), "advantage") == [[1.5, 0.0, 1.5, 1.5]]
    with pytest.raises(InvalidArgumentError, match=r"trace 0 .* branch 0: advantages is missing"):
        convert(sample(advantages=None), advantages=True)


def test_streams_are_cut_like_the_response_and_tensors_are_decoded() -> None:
    routes = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2)
    pixels = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = sample(
        ref_logprobs=[0.0, 0.0, -1.0, 0.0, -2.0, -3.0],
        routed_experts=RoutedExperts(routes.tobytes(), [5, 2, 2], "uint8"),
        mm_kwargs={"pixel_values": EncodedTensor("float32", [2, 3], pixels.tobytes())},
        mm_token_type_ids=[0, 1, 0, 0, 0, 0],
    )
    columns = ["ref_logprobs", "routed_experts", "pixel_values", "mm_token_type_ids", "temperatures"]
    (row,) = convert(made, columns=columns)
    assert fields_of([row], "ref_logprobs", "mm_token_type_ids", "temperatures") == [
        ([-1.0, 0.0, -2.0, -3.0], [0, 1, 0, 0, 0, 0], [0.5] * 4)
    ]
    assert row["routed_experts"].tolist() == routes.tolist()
    assert np.array_equal(row["pixel_values"], pixels)


def test_a_token_that_only_a_weight_counts_is_of_the_response_too() -> None:
    (row,) = convert(sample(ce_weights=[0.0, 0.5, 0.0, 0.5, 0.0, 0.0]), columns=["ce_weights"])
    assert fields_of([row], "prompt_token_ids", "loss_mask", "ce_weights") == [
        ([1], [False, True, False, True, True], [0.5, 0.0, 0.5, 0.0, 0.0])
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [False] * 6}, r"trace 0 \(uid 'a' sample 0\) branch 0: the mask trains no token"),
        ({"mask": [True] * 6}, "trains the first token, so there is no prompt"),
        ({"mask": [True] * 5}, "mask has 5 values for 6 tokens"),
        ({"logprobs": None}, "logprobs is missing"),
        ({"ce_weights": [1.0] * 6}, r"ce_weights \(the weight of each token in the cross entropy\) is not a row field"),
        ({"routed_experts": RoutedExperts(b"", [0, 1, 1], "uint8")}, "routed_experts"),
        ({"mm_kwargs": {"pixel_values": EncodedTensor("float32", [0], b"")}}, "unknown key pixel_values"),
        ({"temperatures": [0.5] * 5 + [1.0]}, "temperatures range from 0.5 to 1.0"),
    ],
)
def test_what_is_unclear_or_would_be_lost_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        convert(sample(**changes))


def test_temperatures_that_differ_may_be_ignored() -> None:
    assert len(convert(sample(), sample(temperatures=[1.0] * 6), ignore=["temperatures"])) == 2


def test_tensors_that_numpy_cannot_read_are_refused() -> None:
    made = sample(mm_kwargs={"pixel_values": EncodedTensor("bfloat16", [1], b"\0\0")})
    with pytest.raises(InvalidArgumentError, match="pixel_values is not an array of bfloat16"):
        convert(made, columns=["pixel_values"])


def test_every_trace_needs_a_uid_and_a_reward() -> None:
    with pytest.raises(InvalidArgumentError, match="uids has 1 entries for 2 rows"):
        convert(sample(), sample(), uids=["a"])
    with pytest.raises(InvalidArgumentError, match="rewards has 1 entries for 2 rows"):
        convert(sample(), sample(), rewards=[1.0])
    with pytest.raises(InvalidArgumentError, match="the reward is nan"):
        convert(sample(), rewards=[float("nan")])
