"""`token_step`: the step that sampled each response token, in merged rows too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.strategies import LAW, Row, batches_and_settings

ROWS: list[Row] = [
    {"prompt_token_ids": [1, 2], "response_ids": [3, 4], "is_last_step": False},
    {"prompt_token_ids": [1, 2, 3, 4, 5], "response_ids": [6], "is_last_step": False},
    {"prompt_token_ids": [1, 2, 3, 4], "response_ids": [7, 8], "is_last_step": True},
]
SETTINGS: dict[str, Any] = {
    "train_batch_size": 1,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": 1,
    "micro_batch": {"max_tokens": 64},
    "step_wise": True,
    "merge": "tree",
    "token_step": True,
}


def built(rows: list[Row], settings: dict[str, Any]) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(settings), run="r", batch=0)


def trajectory() -> list[Row]:
    """The third step forks from the first one, so that two rows share it."""
    return [
        {"uid": "a", "sample": 0, "step": step, "loss_mask": [1] * len(row["response_ids"]), "reward": 0.0, **row}
        for step, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("left_padded", [[0, 0, -1, 1], [0, 0, 2, 2]]),
        ("packed", [-1, -1, 0, 0, -1, 1, -1, -1, 0, 0, 2, 2]),
        ("prefix_tree", [-1, -1, 0, 0, -1, 1, 2, 2]),
    ],
)
def test_every_layout_has_the_step_of_each_token_and_rows_that_share_it_have_the_same(
    layout: str, expected: list[Any]
) -> None:
    (shard,) = built(trajectory(), SETTINGS | {"layout": layout}).shards
    tensors, _ = naive.read_shard(shard)
    prefix = "" if layout == "left_padded" else "micro_batch_000/"
    values = tensors[f"{prefix}token_step"]
    assert values.dtype == np.int32
    assert values.tolist() == expected


def test_only_runs_that_ask_for_it_have_it() -> None:
    names = [
        set(naive.read_shard(built(trajectory(), SETTINGS | {"token_step": asked}).shards[0])[0])
        for asked in (False, True)
    ]
    assert names[1] - names[0] == {"token_step"}


@LAW
@given(batches_and_settings(token_step=True))
def test_it_is_the_step_of_every_token_that_was_sampled_and_minus_one_elsewhere(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = drawn
    groups = naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))
    for shard in built(rows, config).shards:
        for shown in naive.shard_rows(shard):
            sources = [] if shown["is_padding"] else groups[int(shown["row"])].sources
            expected = [-1 if source is None else source[0] for source in sources]
            values = shown["token_step"].tolist()
            assert values[len(values) - len(expected) :] == expected
            assert set(values[: len(values) - len(expected)]) <= {-1}
