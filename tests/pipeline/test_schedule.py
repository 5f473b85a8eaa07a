"""Mini-batches, ranks and micro-batches: the reference cases, and an example of each rule."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan
from gristmill_service.pipeline.scheduling.schedule import schedule
from tests.plans import Groups, micro_batches, of, planned, settings_of, shards

REFERENCE = Path(__file__).parents[1] / "reference"

Case = dict[str, Any]

# --- Reference cases


def reference_cases(name: str) -> list[Case]:
    with gzip.open(REFERENCE / name, "rt") as lines:
        return [json.loads(line) for line in lines]


def by_name(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def in_batch_order(rows: list[Case], lengths: Sequence[int]) -> Groups:
    """Row lengths by prompt group (first appearance), then sample, then step."""
    groups: dict[str, list[tuple[int, int, int]]] = {}
    for row, tokens in zip(rows, lengths, strict=True):
        groups.setdefault(row["uid"], []).append((row["sample"], row.get("step", 0), tokens))
    return [[tokens for *_, tokens in sorted(group, key=lambda row: row[:2])] for group in groups.values()]


SCHEDULES = reference_cases("schedule_cases.jsonl.gz")
BATCHES = [case for case in reference_cases("batch_cases.jsonl.gz") if "refused" not in case["expected"]]


def scheduled(case: Case) -> list[MiniBatchPlan]:
    rows = case["lengths"]
    groups = in_batch_order(rows, [row["prompt_len"] + row["response_len"] for row in rows])
    return planned(groups, parse_config(case["config"]))


@by_name([case for case in SCHEDULES if "refused" not in case["expected"]])
def test_a_schedule_is_that_of_the_reference(case: Case) -> None:
    plans, expected = scheduled(case), case["expected"]
    dp_size = len(expected["ranks"])
    rows: list[list[int]] = [[] for _ in range(dp_size)]
    positions: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for plan in plans:
        assert len(plan.ranks) == dp_size
        for rank, shard in enumerate(plan.ranks):  # the reference counts positions on over all mini-batches
            positions[rank] += [[len(rows[rank]) + at for at in micro] for micro in shard.micro_batches]
            rows[rank] += shard.rows.tolist()
    assert rows == expected["ranks"]
    assert positions == expected["micro_batches"]
    assert [plan.micro_batches_per_rank for plan in plans] == expected["micro_batches_per_rank"]
    assert [len(plan.groups) for plan in plans] == expected["prompts_kept"]


@by_name([case for case in SCHEDULES if "refused" in case["expected"]])
def test_a_schedule_that_the_reference_refuses_is_refused(case: Case) -> None:
    with pytest.raises(InvalidArgumentError, match=f"align_to = {parse_config(case['config']).align_to}"):
        scheduled(case)


@by_name(BATCHES)
def test_boundaries_and_ranks_of_a_batch_are_those_of_the_reference(case: Case) -> None:
    rows, expected = case["expected"]["rows_after_merge"], case["expected"]
    lengths = [len(row["prompt_token_ids"]) + len(row["response_ids"]) for row in rows]
    plans = planned(in_batch_order(rows, lengths), parse_config(case["config"]))
    policy = [plan for plan in plans if plan.model == "policy"]
    critic = [plan for plan in plans if plan.model == "critic"]
    assert [[plan.start, plan.end] for plan in policy] == expected["policy_boundaries"]
    assert [[plan.start, plan.end] for plan in critic] == (expected["critic_boundaries"] or [])
    assert [shards(plan) for plan in policy] == expected["policy_ranks"]


# --- Examples


LONG: Groups = [[9], [9, 9], [9, 9]]  # under a cap of 10, each row is alone


def test_microbatch_group_size_counts_for_nothing_without_virtual_stages() -> None:
    config = settings_of(policy_mini_batch_size=3, micro_batch={"max_tokens": 10}, microbatch_group_size=4)
    (plan,) = planned(LONG, config)
    assert plan.micro_batches_per_rank == 5


def test_the_token_cap_counts_all_context_parallel_ranks() -> None:
    (plan,) = planned([[9, 9]], settings_of(micro_batch={"max_tokens": 10}, cp_size=2))
    assert micro_batches(plan) == [[[0, 1]]]


def test_a_refusal_names_the_mini_batch_the_numbers_and_the_settings_to_change() -> None:
    config = settings_of(
        policy_mini_batch_size=2, dp_size=2, micro_batch={"max_tokens": 10}, on_misaligned="drop_trailing"
    )
    with pytest.raises(InvalidArgumentError) as refusal:
        planned([[9], [9], [9, 9], [9], [9], [9, 9]], config)
    message = str(refusal.value)
    assert message.startswith("policy mini-batch 2: its 3 rows ")
    for name in ("align_to = 2", "policy_mini_batch_size", "n_samples_per_prompt", "micro_batch.max_tokens", "dp_size"):
        assert name in message
    assert "on_misaligned: pad" in message


def test_a_critic_that_cannot_align_is_named_with_its_own_setting() -> None:
    config = settings_of(
        policy_mini_batch_size=2,
        critic_mini_batch_size=1,
        dp_size=2,
        micro_batch={"max_tokens": 10},
        on_misaligned="error",
    )
    with pytest.raises(InvalidArgumentError, match=r"critic mini-batch 0: its 1 rows .* change critic_mini_batch_size"):
        planned([[9], [9]], config)


@pytest.mark.parametrize("unit", ["prompt", "sequence"])
def test_an_empty_batch_has_no_mini_batches(unit: str) -> None:
    assert planned([], settings_of(critic_mini_batch_size=1, mini_batch_unit=unit)) == []


def test_in_rows_the_batch_is_padded_to_the_least_common_multiple_of_both_sizes() -> None:
    config = settings_of(
        mini_batch_unit="sequence",
        policy_mini_batch_size=4,
        critic_mini_batch_size=6,
        dp_size=2,
        micro_batch={"size": 2},
    )
    plans = planned([[5] * 8, [5] * 5], config)  # 13 rows: 24
    assert [plan.rows for plan in of("policy", plans)] == [3, 2, 2, 2, 2, 2]
    assert [plan.rows for plan in of("critic", plans)] == [4, 3, 3, 3]
    assert shards(plans[0]) == [[0, 1], [2, PADDING]]
    assert of("critic", plans)[2].groups == range(2)  # rows 7, 8 and 9 are of both groups


def test_a_hundred_thousand_rows_are_scheduled_at_once() -> None:
    lengths = np.random.default_rng(0).integers(15_000, 33_000, 100_000)
    config = settings_of(policy_mini_batch_size=12_500, dp_size=64, micro_batch={"max_tokens": 32_768})
    start = time.process_time()
    schedule(lengths, np.arange(0, 100_001, 8), config)
    assert time.process_time() - start < 2  # 0.16 s
