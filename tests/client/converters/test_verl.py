"""verl's batches lose their padding and nothing else: recorded ones of verl 0.9.1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill.converters import from_verl
from gristmill.errors import InvalidArgumentError
from tests.client.converters.fields import fields_of, same
from tests.client.converters.recorded import verl_batch, verl_queue

ROUTES = ("routed_experts",)


@pytest.mark.parametrize("kind", [np.array, torch.from_numpy], ids=["arrays", "tensors"])
def test_padding_is_taken_off_on_either_side_and_tokens_of_tools_stay_in_the_response(kind: Any) -> None:
    rows = from_verl(verl_batch(kind), ignore=ROUTES)
    assert fields_of(rows, "prompt_token_ids", "response_ids", "loss_mask") == [
        ([2, 3, 4], [5, 6, 20, 21, 7, 1], [1, 1, 0, 0, 1, 1]),
        ([2, 3, 4], [8, 1], [1, 1]),
        # The token 0 pads, and is one of the response too.
        ([10, 11, 12, 13, 14], [15, 0, 1], [1, 1, 1]),
    ]
    assert fields_of(rows, "rollout_logprobs")[0] == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]


def test_uids_name_groups_samples_are_numbered_as_they_come_and_scores_are_sums() -> None:
    rows = from_verl(verl_batch(), ignore=ROUTES, round=1, attempt=2)
    assert fields_of(rows, "uid", "round", "sample", "attempt", "step", "is_last_step", "policy_version", "reward") == [
        ("a", 1, 0, 2, 0, True, 3, 1.0),
        ("a", 1, 1, 2, 0, True, 3, 0.0),
        ("b", 1, 0, 2, 0, True, 3, 0.25),
    ]
    assert fields_of(
        from_verl(verl_batch(), ignore=ROUTES, uids=[7, 8, 7], policy_version=9), "uid", "policy_version"
    ) == [
        ("7", 9),
        ("8", 9),
        ("7", 9),
    ]


def test_rewards_may_stay_one_a_token() -> None:
    rows = from_verl(verl_batch(), ignore=ROUTES, token_rewards=True)
    assert fields_of(rows, "reward") == [[0, 0, 0, 0, 0, 1.0], [0, 0], [0, 0, 0.25]]


def test_a_batch_that_is_not_scored_yet_has_rewards_that_are_pending() -> None:
    batch = verl_batch()
    del batch.batch["rm_scores"]
    assert fields_of(from_verl(batch, ignore=ROUTES), "reward") == [None] * 3


def test_routed_experts_lack_the_last_token_for_which_verl_makes_up_zeros() -> None:
    rows = from_verl(verl_batch(), columns=ROUTES)
    assert [np.shape(row["routed_experts"]) for row in rows] == [(8, 2, 2), (4, 2, 2), (7, 2, 2)]
    ran = np.arange(4 * 4).reshape(4, 2, 2) % 8
    assert rows[1]["routed_experts"].tolist() == ran.tolist()


def test_columns_are_cut_by_their_width_and_positions_of_several_axes_are_turned() -> None:
    batch = verl_batch()
    batch.batch["position_ids"] = np.tile(np.arange(14), (3, 3, 1))
    batch.batch["weights"] = np.tile(np.arange(8.0), (3, 1))
    batch.batch["task"] = np.array([1, 2, 3])
    rows = from_verl(batch, columns=["position_ids", "weights", "task"], ignore=ROUTES)
    assert fields_of(rows, "position_ids")[1] == [[place] * 3 for place in range(3, 8)]
    assert fields_of(rows, "weights", "task") == [([0, 1, 2, 3, 4, 5], 1), ([0, 1], 2), ([0, 1, 2], 3)]


def test_what_a_reward_function_adds_is_refused_until_it_is_named_and_is_absent_where_it_is_none() -> None:
    batch = verl_batch()
    batch.meta_info["reward_extra_keys"] = ["acc", "pred"]
    batch.non_tensor_batch["acc"] = np.array([1.0, 0.0, 0.5])
    batch.non_tensor_batch["pred"] = np.array([3, None, 4], object)
    batch.non_tensor_batch["data_source"] = np.array(["math", "math", "code"], object)
    with pytest.raises(InvalidArgumentError, match=r"unknown key acc; .*pass columns=\['acc'\], or pass ignore"):
        from_verl(batch, ignore=ROUTES)
    rows = from_verl(batch, columns=["acc", "pred"], ignore=ROUTES)
    assert fields_of(rows, "acc", "pred") == [(1.0, 3), (0.0, None), (0.5, 4)]
    assert ["pred" in row for row in rows] == [True, False, True]
    assert not any({"acc", "data_source"} & row.keys() for row in from_verl(batch, ignore=[*ROUTES, "acc", "pred"]))
    batch.non_tensor_batch["difficulty"] = np.array([1, 2, 3])
    assert fields_of(from_verl(batch, columns=["difficulty"], ignore=[*ROUTES, "acc", "pred"]), "difficulty") == [
        1,
        2,
        3,
    ]


def test_numbers_are_read_from_arrays_of_objects_and_text_is_no_column() -> None:
    batch = verl_batch()
    batch.non_tensor_batch["turn_scores"] = np.array([[0, 1], [1, 1], [1, 0]], object)
    rows = from_verl(batch, columns=["turn_scores"], ignore=ROUTES)
    assert [row["turn_scores"].tolist() for row in rows] == [[0, 1], [1, 1], [1, 0]]
    batch.non_tensor_batch["data_source"] = np.array(["math", "math", "code"], object)
    with pytest.raises(InvalidArgumentError, match=r"row 0 .*: data_source is not an array of numbers; pass numbers"):
        from_verl(batch, columns=["data_source"], ignore=ROUTES)


def test_images_are_columns_of_the_rows_that_have_them() -> None:
    batch = verl_batch()
    batch.non_tensor_batch["multi_modal_inputs"][0] = {"pixel_values": torch.ones(2, 3)}
    rows = from_verl(batch, columns=["pixel_values"], ignore=ROUTES)
    assert ["pixel_values" in row for row in rows] == [True, False, False]
    assert rows[0]["pixel_values"].shape == (2, 3)
    with pytest.raises(InvalidArgumentError, match=r"unknown key pixel_values; .*pass columns=\['pixel_values'\], or"):
        from_verl(batch, ignore=ROUTES)
    assert len(from_verl(batch, ignore=[*ROUTES, "multi_modal_inputs"])) == 3


def test_rows_of_the_queue_are_steps_of_their_sessions_in_the_order_of_their_keys() -> None:
    keys, queue = verl_queue()
    rows = from_verl(queue, keys=keys, columns=ROUTES)
    assert fields_of(rows, "uid", "sample", "step", "is_last_step", "reward", "policy_version") == [
        ("a", 0, 0, True, 0.0, 3),
        ("a", 1, 0, False, 0.0, 3),
        ("a", 1, 1, True, 0.5, 3),
    ]
    assert fields_of(rows, "prompt_token_ids", "response_ids")[2] == ([2, 3, 4], [5, 6, 20, 21, 7, 1])
    assert [len(row["routed_experts"]) for row in rows] == [4, 7, 8]


def test_rows_of_the_queue_without_keys_are_a_session_each() -> None:
    _, queue = verl_queue()
    with pytest.raises(InvalidArgumentError, match=r"row 2 is of uid 'a' session 1, like an earlier.* pass the keys"):
        from_verl(queue, ignore=ROUTES)
    queue["session_id"] = [1, 0, 2]
    assert fields_of(from_verl(queue, ignore=ROUTES), "sample") == [1, 0, 2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a_1_2", "a_0_0", "a_1_0"], r"the outputs \[0, 2\] of uid 'a' session 1"),
        (["a_1_1", "a_0_0", "a"], "keys has 'a'; expected UID_SESSION_INDEX"),
        (["a_0_0"], "keys has 1 entries for 3 rows"),
    ],
)
def test_keys_that_do_not_number_whole_trajectories_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_verl(verl_queue()[1], keys=keys, ignore=ROUTES)


def test_steps_of_one_session_with_different_rewards_are_refused() -> None:
    keys, queue = verl_queue()
    scores = [torch.tensor(row) for row in ([0.0] * 5 + [0.5], [0.0, 0.0], [0.0, 0.0, 1.0])]
    queue["rm_scores"] = torch.nested.nested_tensor(scores, layout=torch.jagged)
    with pytest.raises(InvalidArgumentError, match="uid 'a' sample 1: its 2 rows have the rewards"):
        from_verl(queue, keys=keys, ignore=ROUTES)


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.integers(0, 3))
def test_padding_and_converting_gives_the_rows_back(rows: list[Any], spare: int) -> None:
    """Whatever token pads, and however wide."""
    widths = [max(len(row[part]) for row in rows) + spare for part in (0, 1)]
    names = ("prompts", "responses", "response_mask", "attention_mask")
    batch = {
        name: np.zeros((len(rows), sum(widths) if name == names[3] else widths[name != names[0]]), int)
        for name in names
    }
    for row, (prompt, response) in enumerate(rows):
        batch["prompts"][row, widths[0] - len(prompt) :] = prompt
        batch["responses"][row, : len(response)] = [token for token, _ in response]
        batch["response_mask"][row, : len(response)] = [mask for _, mask in response]
        batch["attention_mask"][row, widths[0] - len(prompt) : widths[0] + len(response)] = 1
    converted = fields_of(from_verl(batch, uids=["a"] * len(rows)), "prompt_token_ids", "response_ids", "loss_mask")
    assert converted == [(prompt, *map(list, zip(*response, strict=True))) for prompt, response in rows]


def broken(name: str, row: int, column: int, value: float) -> Any:
    batch = verl_batch()
    batch.batch[name][row, column] = value
    return batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (broken("attention_mask", 1, 4, 0), "row 1: attention_mask has zeros between tokens"),
        (broken("attention_mask", 2, 12, 1), "row 2: attention_mask has zeros between tokens"),
        (broken("attention_mask", 0, 2, 1), None),
        (broken("response_mask", 1, 5, 1), r"row 1 \(uid 'a' sample 1\): response_mask is not 0 on padding"),
        (broken("rm_scores", 2, 7, 1.0), r"row 2 \(uid 'b' sample 0\): rm_scores is not 0 on padding"),
    ],
)
def test_padding_that_is_not_where_verl_has_it_is_refused_by_row(batch: Any, message: str | None) -> None:
    if message is None:
        assert len(from_verl(batch, ignore=ROUTES)[0]["prompt_token_ids"]) == 4
        return
    with pytest.raises(InvalidArgumentError, match=message):
        from_verl(batch, ignore=ROUTES)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("responses", None, "responses is missing"),
        ("attention_mask", None, "attention_mask is missing"),
        ("attention_mask", np.ones((3, 13)), r"attention_mask has shape \(3, 13\); expected \(3, 14\)"),
        ("rm_scores", np.ones((3, 14)), r"rm_scores has shape \(3, 14\); expected \(3, 8\)"),
        ("token_level_scores", np.zeros((3, 8)), "rm_scores and token_level_scores differ"),
        (
            "surprise",
            np.zeros((3, 8)),
            r"unknown key surprise; .*columns=\['surprise'\], or pass ignore=\['surprise'\]",
        ),
        ("teacher_ids", np.zeros((3, 14)), r"teacher_ids \(the teacher's most likely tokens\) is not a row field"),
        ("position_ids", np.zeros((3, 3, 14)), "position_ids has several axes"),
    ],
)
def test_what_is_missing_or_not_known_is_refused_by_name(name: str, values: Any, message: str) -> None:
    batch = verl_batch()
    batch.batch[name] = values
    if values is None:
        del batch.batch[name]
    with pytest.raises(InvalidArgumentError, match=message):
        from_verl(batch, ignore=ROUTES)


def test_a_batch_without_uids_or_with_unknown_columns_is_refused() -> None:
    batch = verl_batch()
    with pytest.raises(InvalidArgumentError, match="columns contains nothing, which the data lacks"):
        from_verl(batch, columns=["nothing"], ignore=ROUTES)
    with pytest.raises(InvalidArgumentError, match="columns contains responses, which is a field of rows"):
        from_verl(batch, columns=["responses"], ignore=ROUTES)
    with pytest.raises(InvalidArgumentError, match="columns is the string 'x'"):
        from_verl(batch, columns="x")
    with pytest.raises(InvalidArgumentError, match="uid has 1 entries for 3 rows"):
        from_verl(batch, uids=["a"], ignore=ROUTES)
    unnamed: list[Any] = [0.5, "a", "b"]
    with pytest.raises(InvalidArgumentError, match=r"row 0: the group's uid is 0.5"):
        from_verl(batch, uids=unnamed, ignore=ROUTES)
    del batch.non_tensor_batch["uid"]
    with pytest.raises(InvalidArgumentError, match="uid is missing"):
        from_verl(batch, ignore=ROUTES)
    with pytest.raises(InvalidArgumentError, match="got int; expected a DataProto"):
        from_verl(3)


def test_the_batch_is_not_changed() -> None:
    batch, untouched = verl_batch(), verl_batch()
    from_verl(batch, columns=ROUTES)
    assert same([batch.batch], [untouched.batch])
