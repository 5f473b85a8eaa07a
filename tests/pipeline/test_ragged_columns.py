"""Columns with any number of values per token, such as sampling masks: each list is on its own token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from gristmill._wire.column_spec import specs_of
from gristmill._wire.extras import check_extras
from gristmill._wire.rows import from_rows, to_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.rows import make_config
from tests.strategies import Row

MASK: dict[str, Any] = {"name": "mask", "dtype": "int32", "scope": "response", "shape": [None]}
CONFIG: dict[str, Any] = make_config(merge="prefix", columns=[MASK])
COMMON: Row = {"uid": "a", "sample": 0, "reward": 0.0}
ONE_STEP: Row = COMMON | {"step": 0, "is_last_step": True, "prompt_token_ids": [1]}
ONE_STEP |= {"response_ids": [2, 3, 4], "loss_mask": [1, 1, 1]}


def turns(*lists: Any, **more: Any) -> list[Row]:
    """Turns 1 | 3 4, then 1 3 4 2 | 5, and so on: the prompts begin with an observation, 2, after the turn before."""
    rows, prompt = list[Row](), [1]
    for step, of_step in enumerate(lists):
        response = [3, 4] if step == 0 else [4 + step]
        row = {"step": step, "is_last_step": step == len(lists) - 1, "prompt_token_ids": prompt, "mask": of_step}
        rows.append({**COMMON, **row, "response_ids": response, "loss_mask": [1] * len(response), **more})
        prompt = [*prompt, *response, 2]
    return rows


def built(rows: list[Row], column: dict[str, Any] = MASK, **settings: Any) -> BuiltBatch:
    config = {**CONFIG, "micro_batch": {"max_tokens": 64}, **settings, "columns": [column]}
    specs = specs_of([column])
    table = check_extras(from_rows(rows, columns=specs), specs)
    return build_batch(table, parse_config(config), run="r", batch=0)


def lists_of(batch: BuiltBatch, name: str = "mask") -> list[list[Any]]:
    """The list of each cell of the only block."""
    [shard] = batch.shards
    tensors, _ = naive.read_shard(shard)
    prefix = "" if "sequences" in tensors else "micro_batch_000/"
    values, offsets = tensors[f"{prefix}{name}"], tensors[f"{prefix}{name}_offsets"]
    assert offsets.dtype == np.int64
    assert len(values) == offsets[-1]
    return [values[begin:end].tolist() for begin, end in pairwise(offsets)]


@pytest.mark.parametrize("layout", ["left_padded", "packed", "prefix_tree"])
def test_every_sampled_token_has_the_mask_with_which_it_was_sampled(layout: str) -> None:
    batch = built(turns([[3, 9], [4]], [[5, 6, 7]]), layout=layout)
    of_response = [[3, 9], [4], [], [5, 6, 7]]
    assert lists_of(batch) == (of_response if layout == "left_padded" else [[], *of_response])


def test_cells_of_padding_and_of_prompts_have_no_values() -> None:
    rows = [*turns([[3], []]), *(row | {"sample": 1} for row in turns([[7, 8], [9]], [[5]]))]
    settings: dict[str, Any] = {"n_samples_per_prompt": 2, "pad_to_multiple_of": 4}
    assert lists_of(built(rows, **settings)) == [[], [], [3], [], [7, 8], [9], [], [5]]
    packed = lists_of(built(rows, **settings, layout="packed"))
    assert packed == [[], [3], [], [], [7, 8], [9], [], [5]]


def test_rows_of_a_tree_have_a_shared_token_s_list_once() -> None:
    column, values = MASK | {"scope": "token"}, [[[7, 7], [0], [], [2]], [[8], [1], [1, 1], [2]]]
    rows = [{**ONE_STEP, "sample": sample, "mask": of_sample} for sample, of_sample in enumerate(values)]
    batch = built(rows, column, layout="prefix_tree", n_samples_per_prompt=2)
    assert lists_of(batch) == [[7, 7], [0], [], [2], [1], [1, 1], [2]]


@pytest.mark.parametrize(
    ("merge", "expected"), [("first", [[1], [], [8], [5], [6]]), ("last", [[1], [3], [8], [5], [6]])]
)
def test_a_token_of_the_whole_sequence_has_the_list_of_the_first_or_last_step_that_gave_it_one(
    merge: str, expected: list[list[int]]
) -> None:
    """An empty list is a list."""
    column = MASK | {"scope": "token", "partial": True, "merge": merge}
    first, second = turns([[1], []], [[3], [8], [5], [6]])
    second |= {"mask_start": 1}
    assert lists_of(built([first, second], column)) == expected


@pytest.mark.parametrize(
    ("second", "rows"), [([[1], [3, 4], [], [2], []], 1), ([[1], [3], [4], [2], []], 2), ([[1], [3, 5], [], [], []], 2)]
)
def test_steps_whose_lists_differ_stay_apart_where_they_have_to_be_equal(second: Any, rows: int) -> None:
    batch = built(turns([[1], [3, 4], []], second), MASK | {"scope": "token", "merge": "equal"})
    assert batch.plan.rows == rows
    assert [mismatch.column for mismatch in batch.plan.merge_mismatches] == ["mask"] * (rows - 1)


@pytest.mark.parametrize(
    "values",
    [
        {"mask": [[7], [], [8, 9]]},
        {"mask": [torch.tensor([7]), np.array([], np.int64), [8, 9]]},
        {"mask": np.array([7, 8, 9]), "mask_offsets": torch.tensor([0, 1, 1, 3])},
        {"mask": [7, 8, 9], "mask_offsets": [0, 1, 1, 3]},
    ],
)
def test_lists_are_given_one_by_one_or_as_values_and_offsets(values: Row) -> None:
    specs = specs_of([MASK])
    table = check_extras(from_rows([ONE_STEP | values], columns=specs), specs)
    [row] = to_rows(table, specs)
    assert row["mask"] == [[7], [], [8, 9]]
    assert "mask_offsets" not in row


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "column 'mask' is missing; every row needs it"),
        (
            {"mask": [7, 8, 9]},
            "mask is not a list of lists; pass one list per token, or all values in one list and mask_o",
        ),
        (
            {"mask": [[7], [8]]},
            "mask has values of 2 tokens, but the step has 3 response tokens; send one list per token",
        ),
        ({"mask": [[7], [8], ["x"]]}, "mask is not an array of numbers"),
        ({"mask": [[7], [8], [2**40]]}, "dtype int32 has the range"),
        ({"mask": [7], "mask_offsets": [0, 1, 1]}, "mask has values of 2 tokens, but the step has 3"),
        *(
            (
                {"mask": [7], "mask_offsets": offsets},
                "mask_offsets does not split the 1 values of mask by token; send the index where each token's",
            )
            for offsets in ([0, 1, 1, 2], [1, 1, 1, 1], [0, 1, 0, 1], [0, 2**63 - 1, -2, 1], [])
        ),
    ],
)
def test_lists_that_are_not_as_declared_are_refused(values: Row, message: str) -> None:
    specs = specs_of([MASK])
    with pytest.raises(InvalidArgumentError, match=f"^(uid 'a' sample 0 step 0: )?.*{message}"):
        check_extras(from_rows([ONE_STEP | values], columns=specs), specs)


def test_offsets_without_values_and_values_beyond_the_tokens_are_refused() -> None:
    optional, partial = specs_of([MASK | {"required": False}]), specs_of([MASK | {"partial": True}])
    with pytest.raises(InvalidArgumentError, match="mask_offsets was sent without mask; send both, or mask as one"):
        check_extras(from_rows([ONE_STEP | {"mask_offsets": [0]}], columns=optional), optional)
    late = ONE_STEP | {"mask": [[7], [8]], "mask_start": 2}
    with pytest.raises(InvalidArgumentError, match=r"mask has 2 values from index 2 \(mask_start\), but .* 3"):
        check_extras(from_rows([late], columns=partial), partial)
