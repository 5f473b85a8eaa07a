"""Rows become columns: what is accepted, and what is refused with the trajectory's name."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import find, given
from hypothesis import strategies as st

from gristmill._wire.codecs.row_codec import decode, encode
from gristmill._wire.columns import Ragged
from gristmill._wire.extras import check_extras
from gristmill._wire.row_fields import TEXT_FIELDS, TextField
from gristmill._wire.rows import from_rows, to_rows
from gristmill._wire.steps import Steps, concat
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rows_pb2
from tests.strategies import LAW, Row, rollouts

ROW = {
    "uid": "math/17",
    "sample": 2,
    "step": 1,
    "is_last_step": True,
    "prompt_token_ids": [1, 2, 3],
    "response_ids": [4, 5],
    "loss_mask": [1, 0],
    "reward": 0.5,
}


def table(*rows: Row, **kwargs: Any) -> Steps:
    return from_rows([{**ROW, **row} for row in rows], **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [1, 0, 1]}, "loss_mask has 3 values, but response_ids has 2"),
        ({"rollout_logprobs": [-1.0]}, "rollout_logprobs has 1 values, but response_ids has 2"),
        ({"reward": [1.0, 2.0, 3.0]}, "reward has 3 values, but response_ids has 2"),
        ({"advantage": [1.0]}, "advantage has 1 values, but response_ids has 2"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"response_ids": [], "loss_mask": []}, "response_ids is empty"),
        ({"prompt_token_ids": [1, -7, 3]}, r"prompt_token_ids\[1\] is -7"),
        ({"response_ids": [4, 2**31]}, rf"response_ids\[1\] is {2**31}"),
        ({"response_ids": np.array([4, -1], np.int32)}, r"response_ids\[1\] is -1"),
        ({"response_ids": [4.5, 5.0]}, "response_ids has float64 values"),
        ({"response_ids": [[4], [5]]}, "response_ids contains lists; pass the token ids of one row"),
        ({"response_ids": "45"}, r"response_ids is a string; pass token ids: tokenizer\(...\).input_ids"),
        ({"loss_mask": [1, 2]}, r"loss_mask\[1\] is 2"),
        ({"loss_mask": [0.5, 1]}, r"loss_mask\[0\] is 0.5"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": [0.0, float("nan")]}, r"reward\[1\] is nan"),
        ({"rollout_logprobs": [-1.0, float("-inf")]}, r"rollout_logprobs\[1\] is -inf"),
        ({"advantage": float("nan")}, "advantage is nan"),
        ({"reward": 1e39}, r"reward is 1e\+39; it must be finite in float32"),
        ({"reward": 10**400}, "reward is inf"),
        ({"reward": [0.0, -1e39]}, r"reward\[1\] is -1e\+39"),
        ({"advantage": 1e39}, r"advantage is 1e\+39"),
        ({"reward_components": [1]}, "reward_components is .*; send a mapping of names to numbers"),
        ({"reward_components": {"a": float("nan")}}, r"reward_components\.a is nan; it must be finite in float32"),
        ({"reward_components": {"a": "1"}}, r"reward_components\.a is '1'; expected a number"),
        ({"reward_components": {1: 1}}, "reward_components has the name 1; name each component by a string"),
        ({"reward_components": {"": 1}}, "reward_components has an empty name; name each component"),
        ({"reward_components": {"a" * 101: 1}}, "the name 'aaaaaaaaaaaaaaaaaaaa'... has 101 characters"),
        ({"reward_components": {str(name): 1 for name in range(65)}}, "has 65 names, and the limit is 64; send fewer"),
        ({"reward_components": {"a": 1}, "is_last_step": False}, "is set, and is_last_step is false; send it with"),
        ({"step_key": "k" * 1001}, "step_key 'k+'... has 1001 characters, .*; shorten it"),
        ({"step_key": 7}, "step_key is 7"),
        ({"agent": "a" * 101}, "agent 'a+'... has 101 characters, .*; shorten it"),
        ({"episode": "e" * 1001}, "episode 'e+'... has 1001 characters, .*; shorten it"),
        ({"partition": "p" * 101}, "partition 'p+'... has 101 characters, .*; shorten it"),
        ({"step_key": "\ud800"}, "step_key is .* not valid Unicode"),
        ({"stop_reason": "\ud800"}, "stop_reason is .* not valid Unicode: surrogates not allowed"),
        ({"reward": "high"}, "reward is 'high'; expected a number"),
        ({"sample": -1}, "sample is -1"),
        ({"sample": 1.5}, "sample is 1.5; expected an integer"),
        ({"step": True}, "step is True; expected an integer"),
        ({"round": 2**31}, "round is 2147483648; it must fit"),
        ({"is_last_step": "yes"}, "is_last_step is 'yes'; expected true or false"),
        ({"uid": 17}, "uid is 17; expected a string"),
        ({"loss_mask": None}, "loss_mask is missing"),
        ({"step": None}, "step is missing"),
        ({"rewards": 1.0}, "unknown field rewards; expected"),
        ({"response_ids": ["a", "b"]}, r"response_ids contains strings; pass token ids: tokenizer\(...\).input_ids"),
        ({"response_ids": np.array([[4, 5]])}, r"response_ids has shape \(1, 2\); pass the token ids of one row"),
        ({"prompt_token_ids": {"input_ids": [1, 2]}}, "prompt_token_ids is a mapping; pass token ids"),
        ({"prompt_token_ids": [{"role": "user"}]}, "prompt_token_ids contains mappings; pass token ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is 5; pass token ids"),
        ({"loss_mask": ["1", "0"]}, "loss_mask contains strings; pass 0 or 1 for each response token"),
        ({"rollout_logprobs": [{7: -0.1}, {8: -0.2}]}, "rollout_logprobs contains mappings; pass the log-probability"),
        ({"reward": ["1", "0"]}, "reward contains strings; pass one number, or one per response token"),
        ({"response_ids": [2**70, 1]}, "response_ids contains numbers that do not fit 64 bits; pass token ids"),
    ],
)
def test_a_wrong_row_is_refused_naming_the_trajectory_the_field_and_the_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        table(change)
    if change.get("uid", "") != 17:
        assert "'math/17'" in str(refusal.value)


def test_a_uid_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"uid is .* not valid Unicode"):
        table({"uid": "bad\ud800"})


def test_an_empty_uid_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="uid is empty"):
        table({"uid": ""})


def test_a_row_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="row 1 is a list; pass a list of dicts, one per row"):
        from_rows([ROW, [1, 2]])  # type: ignore[list-item]


def test_step_and_is_last_step_may_be_absent_without_step_wise() -> None:
    row = {name: value for name, value in ROW.items() if name not in ("step", "is_last_step")}
    steps = from_rows([row], step_wise=False)
    assert (steps.steps[0], steps.is_last_steps[0]) == (0, True)


@pytest.mark.parametrize("name", ["rollout_logprobs", "reward"])
def test_rows_that_mix_having_a_column_and_not_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="set it in all rows, or in none"):
        table({"sample": 0, name: [-1.0, -2.0]}, {"sample": 1})


def test_a_missing_reward_is_pending() -> None:
    steps = table({"reward": None}, {"sample": 1})
    assert steps.rewards_pending.tolist() == [True, False]


def test_a_pending_row_holds_zeros_among_rewards_per_token() -> None:
    steps = table({"reward": None}, {"sample": 1, "reward": [0.5, 0.25]})
    assert steps.token_rewards is not None
    assert [steps.token_rewards[row].tolist() for row in range(2)] == [[0.0, 0.0], [0.5, 0.25]]
    assert steps.rewards.tolist() == [0.0, 0.75]


def test_rewards_per_token_keep_float64_precision_for_their_sum() -> None:
    steps = table({"reward": [0.1, 0.2]})
    assert steps.rewards[0] == 0.1 + 0.2


def test_arrays_of_any_integer_type_are_taken_and_not_modified() -> None:
    tokens = np.array([4, 5], np.uint16)
    steps = table({"response_ids": tokens, "prompt_token_ids": np.array([1], np.int64)})
    assert steps.tokens[0].tolist() == [1, 4, 5]
    assert tokens.tolist() == [4, 5]


@LAW
@given(rollouts())
def test_the_wire_gives_back_what_was_sent(rows: list[Row]) -> None:
    sent = from_rows(rows)
    received = decode(rows_pb2.Rows.FromString(encode(sent).SerializeToString()))
    assert_same(sent, received)


def test_the_wire_gives_back_components_of_rewards() -> None:
    sent = concat([table({}), table({"reward_components": {"b": 1, "a": 0.1}})])
    received = decode(rows_pb2.Rows.FromString(encode(sent).SerializeToString()))
    assert received.reward_components == sent.reward_components == ["", '{"a": 0.1, "b": 1.0}']
    assert [one.get("reward_components") for one in to_rows(received)] == [None, {"a": 0.1, "b": 1.0}]


@pytest.mark.parametrize("field", TEXT_FIELDS, ids=lambda field: field.key)
def test_the_wire_gives_back_the_strings_of_rows(field: TextField) -> None:
    sent = concat([table({}), table({field.key: "hall"})])
    received = decode(rows_pb2.Rows.FromString(encode(sent).SerializeToString()))
    assert getattr(received, field.name) == getattr(sent, field.name) == ["", "hall"]
    assert [one.get(field.key) for one in to_rows(received)] == [None, "hall"]


@LAW
@given(rollouts(), st.randoms())
def test_taking_rows_and_joining_them_again_changes_no_value(rows: list[Row], rng: Random) -> None:
    whole = from_rows(rows)
    cut = rng.randint(0, len(whole))
    parts = [whole.take(np.arange(cut)), whole.take(np.arange(cut, len(whole)))]
    assert_same(whole, concat([part for part in parts if len(part)]))
    order = np.array(rng.sample(range(len(whole)), len(whole)))
    assert_same(whole, whole.take(order).take(np.argsort(order)))
    assert_same(whole.take(order), decode(encode(whole.take(order))))


def assert_same(one: Steps, other: Steps) -> None:
    assert list(one.uids) == list(other.uids)
    assert list(one.stop_reasons) == list(other.stop_reasons)
    assert one.reward_components == other.reward_components
    for name in one.__slots__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, Ragged):
            assert [row.tolist() for row in a.arrays()] == [row.tolist() for row in b.arrays()], name
        elif isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_joining_tables_of_which_one_lacks_logprobs_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"logprobs: .* has them, but .* does not"):
        concat([table({"rollout_logprobs": [-1.0, -1.0]}), table({"sample": 1})])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": b"\0" * 8}, "tokens has 8 bytes, but the rows' lengths need 20"),
        ({"tokens": b""}, "tokens is empty"),
        ({"loss_mask": b"\1"}, "loss_mask has 1 bytes"),
        ({"loss_mask": b"\1\7"}, r"loss_mask\[1\] is 7"),
        ({"rollout_logprobs": b"\0" * 4}, "rollout_logprobs has 4 bytes"),
        ({"token_rewards": b"\0" * 3}, "token_rewards has 3 bytes"),
        ({"samples": [1, 2]}, "samples has 2 entries for 1 rows"),
        ({"prompt_lengths": []}, "prompt_lengths has 0 entries for 1 rows"),
        ({"prompt_lengths": [-1]}, "prompt_lengths has -1"),
        ({"stop_reasons": ["a", "b"]}, "stop_reasons has 2 entries"),
        ({"rewards": []}, "rewards has 0 entries for 1 rows"),
        ({"rewards": [float("nan")]}, "reward is nan"),
        ({"steps": [-1]}, "step is -1"),
    ],
)
def test_a_message_whose_columns_do_not_fit_is_refused_with_both_sizes(change: dict[str, Any], message: str) -> None:
    good = encode(table({}))
    for name, value in change.items():
        good.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, bytes):
            setattr(good, name, value)
        else:
            getattr(good, name).extend(value)
    with pytest.raises(InvalidArgumentError, match=message):
        decode(good)


@pytest.mark.parametrize("counts", [[-1], [0], [1]])
@pytest.mark.parametrize("shape", [[1] * 100, [2**31 - 1] * 4, [0], [-1]])
def test_a_shape_that_no_column_has_is_refused_before_anything_takes_it(shape: list[int], counts: list[int]) -> None:
    message = encode(table({}))
    message.columns.add(name="x", dtype="int32", shape=shape, counts=counts)
    message.column_values.append(bytes(4) if counts == [1] else b"")
    with pytest.raises(InvalidArgumentError, match="column 'x' has values of dtype 'int32' and shape"):
        decode(message)


def test_a_column_that_nobody_declared_is_refused_also_where_no_row_has_it() -> None:
    message = encode(table({}))
    message.columns.add(name="x", dtype="int32", counts=[-1])
    message.column_values.append(b"")
    with pytest.raises(InvalidArgumentError, match=r"uid 'math/17' sample .*: column 'x' is not declared by the run"):
        check_extras(decode(message), ())


_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 4),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


def _one(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Something for a repeated field to hold."""
    if field.name == "reward_components":
        names, numbers = st.text(max_size=3) | st.just("a" * 101), st.floats()
        return st.builds(rows_pb2.RewardComponents, values=st.dictionaries(names, numbers, max_size=3))
    if field.message_type is not None:
        return st.builds(rows_pb2.Column, name=st.text(max_size=3), counts=st.lists(st.integers(-1, 2), max_size=3))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=3)
    return _KINDS.get(field.cpp_type, st.text(max_size=3))


@st.composite
def altered_messages(draw: st.DrawFn) -> rows_pb2.Rows:
    """A good message in which one to three fields hold something else: of another length, or other values."""
    message = encode(from_rows(draw(rollouts(most_prompts=2, max_steps=2))))
    fields = list(rows_pb2.Rows.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3, unique_by=lambda field: field.name)):
        value = getattr(message, field.name)
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and isinstance(value, bytes):
            size = draw(st.sampled_from([len(value), max(0, len(value) - 4), len(value) + 4, 1]))
            setattr(message, field.name, draw(st.binary(min_size=size, max_size=size)))
        elif value or draw(st.booleans()):
            one = _one(field)
            wanted = draw(st.sampled_from([len(message.uids), len(message.uids), len(value) + 1, 1]))
            del value[:]
            value.extend(draw(st.lists(one, min_size=wanted, max_size=wanted)))
    return message


@LAW
@given(altered_messages())
def test_an_altered_message_is_refused_or_is_rows_like_any_other(message: rows_pb2.Rows) -> None:
    with suppress(InvalidArgumentError):
        decoded = decode(rows_pb2.Rows.FromString(message.SerializeToString()))
        assert_same(decoded, decode(encode(decoded)))


@pytest.mark.slow
def test_some_altered_messages_are_refused_and_some_are_not() -> None:
    find(altered_messages(), lambda message: not is_refused(message))
    find(altered_messages(), is_refused)


def is_refused(message: rows_pb2.Rows) -> bool:
    try:
        decode(message)
    except InvalidArgumentError:
        return True
    return False


@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_message_or_refused(data: bytes) -> None:
    with suppress(DecodeError, InvalidArgumentError):
        decode(rows_pb2.Rows.FromString(data))


@LAW
@given(rollouts(), st.integers(0, 12), st.integers(0, 12), st.booleans())
def test_a_part_of_a_table_is_its_rows_in_order(rows: list[Row], first: int, more: int, is_turned: bool) -> None:
    steps = from_rows(rows)
    if is_turned:
        steps = steps.take(np.arange(len(steps))[::-1])
    part = steps.part(slice(first, first + more))
    assert list(to_rows(part)) == list(to_rows(steps.take(np.arange(len(steps))[first : first + more])))
    assert is_turned or part.tokens.is_compact()
