"""`loss_weight`: the weight of each token in the loss, next to `loss_mask`; and `observation_weight`."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.extras import check_extras
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.pipeline import trees
from tests.strategies import LAW, Row

COLUMN = {"name": "loss_weight", "dtype": "float32", "scope": "response"}
SETTINGS: dict[str, Any] = {
    "train_batch_size": 1,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": 1,
    "micro_batch": {"max_tokens": 64},
    "step_wise": True,
    "merge": "tree",
    "columns": [COLUMN],
}


def trajectory(**changes: Any) -> list[Row]:
    """The third step forks from the first one, so that two rows contain it; both observe 5 after it."""
    steps = [([1, 2], [3, 4], [0.5, 2.0]), ([1, 2, 3, 4, 5], [6], [-1.0]), ([1, 2, 3, 4, 5, 9], [7, 8], [0.0, 4.0])]
    return [
        {
            "uid": "a",
            "sample": 0,
            "step": step,
            "is_last_step": step == 2,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [1] + [0] * (len(response) - 1),
            "loss_weight": weights,
            "reward": 0.0,
            "stop_reason": "length" if step == 1 else "stop",
            **changes,
        }
        for step, (prompt, response, weights) in enumerate(steps)
    ]


def built(rows: list[Row], **changes: Any) -> BuiltBatch:
    config = parse_config(SETTINGS | changes)
    steps = check_extras(from_rows(rows, columns=config.columns), config.columns)
    return build_batch(steps, config, run="r", batch=0)


def weights(rows: list[Row], **changes: Any) -> Any:
    (shard,) = built(rows, **changes).shards
    tensors, metadata = naive.read_shard(shard)
    (values,) = [tensor for name, tensor in tensors.items() if name.rpartition("/")[2] == "loss_weight"]
    assert values.dtype == np.float32
    assert metadata["loss_denominators"]["loss_weight"] == values.sum(dtype=np.float64)
    return values.tolist()


def without_weights(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "loss_weight"} for row in rows]


def test_every_token_has_its_weight_once_whatever_its_mask_is() -> None:
    assert weights(trajectory()) == [[0.0, 0.0, 0.5, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 4.0]]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("left_padded", [[0.0, 0.0, 0.5, 2.0, 0.25, -1.0], [0.0, 0.0, 0.25, 0.25, 0.0, 4.0]]),
        ("packed", [0.0, 0.0, 0.5, 2.0, 0.25, -1.0, 0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.0, 4.0]),
        ("prefix_tree", [0.0, 0.0, 0.5, 2.0, 0.25, -1.0, 0.25, 0.25, 0.0, 4.0]),
    ],
)
def test_observations_have_the_weight_of_the_setting_and_a_position_of_their_own(
    layout: str, expected: list[Any]
) -> None:
    assert weights(trajectory(), layout=layout, observation_weight=0.25) == expected


def test_without_the_column_weights_are_the_masks_after_filters_and_that_of_observations() -> None:
    settings: dict[str, Any] = {"columns": [], "observation_weight": 0.25, "layout": "packed", "merge": "prefix"}
    rows = without_weights(trajectory())[:2]
    rows[1]["is_last_step"] = True
    assert weights(rows, **settings) == [0.0, 0.0, 1.0, 0.0, 0.25, 1.0]
    rows[0]["stop_reason"], rows[1]["stop_reason"] = "length", "stop"
    assert weights(rows, **settings, overlong_filter=["length"]) == [0.0, 0.0, 0.0, 0.0, 0.25, 1.0]


def test_filters_and_reductions_leave_given_weights_as_they_are() -> None:
    settings = {"overlong_filter": ["length"], "loss_reduction": "token_mean", "layout": "packed"}
    assert weights(trajectory(), **settings) == weights(trajectory(), layout="packed")


def test_a_shard_has_no_weights_unless_a_run_asks_for_them() -> None:
    (shard,) = built(without_weights(trajectory()), columns=[], observation_weight=0.0).shards
    tensors, metadata = naive.read_shard(shard)
    assert "loss_weight" not in tensors
    assert "loss_weight" not in metadata["loss_denominators"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (without_weights(trajectory()), "uid 'a' sample 0 step 0: .*loss_weight.* missing"),
        (trajectory(loss_weight=[1.0]), "uid 'a' sample 0 step 0: loss_weight has 1 values"),
        (
            [row | {"loss_weight": [1e39] * len(row["response_ids"])} for row in trajectory()],
            "is not finite as float32",
        ),
    ],
)
def test_weights_that_are_missing_too_few_or_not_finite_are_refused(rows: list[Row], message: str) -> None:
    with np.errstate(over="ignore"), pytest.raises(InvalidArgumentError, match=message):
        built(rows)


@LAW
@given(st.integers(0, 2**32).map(Random), st.sampled_from(["left_padded", "packed", "prefix_tree"]), st.booleans())
def test_the_denominator_is_what_all_ranks_weigh_and_merging_does_not_change_it(
    random: Random, layout: str, observes: bool
) -> None:
    rows = trees.rollouts(random)
    for row in rows:
        row["loss_weight"] = [random.randint(-8, 8) / 8 for _ in row["response_ids"]]
    settings = {
        "train_batch_size": len({row["uid"] for row in rows}),
        "n_samples_per_prompt": trees.SAMPLES,
        "dp_size": 2,
        "layout": layout,
        "observation_weight": 0.5 * observes,
        "critic_mini_batch_size": len({row["uid"] for row in rows}),
    }
    for merge in ("none", "prefix", "tree"):
        weighed: dict[Any, float] = {}
        announced = {}
        for shard in built(rows, **settings, merge=merge).shards:
            tensors, metadata = naive.read_shard(shard)
            of_shard = [values.sum() for name, values in tensors.items() if name.rpartition("/")[2] == "loss_weight"]
            key = metadata["model"], metadata["mini_batch"]
            weighed[key] = weighed.get(key, 0.0) + float(sum(of_shard))
            announced[key] = metadata["loss_denominators"]["loss_weight"]
        assert announced == weighed
        if not observes:
            total = sum(sum(row["loss_weight"]) for row in rows)
            assert weighed["critic", 0] == total
