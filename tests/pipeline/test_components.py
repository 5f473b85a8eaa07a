"""`gdpo`: advantages of the components of rewards; and where components are in shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows, to_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.cli.offline.rollout_files import read_batches
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive
from tests.pipeline.credit import assert_same_however_laid_out
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row, batches_and_settings

NAMES = ["correct", "format"]


def rows_of(*components: dict[str, float], uid: str = "p") -> list[Row]:
    """A prompt's samples with these components of their rewards, all of the same score."""
    return [
        make_row(uid=uid, sample=sample, prompt=[1], response=[2], reward=1.0) | {"reward_components": one}
        for sample, one in enumerate(components)
    ]


def config_of(rows: list[Row], **settings: Any) -> dict[str, Any]:
    groups, samples = len({row["uid"] for row in rows}), len({row["sample"] for row in rows})
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": samples}
    return make_config() | sizes | {"advantage_estimator": "gdpo", "step_wise": False} | settings


def built(rows: list[Row], **settings: Any) -> BuiltBatch:
    config = parse_config(config_of(rows, **settings))
    return build_batch(from_rows(rows, step_wise=config.step_wise), config, run="r", batch=0)


def advantages(rows: list[Row], **settings: Any) -> list[float]:
    scored = planned(from_rows(rows, step_wise=False), parse_config(config_of(rows, **settings)), None)
    assert scored.credit is not None
    values: list[float] = scored.credit.advantages.tolist()
    return values


def test_each_component_is_compared_by_itself_and_then_they_are_added_by_their_weights() -> None:
    """Of (0, 1) `grpo` makes ∓0.5 / 0.707..; of (4, 0) ±2 / 2.828..; so that with equal weights both cancel."""
    rows = rows_of({"correct": 0.0, "format": 4.0}, {"correct": 1.0, "format": 0.0})
    half = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert advantages(rows, component_weights={"correct": 1.0, "format": 0.0}) == pytest.approx([-half, half])
    assert advantages(rows) == pytest.approx([0.0, 0.0], abs=1e-5)
    raw = {"grpo_norm_by_std": False, "component_weights": {"correct": 3.0, "format": 0.5}}
    assert advantages(rows, **raw) == [0.5 * 2.0 - 3.0 * 0.5, 3.0 * 0.5 - 0.5 * 2.0]


def test_a_component_that_is_equal_in_a_group_adds_exactly_nothing() -> None:
    assert advantages(rows_of({"a": 0.7}, {"a": 0.7}, {"a": 0.7})) == [0.0] * 3


def test_the_standard_deviation_of_the_batch_is_that_of_each_component() -> None:
    rows = [
        *rows_of({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}),
        *rows_of({"a": 5.0, "b": 9.0}, {"a": 5.0, "b": 1.0}, uid="q"),
    ]
    stds = [float(np.std(values, ddof=1)) + 1e-6 for values in ([0, 1, 5, 5], [1, 1, 9, 1])]
    expected = [-0.5 / stds[0], 0.5 / stds[0], 4.0 / stds[1], -4.0 / stds[1]]
    assert advantages(rows, grpo_std_over="batch") == pytest.approx(expected)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, st.floats(-100, 100))), min_size=2, max_size=6))
def test_one_component_with_weight_1_is_grpo_of_it(components: list[dict[str, float]]) -> None:
    rows = rows_of(*components)
    scores = [row | {"reward": row["reward_components"]["correct"]} for row in rows]
    weights = {"correct": 1.0, "format": 0.0}
    assert advantages(rows, component_weights=weights) == advantages(scores, advantage_estimator="grpo")


@pytest.mark.parametrize(
    ("components", "settings", "message"),
    [
        ([{}, {}], {}, "uid 'p' sample 0 step 0: reward_components is missing, and advantage_estimator: gdpo reads it"),
        (
            [{"a": 1.0}, {"b": 1.0}],
            {},
            "sample 1 step 0: reward_components has 'b', and other trajectories of this run have 'a', which advantage_",
        ),
        ([{"a": 1.0}, {}], {}, "uid 'p' sample 1 step 0: reward_components is missing, and advantage_estimator: gdpo"),
        (
            [{f"r{number}": 1.0 for number in range(64)}, {"more": 1.0}],
            {"advantage_estimator": "grpo"},
            "sample 1 step 0: reward_components has 'more', which would be more than the 64 names that a run may have",
        ),
        (
            [{"a": 1.0}] * 2,
            {"component_weights": {"a": 1.0, "c": 2.0}},
            "reward_components has 'a', and component_weights has 'a', 'c'; set a weight for each",
        ),
        # A component that was sent for metrics was trained, with weight 1.
        (
            [{"a": 1.0, "turns": 9.0}] * 2,
            {"component_weights": {"a": 1.0}},
            r"reward_components has 'a', 'turns', and component_weights has 'a'; .* \(0: for metrics alone\)",
        ),
        ([{"a": 3e38}, {"a": -3e38}], {"grpo_norm_by_std": False, "component_weights": {"a": 9}}, "advantage is 2.7"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    components: list[dict[str, float]], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        built(rows_of(*components), **settings)


def test_trajectories_have_components_of_their_own_where_no_estimator_compares_them() -> None:
    """Those of a data source: each mean is over the trajectories that have the component."""
    rows = rows_of({"pass": 1.0}, {"pass": 0.5, "style": 3.0}, {})
    batch = built(rows, advantage_estimator="grpo")
    (shard,) = batch.shards
    assert naive.read_shard(shard)[1]["reward_components"] == [{"pass": 1.0}, {"pass": 0.5, "style": 3.0}, {}]
    means = {name: mean for name, mean in batch.plan.metrics.items() if name.startswith("components/")}
    assert means == {"components/pass/mean": 0.75, "components/style/mean": 3.0}


def test_shards_have_the_components_of_each_rows_trajectory_and_none_for_padding() -> None:
    rows = [
        make_row(step=0, last=False, prompt=[1], response=[2]),
        make_row(step=1, prompt=[9], response=[3]) | {"reward_components": {"b": 1, "a": 0.5}},
    ]
    one = built(rows, step_wise=True, dp_size=3, advantage_estimator="rloo")
    metadata = [naive.read_shard(shard)[1]["reward_components"] for shard in one.shards]
    assert metadata == [[{"a": 0.5, "b": 1.0}], [{"a": 0.5, "b": 1.0}], [None]]
    without = built(rows_of({}), advantage_estimator="rloo").shards[0]
    assert "reward_components" not in naive.read_shard(without)[1]


@LAW
@given(batches_and_settings(merge="none", loss_reduction="none"), st.integers(1, 4), st.randoms())
def test_merging_layout_ranks_and_the_order_of_rows_change_no_advantage(
    drawn: tuple[list[Row], dict[str, Any]], dp_size: int, random: Any
) -> None:
    rows, config = drawn
    config |= {"advantage_estimator": "gdpo"}
    rows = [
        row | {"reward_components": {name: random.choice([0.0, 0.1, 1.0]) for name in NAMES}}
        if row["is_last_step"]
        else row
        for row in rows
    ]
    assert_same_however_laid_out(rows, config, dp_size, "reward_components")


def test_a_parquet_file_has_components_as_a_struct(tmp_path: Path) -> None:
    rows = [
        make_row(step=0, last=False, prompt=[1], response=[2], reward=0.0) | {"reward_components": None},
        make_row(step=1, prompt=[9], response=[3], reward=0.0) | {"reward_components": {"a": 0.5, "b": 1.0}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = parse_config(config_of(rows, step_wise=True))
    (table,), _ = read_batches(tmp_path / "rows.parquet", config, lambda _: None)
    assert [one.get("reward_components") for one in to_rows(table)] == [None, {"a": 0.5, "b": 1.0}]


def test_a_lengths_file_needs_none() -> None:
    table = from_rows(rows_of({}, {}), step_wise=False)
    bare = replace(table, tokens=replace(table.tokens, values=table.tokens.values[:0]))
    assert planned(bare, parse_config(config_of(rows_of({}, {}))), None).credit is not None
