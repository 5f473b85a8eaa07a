"""The plan as everyone is shown it: a JSON document whose fields are a contract."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.plan_document import decode_plan, encode_plan
from tests.strategies import LAW, batches_and_settings

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
    "dp_size": 2,
}


def rows(*uids: str) -> list[dict[str, Any]]:
    row = {"sample": 0, "prompt_token_ids": [1], "response_ids": [2, 3], "loss_mask": [1, 0], "reward": 0.5}
    return [{"uid": uid, **row} for uid in uids]


def test_it_has_the_fields_of_the_specification_in_their_order() -> None:
    batch = build_batch(from_rows(rows("a", "b"), step_wise=False), parse_config(CONFIG), run="r", batch=3)
    document = json.loads(encode_plan(batch.plan))
    assert list(document) == [
        *("batch", "rows_received", "rows", "prompts", "optimizer_steps", "dp_size", "dropped_groups", "mini_batches"),
        *("counts", "metrics", "merge_mismatches", "tags", "tag_metrics"),
    ]
    assert document["mini_batches"] == [
        {
            "model": "policy",
            "index": 0,
            "start": 0,
            "end": 2,
            "prompts": 2,
            "rows": 2,
            "padding_rows": 0,
            "loss_tokens": 2,
            "micro_batches_per_rank": 1,
            "ranks": [
                {"rank": 0, "rows": [0], "micro_batches": [[0]]},
                {"rank": 1, "rows": [1], "micro_batches": [[0]]},
            ],
        }
    ]
    assert {name: document[name] for name in ("batch", "rows_received", "rows", "prompts")} == {
        "batch": 3,
        "rows_received": 2,
        "rows": 2,
        "prompts": 2,
    }


@LAW
@given(batches_and_settings())
def test_it_is_read_as_it_was_written(drawn: Any) -> None:
    given_rows, config = drawn
    plan = build_batch(from_rows(given_rows), parse_config(config), run="r", batch=0).plan
    assert decode_plan(encode_plan(plan)) == plan


def test_only_the_plan_of_a_tree_has_the_steps_of_its_rows() -> None:
    table = from_rows([row | {"step": 0, "is_last_step": True} for row in rows("a", "b")])
    for merge, steps in (("prefix", None), ("tree", [[0], [0]])):
        config = parse_config(CONFIG | {"step_wise": True, "merge": merge})
        text = encode_plan(build_batch(table, config, run="r", batch=0).plan)
        assert json.loads(text).get("steps") == steps
        assert ("steps" in json.loads(text)) == (merge == "tree")
        assert decode_plan(text).steps == steps


def test_text_that_is_no_plan_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_plan(b"{}")
