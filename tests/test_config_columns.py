"""Columns that a configuration declares: which cannot be, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config

GOOD: dict[str, Any] = {
    "train_batch_size": 8,
    "n_samples_per_prompt": 4,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (7, "7 is not a mapping; declare a mapping with name, dtype and scope"),
        ({"name": "x"}, "dtype and scope must be set"),
        ({"name": "x", "dtype": "int16", "scope": "token", "size": 3}, "unknown setting 'size'; expected name, dtype"),
        ({"name": "Routes", "dtype": "int16", "scope": "token"}, "a name must be 1 to 63 of a-z"),
        ({"name": "loss_mask", "dtype": "int16", "scope": "token"}, "is the name of a built-in column"),
        ({"name": "env_metrics", "dtype": "int16", "scope": "row"}, "is the name of a built-in column"),
        (
            {"name": "row_offsets", "dtype": "int64", "scope": "row"},
            "a tensor would have the name of the built-in column row; choose",
        ),
        (
            {"name": "rewards_given", "dtype": "uint8", "scope": "row"},
            "a tensor would have the name of the built-in column rewards",
        ),
        ({"name": "x", "dtype": "int4", "scope": "token"}, "dtype is 'int4'; expected one of bool, uint8"),
        ({"name": "x", "dtype": "int16", "scope": "step"}, "scope is 'step'; expected one of row, response"),
        ({"name": "x", "dtype": "int16", "scope": "row", "merge": "concat"}, "merge is 'concat'; expected one of last"),
        ({"name": "x", "dtype": "int16", "scope": "row", "shape": [0]}, "set sizes from 1 to"),
        ({"name": "x", "dtype": "int16", "scope": "row", "shape": 3}, "set a list of sizes, like"),
        ({"name": "x", "dtype": "int64", "scope": "row", "shape": [1 << 23]}, "the limits are 16777216"),
        ({"name": "x", "dtype": "float32", "scope": "token", "shape": [1 << 15]}, "131072 bytes; the limits are 65536"),
        (
            {"name": "x", "dtype": "int8", "scope": "row", "shape": [4097], "merge": "sum"},
            "one value of shape .4097. has 4097 bytes, and the limit for merge: sum is 4096",
        ),
        (
            {"name": "x", "dtype": "int16", "scope": "token", "shape": [4096], "fill": -1},
            "has 8192 bytes, and values of more than 4096 bytes can only be filled with 0; omit fill",
        ),
        ({"name": "x", "dtype": "int8", "scope": "row", "fill": 128}, "fill is 128, which int8 cannot represent"),
        ({"name": "x", "dtype": "int8", "scope": "row", "fill": 10**400}, "fill is 1000000.* int8 cannot represent"),
        ({"name": "x", "dtype": "float64", "scope": "row", "fill": 10**400}, "which float64 cannot represent"),
        (
            {"name": "x", "dtype": "float32", "scope": "row", "fill": 1e39},
            "fill is 1e.39, which float32 cannot represent",
        ),
        ({"name": "x", "dtype": "float16", "scope": "row", "fill": 70000}, "fill is 70000, which float16 cannot"),
        ({"name": "x", "dtype": "bfloat16", "scope": "row", "fill": 3.4e38}, "which bfloat16 cannot represent"),
        (
            {"name": "x", "dtype": "float32", "scope": "row", "fill": float("nan"), "allow_nonfinite": True},
            "fill is nan, which JSON cannot express; set a finite number",
        ),
        ({"name": "x", "dtype": "int8", "scope": "row", "required": 1}, "required is 1; set true or false"),
        ({"name": "x", "dtype": "bool", "scope": "row", "merge": "sum"}, "merge is sum, which adds numbers"),
        ({"name": "x", "dtype": "int8", "scope": "items", "source": "trainer"}, "set scope: row or response"),
        (
            {"name": "x", "dtype": "int8", "scope": "token", "shape": [None, 2]},
            "or .null. for any number",
        ),
        *(
            (
                {"name": "x", "dtype": "int8", "scope": "token", "shape": [None], **more},
                "shape is .null., which requires source: rollout, scope token or response, and no fill; change these",
            )
            for more in ({"scope": "row"}, {"scope": "items"}, {"scope": "response", "source": "trainer"}, {"fill": 1})
        ),
    ],
)
def test_a_column_that_cannot_be_is_refused_with_the_remedy(column: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse_config(GOOD | {"columns": [column]})


def test_a_fill_of_negative_zero_is_the_zero_that_a_stored_configuration_has() -> None:
    config = parse_config(GOOD | {"columns": [{"name": "x", "dtype": "float32", "scope": "row", "fill": -0.0}]})
    stored = parse_config(json.loads(config.model_dump_json(exclude_defaults=True)))
    assert config.columns[0].fill_value.tobytes() == stored.columns[0].fill_value.tobytes()


@pytest.mark.parametrize("scope", ["items", "row", "token"])
def test_columns_whose_tensors_would_have_one_name_are_refused(scope: str) -> None:
    columns = [
        {"name": "pixels", "dtype": "uint8", "scope": scope},
        {"name": "pixels_offsets", "dtype": "int64", "scope": "row"},
    ]
    with pytest.raises(InvalidArgumentError, match="two columns would have a tensor pixels_offsets; rename one"):
        parse_config(GOOD | {"columns": columns})
    with pytest.raises(InvalidArgumentError, match="expected a list of columns, got dict"):
        parse_config(GOOD | {"columns": {}})
