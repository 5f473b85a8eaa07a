"""Declared columns: every value is on its own token, row or item, whatever merging, layout and ranks are."""

from __future__ import annotations

import resource
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from gristmill._wire.column_spec import ColumnSpec, from_bfloat16, specs_of
from gristmill._wire.columns import Ragged
from gristmill._wire.extras import check_extras, made_whole
from gristmill._wire.rows import from_rows, to_rows
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.layout import extra_columns
from gristmill_service.storage import row_tables
from tests import naive
from tests.rows import make_config
from tests.strategies import LAW, Row, batches_with_columns


def built(steps: Steps, config: dict[str, Any]) -> BuiltBatch:
    return build_batch(steps, parse_config(config), run="r", batch=0)


def numbers(array: Any) -> Any:
    array = np.asarray(array)
    return from_bfloat16(array) if array.dtype == np.uint16 else array


@LAW
@given(batches_with_columns())
def test_rows_with_columns_outlast_files_and_stores(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    specs = specs_of(config["columns"])
    table = from_rows(rows, columns=specs)
    again = from_rows(list(to_rows(table, specs)), columns=specs)
    encoded = row_tables.encode(table)
    stored = row_tables.decode(memoryview(b"".join(encoded.buffers)))
    assert list(to_rows(again, specs)) == list(to_rows(table, specs)) == list(to_rows(stored, specs))


def without_prefixes(table: Steps, specs: tuple[ColumnSpec, ...]) -> Steps:
    """The rows as they are stored when later steps omit what the step before has."""
    extras = dict(table.extras)
    for spec in specs:
        if spec.is_shared and spec.name in extras:
            extra = extras[spec.name]
            counts = []
            for row in range(len(table)):
                same = row and table.key(row) == table.key(row - 1) and extra.given[row - 1 : row + 1].all()
                before = table.tokens[row - 1] if same else np.empty(0, np.int32)
                prompt = table.tokens[row][: table.prompt_lengths[row]]
                is_whole = len(before) and np.array_equal(prompt[: len(before)], before)
                counts.append(len(before) if is_whole else 0)
            arrays = [values[count:] for values, count in zip(extra.values.arrays(), counts, strict=True)]
            extras[spec.name] = Extra(Ragged.from_arrays(arrays, spec.storage), extra.given)
    return replace(table, extras=extras)


@LAW
@given(batches_with_columns())
def test_values_that_stand_with_the_step_before_are_laid_out_as_if_each_step_had_them(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    """So far as each token has one value in the whole trajectory."""
    rows, config = drawn
    specs = specs_of(config["columns"])
    for row in rows:
        length = len(row["prompt_token_ids"]) + len(row["response_ids"])
        for spec in specs:
            if spec.is_shared and spec.name in row:
                values = np.arange(length) % (2 if spec.dtype == "bool" else 100)
                row[spec.name] = np.broadcast_to(
                    values.reshape(-1, *(1 for _ in spec.shape)), (length, *spec.value_shape)
                )
                row[spec.name] = row[spec.name].tolist()
    whole = from_rows(rows, columns=specs)
    held = without_prefixes(whole, specs)
    one, other = built(whole, config), built(held, config)
    assert [naive.shard_bytes(shard) for shard in one.shards] == [naive.shard_bytes(shard) for shard in other.shards]
    assert list(to_rows(made_whole(held, specs), specs)) == list(to_rows(whole, specs))


@LAW
@given(batches_with_columns())
def test_large_values_of_rows_are_laid_out_as_small_ones_are(drawn: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = drawn
    table = from_rows(rows, columns=specs_of(config["columns"]))
    small = built(table, config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(extra_columns, "_GATHERED_BYTES", 0)
        large = built(table, config)
        assert [naive.shard_bytes(shard) for shard in small.shards] == [
            naive.shard_bytes(shard) for shard in large.shards
        ]


def test_large_values_that_no_row_has_take_no_memory() -> None:
    columns = [
        {"name": "image", "dtype": "uint8", "scope": "row", "shape": [1 << 24], "fill": 7, "required": False},
        {"name": "states", "dtype": "float16", "scope": "token", "shape": [1 << 15], "required": False},
    ]
    config = CONFIG | {"train_batch_size": 64, "policy_mini_batch_size": 64, "merge": "none", "columns": columns}
    one = {"step": 0, "is_last_step": True, "prompt_token_ids": [1], "reward": 1.0}
    lengths = {uid: 20_000 if not uid else 1 for uid in range(64)}
    rows = [
        {**one, "uid": str(uid), "sample": 0, "response_ids": [2] * count, "loss_mask": [1] * count}
        for uid, count in lengths.items()
    ]
    table = from_rows(rows, columns=specs_of(columns))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch = built(table, config | {"micro_batch": {"size": 64}})
    assert sum(shard.size for shard in batch.shards) > 70 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


TWO_STEPS: list[Row] = [
    {"step": 0, "is_last_step": False, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 0.0},
    {"step": 1, "is_last_step": True, "prompt_token_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "reward": 1.0},
]
CONFIG: dict[str, Any] = make_config(merge="prefix")


def two_steps(*values: Any) -> list[Row]:
    return [{"uid": "a", "sample": 0, **row, "x": one} for row, one in zip(TWO_STEPS, values, strict=True)]


@pytest.mark.parametrize(
    ("scope", "same", "other"),
    [
        ("row", (1, 1), (1, 2)),
        ("token", ([1, 2], [1, 2, 9]), ([1, 2], [1, 3, 9])),
        ("items", ([5], [5, 6]), ([5], [6, 5])),
    ],
)
def test_steps_that_differ_in_a_column_of_equal_merge_stay_apart(scope: str, same: Any, other: Any) -> None:
    config = CONFIG | {"columns": [{"name": "x", "dtype": "int32", "scope": scope, "merge": "equal"}]}
    specs = specs_of(config["columns"])
    assert built(from_rows(two_steps(*same), columns=specs), config).plan.rows == 1
    apart = built(from_rows(two_steps(*other), columns=specs), config).plan
    assert apart.rows == 2
    assert [(mismatch.step, mismatch.index, mismatch.column) for mismatch in apart.merge_mismatches] == [(1, 2, "x")]


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [([1], [3, 9], [[1, 3, 9]]), ([1, 2], [], [[1, 2, -1]]), ([1, 2], [2, 9], [[1, 2, 9]]), ([1, 2], [3, 9], None)],
)
def test_only_tokens_for_which_both_steps_gave_a_value_have_to_be_equal(
    first: list[int], second: list[int], values: list[list[int]] | None
) -> None:
    config = CONFIG | {"columns": [{"name": "x", "dtype": "int32", "scope": "token", "merge": "equal"}]}
    config["columns"][0] |= {"partial": True, "fill": -1}
    steps = two_steps(first, second)
    steps[1]["x_start"] = 1
    batch = built(from_rows(steps, columns=specs_of(config["columns"])), config)
    assert batch.plan.rows == (2 if values is None else 1)
    assert values is None or naive.read_shard(batch.shards[0])[0]["x"].tolist() == values


LAYOUTS = ("left_padded", "packed", "prefix_tree")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("merge", ["none", "prefix", "tree"])
@pytest.mark.parametrize("rule", ["first", "last"])
def test_no_token_of_a_trajectory_has_a_route_that_its_engine_did_not_give(layout: str, merge: str, rule: str) -> None:
    """The engine's route of a token is the token; it gives none for the last token that it sampled (NeMo-RL #3485)."""
    column = {"name": "x", "dtype": "int16", "scope": "token", "partial": True, "fill": -1, "merge": rule}
    config = CONFIG | {"merge": merge, "layout": layout, "columns": [column], "micro_batch": {"max_tokens": 64}}
    rows = three_steps([1], [1, 3, 8], [1, 3, 8, 4, 9])
    for row in rows:
        row["x"] = [*row["prompt_token_ids"], *row["response_ids"]][:-1]
    batch = built(from_rows(rows, columns=specs_of([column])), config)
    (shard,) = batch.shards
    tensors, _ = naive.read_shard(shard)
    prefix = "" if layout == "left_padded" else "micro_batch_000/"
    tokens, routes = tensors[f"{prefix}sequences"], tensors[f"{prefix}x"]
    has_no_route = routes != tokens
    assert (routes[has_no_route] == -1).all()
    is_own = tensors["attention_mask"] == 1 if layout == "left_padded" else np.ones_like(tokens, np.bool_)
    assert tokens[has_no_route & is_own].tolist() == ([3, 4, 5] if merge == "none" else [5])
    pieces = tensors[f"{prefix}x_pieces"]
    changes = (
        np.flatnonzero(np.diff(~has_no_route.ravel(), prepend=False, append=False)).reshape(-1, 2) * routes.itemsize
    )
    assert pieces.tolist() == [[-1, begin, end - begin, begin] for begin, end in changes.tolist()]


def test_of_a_response_the_kept_tokens_that_a_step_gave_have_values_and_observations_have_none() -> None:
    column = {"name": "x", "dtype": "int16", "scope": "response", "shape": [2], "partial": True, "fill": 7}
    rows = [
        {"uid": "a", "sample": 0, "step": 0, "is_last_step": False, "prompt_token_ids": [1], "reward": 0.0}
        | {"response_ids": [2, 3, 4], "loss_mask": [1, 1, 1], "x": [[5, 6]], "x_start": 1},
        {"uid": "a", "sample": 0, "step": 1, "is_last_step": True, "prompt_token_ids": [1, 2, 3, 4, 8], "reward": 0.0}
        | {"response_ids": [9, 10], "loss_mask": [1, 1], "x": [[7, 7]]},
    ]
    (shard,) = built(from_rows(rows, columns=specs_of([column])), CONFIG | {"columns": [column]}).shards
    tensors, _ = naive.read_shard(shard)
    assert tensors["x"].tolist() == [[[7, 7], [5, 6], [7, 7], [7, 7], [7, 7], [7, 7]]]
    assert tensors["x_pieces"].tolist() == [[-1, 4, 4, 4], [-1, 16, 4, 16]]


@pytest.mark.parametrize("merge", ["none", "prefix", "tree"])
@pytest.mark.parametrize("ragged", [False, True])
def test_in_a_fork_routes_of_a_cached_prefix_are_those_of_the_step_that_has_it(merge: str, ragged: bool) -> None:
    """The engine omits the experts of the three tokens that it cached of the first step (vLLM #57966); a later step of
    other tokens, which begin alike only up to the second, gives none for the third."""
    column = {"name": "x", "dtype": "int16", "scope": "token", "partial": True, "fill": 0 if ragged else -1}
    column |= {"shape": [None]} if ragged else {}
    rows = three_steps([11, 12, 13, 14], [11, 12, 13, 20, 21], [11, 12, 99, 22])
    for row, start in zip(rows, (0, 3, 3), strict=True):
        routes = [100 + token for token in [*row["prompt_token_ids"], *row["response_ids"]]][start:-1]
        row |= {"x": [[route] for route in routes] if ragged else routes, "x_start": start}
    config = CONFIG | {"merge": merge, "columns": [column], "layout": "packed", "micro_batch": {"max_tokens": 99}}
    (shard,) = built(from_rows(rows, columns=specs_of([column])), config).shards
    tensors, _ = naive.read_shard(shard)
    values = tensors["micro_batch_000/x"].tolist()
    if ragged:
        offsets = tensors["micro_batch_000/x_offsets"].tolist()
        values = [(values[begin:end] or [-1])[0] for begin, end in pairwise(offsets)]
    first, second, third = [111, 112, 113, 114, -1], [111, 112, 113, 120, 121, -1], [111, 112, -1, 122, -1]
    assert values == [*first, *second, *third]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_whose_values_are_the_same_nan_merge(dtype: str) -> None:
    column = {"name": "x", "dtype": dtype, "scope": "token", "merge": "equal", "allow_nonfinite": True}
    values = [np.nan, 1.0], [np.nan, 1.0, np.nan]
    table = from_rows(two_steps(*values), columns=specs_of([column]))
    assert built(table, CONFIG | {"columns": [column]}).plan.rows == 1


def three_steps(*prompts: list[int]) -> list[Row]:
    """Steps whose responses are 3, 4 and so on."""
    return [
        {"uid": "a", "sample": 0, "step": step, "is_last_step": step == len(prompts) - 1, "prompt_token_ids": prompt}
        | {"response_ids": [3 + step], "loss_mask": [1], "reward": 0.0}
        for step, prompt in enumerate(prompts)
    ]


def test_in_a_tree_a_step_joins_the_next_best_that_no_column_keeps_apart() -> None:
    config = CONFIG | {"merge": "tree", "columns": [{"name": "x", "dtype": "int8", "scope": "row", "merge": "equal"}]}
    specs = specs_of(config["columns"])
    rows = three_steps([1], [1, 3], [1, 3, 4])
    for values, paths in [((7, 7, 7), [[0, 1, 2]]), ((7, 8, 7), [[0, 2], [1]]), ((7, 7, 8), [[0, 1], [2]])]:
        with_x = [row | {"x": value} for row, value in zip(rows, values, strict=True)]
        batch = built(from_rows(with_x, columns=specs), config)
        assert batch.plan.steps == paths
        assert {mismatch.column for mismatch in batch.plan.merge_mismatches} <= {"x"}
        mismatches = batch.stats().mismatches
        assert (mismatches.get("column", 0), mismatches.get("further", 0)) == (len(batch.plan.merge_mismatches), 0)


def test_of_a_tail_that_was_retokenized_no_value_of_a_column_has_to_be_equal() -> None:
    config = CONFIG | {"retokenized_tail": 1, "columns": [{"name": "x", "dtype": "int8", "scope": "token"}]}
    config["columns"][0]["merge"] = "equal"
    specs = specs_of(config["columns"])
    rows = three_steps([1], [1, 9])
    for values, count in [([[5, 6], [5, 7, 8]], 1), ([[5, 6], [4, 6, 8]], 2)]:
        with_x = [row | {"x": value} for row, value in zip(rows, values, strict=True)]
        assert built(from_rows(with_x, columns=specs), config).plan.rows == count


def test_a_step_of_which_nothing_stands_may_have_its_values_with_the_step_before() -> None:
    config = CONFIG | {"retokenized_tail": 2, "columns": [{"name": "x", "dtype": "int8", "scope": "token"}]}
    specs = specs_of(config["columns"])
    # The last prompt replaces the whole response of the step before, and the end of what that was given.
    rows = three_steps([1], [1, 3], [1, 9])
    values = [[1, 2], [1, 2, 3], [7, 8, 9]]
    whole = from_rows([row | {"x": value} for row, value in zip(rows, values, strict=True)], columns=specs)
    remaining = [np.array(value, np.int8) for value in (values[0], values[1][2:], values[2])]
    held = replace(whole, extras={"x": Extra(Ragged.from_arrays(remaining, np.int8), whole.extras["x"].given)})
    for table in (whole, held):
        batch = built(table, config)
        assert batch.plan.rows == 1
        assert naive.read_shard(batch.shards[0])[0]["x"].tolist() == [[1, 8, 9]]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ({"dtype": "int16", "scope": "token"}, [1, 2, 3], r"uid 'a' sample 0 step 0: x has 3 values; send 2"),
        ({"dtype": "int16", "scope": "response"}, [1, 2], r"x has 2 values; send 1, one per response token"),
        (
            {"dtype": "int16", "scope": "token", "shape": [2]},
            [1, 2],
            r"x has values of shape \[\], .* shape \[2\] for each",
        ),
        (
            {"dtype": "int8", "scope": "row"},
            200,
            r"x\[0\] is 200, .* int8 has the range -128..127; declare dtype uint8",
        ),
        (
            {"dtype": "uint8", "scope": "token", "shape": [1, 2]},
            np.array([[[3, 255]], [[0, 256]]], np.int32),
            r"x\[1, 0, 1\] is 256, but the column's dtype uint8 has the range 0..255; declare dtype int16",
        ),
        ({"dtype": "int8", "scope": "row"}, 0.5, r"x has float64 values, but the column declares int8"),
        ({"dtype": "bool", "scope": "row"}, 2, r"x has int64 values, but the column declares bool"),
        ({"dtype": "float16", "scope": "row"}, 1e9, r"x\[0\] is not finite as float16; .* allow_nonfinite: true"),
        ({"dtype": "bfloat16", "scope": "row"}, float("nan"), r"x\[0\] is not finite"),
        ({"dtype": "float32", "scope": "items", "shape": [2]}, [[1, 2], [3]], r"x is not an array of numbers"),
        ({"dtype": "float32", "scope": "row"}, "much", r"x is not an array of numbers"),
        *(
            ({"dtype": "float32", "scope": "row"}, torch.ones((), dtype=dtype, device="meta"), r"x cannot .* pass .cpu")
            for dtype in (torch.float32, torch.bfloat16)
        ),
        ({"dtype": "float32", "scope": "row"}, None, r"column 'x' is missing; every row needs it"),
    ],
)
def test_values_that_are_not_as_declared_are_refused(column: dict[str, Any], values: Any, message: str) -> None:
    specs = specs_of([{"name": "x", **column}])
    with pytest.raises(InvalidArgumentError, match=message):
        check_extras(from_rows(two_steps(values, None)[:1], columns=specs), specs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_a_graph_is_read(dtype: torch.dtype) -> None:
    [column] = specs_of([{"name": "x", "dtype": "float32", "scope": "items"}])
    assert column.array(torch.ones(2, dtype=dtype, requires_grad=True), "here").tolist() == [1, 1]


def test_a_column_that_is_not_declared_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"unknown field x; expected .* declare other fields as columns"):
        from_rows(two_steps(1, 2))


INT64 = 2**63 - 1
BFLOAT16_MAX = float.fromhex("0x1.fep127")


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("int8", (100, 100), 127),
        ("int64", (INT64, 1), INT64),
        ("int64", (INT64, INT64), INT64),
        ("int64", (-INT64 - 1, -1), -INT64 - 1),
        ("int64", (-INT64 - 1, INT64), -1),
        ("int64", (2**32 - 1, 1), 2**32),
        ("int64", (-1, -(2**32)), -(2**32) - 1),
        ("float16", (-65504.0, -65504.0), -65504.0),
        ("bfloat16", (3e38, 3e38), BFLOAT16_MAX),
        ("float32", (3e38, 3e38), float(np.finfo(np.float32).max)),
        ("float64", (1.7e308, 1.7e308), float(np.finfo(np.float64).max)),
        ("float64", (-1.7e308, -1.7e308), -float(np.finfo(np.float64).max)),
        ("float64", (1.7e308, -1.7e308), 0.0),
    ],
)
def test_sums_stop_at_what_the_type_holds(dtype: str, values: tuple[Any, Any], expected: Any) -> None:
    config = CONFIG | {"columns": [{"name": "x", "dtype": dtype, "scope": "row", "merge": "sum"}]}
    table = from_rows(two_steps(*values), columns=specs_of(config["columns"]))
    [shard] = built(table, config).shards
    assert numbers(naive.read_shard(shard)[0]["x"]).tolist() == [expected]


def test_sums_are_not_finite_where_a_step_is_not_and_no_other_row_is() -> None:
    column = {"name": "x", "dtype": "float64", "scope": "row", "merge": "sum", "allow_nonfinite": True, "shape": [2]}
    config = CONFIG | {"columns": [column]}
    table = from_rows(two_steps([np.inf, 1.7e308], [-np.inf, 1.7e308]), columns=specs_of([column]))
    [shard] = built(table, config).shards
    [[first, second]] = naive.read_shard(shard)[0]["x"].tolist()
    assert np.isnan(first)
    assert second == np.finfo(np.float64).max
