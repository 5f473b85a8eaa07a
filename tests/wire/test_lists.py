"""Plain lists become the arrays that NumPy makes of them, and a trajectory's tokens are converted once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire import lists
from gristmill._wire.lists import from_list, joined
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from tests.strategies import LAW, Row, rollouts

UNUSUAL = st.sampled_from([None, "7", 1.5, True, 2**31, -(2**40), 10**400, [1], np.int64(3), np.float32(0.5), 1j])


@given(
    st.sampled_from([np.int32, np.uint8, np.float32, np.float64]),
    st.lists(st.one_of(st.integers(-3, 300), st.floats(width=32), UNUSUAL)),
)
def test_a_list_is_converted_as_numpy_does_or_left_to_who_refuses_by_name(dtype: Any, values: list[Any]) -> None:
    array = from_list(values, np.dtype(dtype))
    if array is not None:
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, np.array(values, dtype))


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.floats(allow_nan=False, width=32)))
def test_plain_lists_are_all_converted(tokens: list[int], numbers: list[float]) -> None:
    assert from_list(tokens, np.dtype(np.int32)) is not None
    assert from_list(numbers, np.dtype(np.float32)) is not None
    assert from_list([token % 2 for token in tokens], np.dtype(np.uint8)) is not None


@given(
    st.sampled_from([np.int32, np.uint8, np.float32, np.float64]),
    st.lists(st.lists(st.one_of(st.integers(0, 255), UNUSUAL), max_size=5), max_size=6),
    st.integers(1, 9),
)
def test_many_lists_are_converted_as_each_of_them_would_be(dtype: Any, rows: list[list[Any]], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_AT_ONCE", at_once)
        array = joined(rows, np.dtype(dtype))
    each = [from_list(row, np.dtype(dtype)) for row in rows]
    if array is None:
        assert any(row is None for row in each)
    else:
        np.testing.assert_array_equal(array, np.concatenate([np.empty(0, dtype), *each]))


def lists_of(row: Row) -> Row:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@LAW
@given(rollouts())
def test_rows_of_lists_are_those_of_arrays(rows: list[Row]) -> None:
    listed = [lists_of(row) for row in rows]
    arrays = [{**row, "prompt_token_ids": np.array(row["prompt_token_ids"], np.int32)} for row in listed]
    at_once = from_rows(listed)
    for index in range(len(listed)):
        expected = from_rows([arrays[index]])
        np.testing.assert_array_equal(at_once.tokens[index], expected.tokens[0])


STEP = {"uid": "a", "sample": 0, "reward": 0.0}


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each conversion of tokens had."""
    counts: list[int] = []
    convert = from_list

    def counting(values: list[Any], dtype: Any) -> Any:
        if dtype == np.int32:
            counts.append(len(values))
        return convert(values, dtype)

    monkeypatch.setattr(lists, "from_list", counting)
    return counts


def step(prompt: list[int], response: list[int], number: int, **fields: Any) -> Row:
    given = {"prompt_token_ids": prompt, "response_ids": response, "loss_mask": [1] * len(response)}
    return {**STEP, **given, "step": number, "is_last_step": False, **fields}


def test_of_a_prompt_that_goes_on_only_what_is_new_is_converted(conversions: list[int]) -> None:
    first, second = [*range(100)], [*range(100), 7, 8, 9]
    table = from_rows([step(first, [7, 8], 0), step(second, [5], 1), step([*second, 5, 6], [4], 2)])
    assert conversions == [100, 1, 1]
    assert [row.tolist() for row in table.tokens.arrays()] == [[*first, 7, 8], [*second, 5], [*second, 5, 6, 4]]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=6)), max_size=5),
)
def test_a_prompt_that_goes_on_from_any_token_of_the_step_before_is_itself(
    prompt: list[int], changes: list[tuple[int, list[int]]]
) -> None:
    rows = [step(prompt, [1, 0], 0)]
    for number, (kept, added) in enumerate(changes, 1):
        before = [*rows[-1]["prompt_token_ids"], *rows[-1]["response_ids"]]
        rows.append(step([*before[:kept], *added] or [1], [2, number], number))
    assert [tokens.tolist() for tokens in from_rows(rows).tokens.arrays()] == [
        row["prompt_token_ids"] + row["response_ids"] for row in rows
    ]


def test_samples_of_one_prompt_convert_it_once(conversions: list[int]) -> None:
    table = from_rows([step([*range(100)], [7], 0, sample=sample) for sample in range(3)])
    assert conversions == [100]
    assert [len(row) for row in table.tokens.arrays()] == [101] * 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 4, "x"], r"prompt_token_ids\[3\] is a string; pass token ids: tokenizer\(...\).input_ids"),
        ([1, 2, 4, -5], r"step 1: prompt_token_ids\[3\] is -5"),
        ([1, 2, 4, 2**31], r"step 1: prompt_token_ids\[3\] is 2147483648"),
        ([1, 2, 4, [5]], r"prompt_token_ids\[3\] is a list; pass"),
    ],
)
def test_bad_tokens_after_known_ones_are_refused_by_name(prompt: list[Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_rows([step([1, 2], [4], 0), step(prompt, [6], 1)])
