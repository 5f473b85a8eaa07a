"""Filters act on steps as received, and what they leave out still counts for scores and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.plan_document import GroupDocument
from tests import naive
from tests.rows import make_config, make_row
from tests.strategies import Row


def rows(scores: Sequence[Sequence[float]], **more: Any) -> list[Row]:
    """One single-step trajectory a score; scores is a list of groups."""
    return [
        make_row(uid=f"p{group}", sample=sample, prompt=[1], response=[2, 3], reward=score) | more
        for group, samples in enumerate(scores)
        for sample, score in enumerate(samples)
    ]


def built(given: list[Row], **overrides: Any) -> BuiltBatch:
    config = make_config(
        train_batch_size=len({row["uid"] for row in given}), n_samples_per_prompt=2, micro_batch={"size": 4}
    )
    return build_batch(from_rows(given), parse_config(config | overrides), run="r", batch=0)


def trained(batch: BuiltBatch) -> dict[tuple[str, int], list[int]]:
    masks: dict[tuple[str, int], list[int]] = {}
    for shard in batch.shards:
        _, metadata = naive.read_shard(shard)
        for uid, row in zip(metadata["uids"], naive.shard_rows(shard), strict=True):
            masks[uid, int(row["sample"])] = row["loss_mask"].tolist()
    return masks


@pytest.mark.parametrize("setting", ["mask", True])
def test_zero_variance_masks_groups_of_equal_scores(setting: str | bool) -> None:
    batch = built(rows([[1.0, 1.0], [0.0, 1.0]]), zero_variance_filter=setting)
    assert [mask for (uid, _), mask in trained(batch).items() if uid == "p0"] == [[0, 0]] * 2
    assert [mask for (uid, _), mask in trained(batch).items() if uid == "p1"] == [[1, 1]] * 2
    assert batch.plan.counts["zero_variance_groups"] == 1
    assert [part.loss_tokens for part in batch.plan.mini_batches] == [0, 4]


def test_overlong_masks_the_named_stop_reasons_and_no_others() -> None:
    table = rows([[0.0, 1.0]])
    table[0]["stop_reason"], table[1]["stop_reason"] = "length", "tool_calls"
    batch = built(table, overlong_filter=["length"])
    assert trained(batch) == {("p0", 0): [0, 0], ("p0", 1): [1, 1]}
    assert batch.plan.counts["overlong_steps"] == 1


def test_an_overlong_step_is_masked_within_a_merged_row_and_no_further() -> None:
    table = rows([[0.5]])
    table[0] |= {"is_last_step": False, "stop_reason": "length"}
    table.append({**table[0], "step": 1, "is_last_step": True, "prompt_token_ids": [1, 2, 3], "stop_reason": "stop"})
    batch = built(table, overlong_filter=["length"], merge="prefix", n_samples_per_prompt=1)
    assert trained(batch) == {("p0", 0): [0, 0, 1, 1]}


@pytest.mark.parametrize("merge", ["none", "prefix", "tree"])
def test_a_trajectory_whose_end_is_overlong_trains_none_of_its_steps_and_scores_in_its_group(merge: str) -> None:
    table = []
    for sample, (reason, score) in enumerate([("max_tokens", -1.0), ("stop", 3.0), ("stop", 1.0)]):
        first = make_row(uid="p0", sample=sample, prompt=[7], response=[8, 8, 8], reward=0.0, is_last_step=False)
        last = make_row(uid="p0", sample=sample, step=1, prompt=[7, 8, 8, 8, 5], response=[9] * 2, reward=score)
        table += [first | {"stop_reason": "tool_calls"}, last | {"stop_reason": reason}]
    batch = built(
        table,
        overlong_filter=["max_tokens", "length"],
        merge=merge,
        n_samples_per_prompt=3,
        grpo_norm_by_std=False,
        micro_batch={"size": 8},
    )
    (shard,) = batch.shards
    by_sample: dict[int, tuple[int, set[float]]] = {}
    for row in naive.shard_rows(shard):
        trains = row["loss_mask"] == 1
        tokens, advantages = by_sample.get(int(row["sample"]), (0, set()))
        by_sample[int(row["sample"])] = tokens + int(trains.sum()), advantages | {*row["advantages"][trains].tolist()}
    assert by_sample == {0: (0, set()), 1: (5, {2.0}), 2: (5, {0.0})}
    assert batch.plan.counts["overlong_steps"] == 2


def test_masked_trajectories_still_count_for_the_baseline() -> None:
    table = rows([[0.0, 1.0]])
    table[0]["stop_reason"] = "length"
    batch = built(table, overlong_filter=["length"], advantage_estimator="rloo")
    (shard,) = batch.shards
    assert naive.shard_rows(shard)[1]["advantages"].tolist() == [1.0, 1.0]
    assert batch.plan.metrics["score_mean"] == 0.5


def test_stale_groups_are_counted_by_default_and_dropped_when_asked() -> None:
    table = rows([[0.0, 1.0], [0.0, 1.0]])
    for row, version in zip(table, [4, 1, 4, 4], strict=True):
        row["policy_version"] = version
    kept = built(table, max_staleness=2)
    assert (kept.plan.counts["stale_groups"], kept.plan.prompts, kept.plan.dropped_groups) == (1, 2, [])
    dropped = built(table, max_staleness=2, stale="drop")
    assert (dropped.plan.counts["stale_groups"], dropped.plan.prompts, dropped.plan.dropped_groups) == (
        1,
        1,
        [GroupDocument("p0", 0)],
    )
    assert dropped.plan.rows_received == 4
    assert {uid for uid, _ in trained(dropped)} == {"p1"}


def test_a_dropped_group_is_named_with_its_round() -> None:
    table = rows([[0.0, 1.0], [0.0, 1.0]])
    for row, version in zip(table, [1, 1, 4, 4], strict=True):
        row |= {"uid": "p", "round": version, "policy_version": version}
    dropped = built(table, max_staleness=2, stale="drop")
    assert dropped.plan.dropped_groups == [GroupDocument("p", 1)]


def test_padding_rows_have_the_uid_of_no_group_also_of_none_that_was_dropped() -> None:
    table = rows([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    for row, version in zip(table, [1, 1, 4, 4, 4, 4], strict=True):
        row["uid"] = {"p0": "padding", "p1": "_padding", "p2": "p2"}[row["uid"]]
        row["policy_version"] = version
    batch = built(table, max_staleness=2, stale="drop", dp_size=3)
    assert batch.plan.dropped_groups == [GroupDocument("padding", 0)]
    assert {uid for uid, sample in trained(batch) if sample == -1} == {"__padding"}


def test_exactly_max_staleness_behind_is_not_stale_and_unknown_versions_never_are() -> None:
    table = rows([[0.0, 1.0]])
    for row, version in zip(table, [2, 4], strict=True):
        row["policy_version"] = version
    assert built(table, max_staleness=2).plan.counts["stale_groups"] == 0
    for row in table:
        row["policy_version"] = -1
    assert built(table, max_staleness=0).plan.counts["stale_groups"] == 0


def test_staleness_is_reported_per_trajectory_by_its_oldest_step() -> None:
    table = rows([[0.0, 1.0]])
    table[0] |= {"policy_version": 1, "is_last_step": False}
    table.insert(1, {**table[0], "step": 1, "is_last_step": True, "policy_version": 4})
    table[2]["policy_version"] = 3
    metrics = built(table).plan.metrics
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (2.0, 3)


def test_lone_survivors_and_incomplete_groups_are_counted() -> None:
    table = rows([[1.0], [0.0, 1.0]])
    counts = built(table).plan.counts
    assert (counts["lone_survivors"], counts["incomplete_groups"]) == (1, 1)


def test_maxrl_counts_groups_whose_mean_is_not_positive() -> None:
    counts = built(rows([[-1.0, 0.0], [0.0, 1.0]]), advantage_estimator="maxrl").plan.counts
    assert counts["maxrl_nonpositive_groups"] == 1


def test_maxrl_counts_the_groups_that_it_compares() -> None:
    """An agent with a negative mean was not counted next to one with a higher positive one."""
    table = [row | {"agent": "ab"[row["sample"] // 2]} for row in rows([[-1.0, 0.0, 3.0, 4.0]])]
    counts = built(table, advantage_estimator="maxrl", n_samples_per_prompt=4).plan.counts
    assert counts["maxrl_nonpositive_groups"] == 1


def test_rows_of_a_version_that_is_not_announced_yet_count_as_of_an_unknown_one() -> None:
    rows = [make_row(sample=sample, policy_version=version) for sample, version in enumerate([0, 5, 2, 3])]
    config = parse_config(make_config(n_samples_per_prompt=4))
    built = build_batch(from_rows(rows), config, run="r", batch=0, policy_version=2)
    assert built.plan.metrics["staleness_mean"] == 1.0
    assert built.stats().staleness == {0: 1, 2: 1}
