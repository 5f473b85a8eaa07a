"""A null where a number is needed is refused as that, whichever file it is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.errors import InvalidArgumentError
from gristmill_service.cli.offline.rollout_files import read_batches
from gristmill_service.config import parse_config

CONFIG = parse_config(
    {
        "train_batch_size": 2,
        "n_samples_per_prompt": 1,
        "policy_mini_batch_size": 1,
        "micro_batch": {"size": 1},
        "columns": [
            {"name": "teacher", "dtype": "float32", "scope": "response", "allow_nonfinite": True},
            {"name": "experts", "dtype": "int16", "scope": "response", "shape": [2]},
        ],
    }
)
ROW: dict[str, Any] = {
    "uid": "a",
    "sample": 0,
    "prompt_token_ids": [1, 2],
    "response_ids": [3, 4],
    "loss_mask": [1, 1],
    "reward": 1.0,
    "teacher": [0.5, 1.0],
    "experts": [[1, 2], [3, 4]],
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("name", "values", "place"),
    [
        ("teacher", [0.5, None], "[1]"),
        ("prompt_token_ids", [None, 1], "[0]"),
        ("response_ids", [3, None], "[1]"),
        ("loss_mask", [1, None], "[1]"),
        ("experts", [[1, 2], None], "[1]"),
        ("experts", [[1, 2], [3, None]], "[1][1]"),
    ],
)
def test_a_null_in_a_list_is_refused_by_its_place(
    tmp_path: Path, kind: str, name: str, values: list[Any], place: str
) -> None:
    rows, file = [ROW | {"uid": "b"}, ROW | {name: values}], tmp_path / f"rollouts.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(InvalidArgumentError) as refused:
        read_batches(file, CONFIG, lambda position: None)
    assert f"uid 'a' sample 0: {name}{place} is null; pass a number" in str(refused.value)
