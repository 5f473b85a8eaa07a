"""A generation of TRL's as tables is the rows that `from_trl` makes of it, however it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._converters.keys import Choice
from gristmill._converters.trl import TrlOutput
from gristmill._converters.trl_tables import TrlTables
from gristmill._wire.column_spec import ColumnSpec, specs_of
from gristmill._wire.rows import from_rows, to_rows
from gristmill._wire.steps import concat
from gristmill.converters import from_trl
from gristmill.errors import InvalidArgumentError

END = 1
COLUMNS = specs_of(
    [
        {"name": "old_per_token_logps", "dtype": "float32", "scope": "response"},
        {"name": "mm_token_type_ids", "dtype": "int32", "scope": "token"},
        {"name": "difficulty", "dtype": "float64", "scope": "row"},
    ]
)


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Any]:
    """With or without padding, tools, logprobs and columns; widths that none of the others has."""
    rows = draw(st.integers(1, 6))
    drawn = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompts, completions = 4, 7
    is_padded = draw(st.booleans())
    before = drawn.integers(1, prompts + 1, rows) if is_padded else np.full(rows, prompts)
    after = drawn.integers(1, completions + 1, rows) if is_padded else np.full(rows, completions)
    found: dict[str, Any] = {
        "prompt_ids": drawn.integers(0, 9, (rows, prompts)),
        "prompt_mask": (np.arange(prompts) >= prompts - before[:, None]).astype(np.int64),
        "completion_ids": drawn.integers(0, 3, (rows, completions)),
        "completion_mask": (np.arange(completions) < after[:, None]).astype(np.int64),
    }
    if draw(st.booleans()):
        found["tool_mask"] = drawn.integers(0, 2, (rows, completions))
    if draw(st.booleans()):
        found["sampling_per_token_logps"] = drawn.standard_normal((rows, completions)).astype(np.float32)
    if draw(st.booleans()):
        found["old_per_token_logps"] = drawn.standard_normal((rows, completions)).astype(np.float32)
        found["mm_token_type_ids"] = drawn.integers(0, 3, (rows, prompts + completions))
        found["difficulty"] = drawn.random(rows)
    return found


def tables_of(output: dict[str, Any], wanted: list[bool] | None = None, rewards: Any = None) -> TrlTables:
    columns = columns_of(output)
    found = TrlOutput.of(output, Choice(tuple(column.name for column in columns)))
    count = found.padding.rows
    return TrlTables(
        found,
        columns,
        uids=[f"uid-{row // 2}" for row in range(count)],
        samples=np.arange(count, dtype=np.int32) % 2,
        rewards=np.arange(count, dtype=np.float64) / 3 if rewards is None else rewards,
        ends=[END],
        is_wanted=np.array(wanted or [True] * count),
        policy_version=5,
        attempt=2,
    )


def columns_of(output: dict[str, Any]) -> list[ColumnSpec]:
    return [column for column in COLUMNS if column.name in output]


@given(outputs(), st.data())
def test_tables_are_the_rows_of_from_trl_that_are_wanted(output: dict[str, Any], data: st.DataObject) -> None:
    count, columns = len(output["prompt_ids"]), columns_of(output)
    rows = from_trl(
        output,
        uids=[f"uid-{row // 2}" for row in range(count)],
        rewards=np.arange(count) / 3,
        policy_version=5,
        attempt=2,
        columns=[column.name for column in columns],
    )
    for row in rows:
        row["stop_reason"] = "stop" if row["response_ids"][-1] == END else "length"
    wanted = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    most_rows, most_bytes = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 100, 10_000]))
    tables = [*tables_of(output, wanted).tables(most_rows, most_bytes)]
    kept = [row for row, is_wanted in zip(rows, wanted, strict=True) if is_wanted]
    assert [*to_rows(concat(tables), columns)] == [*to_rows(from_rows(kept, columns=columns), columns)]
    assert max(map(len, tables)) <= most_rows


def test_a_message_is_filled() -> None:
    output = {
        "prompt_ids": np.full((10, 100), 5),
        "prompt_mask": np.ones((10, 100), np.int64),
        "completion_ids": np.full((10, 100), 6),
        "completion_mask": np.ones((10, 100), np.int64),
    }
    assert [len(table) for table in tables_of(output).tables(100, 3 * 900)] == [3, 3, 3, 1]
    assert [len(table) for table in tables_of(output).tables(4, 1 << 20)] == [4, 4, 2]


def test_values_that_rows_may_not_have_are_refused_by_name() -> None:
    output = {
        "prompt_ids": np.array([[5, 5], [5, -1]]),
        "prompt_mask": np.ones((2, 2), np.int64),
        "completion_ids": np.array([[6], [7]]),
        "completion_mask": np.ones((2, 1), np.int64),
    }
    with pytest.raises(InvalidArgumentError, match=r"uid 'uid-0' sample 1.*prompt_token_ids\[1\] is -1"):
        [*tables_of(output).tables(10, 1 << 20)]
    output["prompt_ids"] = np.full((2, 2), 5)
    with pytest.raises(InvalidArgumentError, match=r"uid 'uid-0' sample 1.*reward is inf"):
        [*tables_of(output, rewards=np.array([1.0, np.inf])).tables(10, 1 << 20)]
