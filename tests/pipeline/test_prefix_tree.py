"""`layout: prefix_tree`: what rows share is stored once, and every trained token keeps its own numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.columns import Ragged
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch, plan_batch
from gristmill_service.pipeline.rows.merge import merge_rows
from gristmill_service.pipeline.rows.sharing import find_sharing
from gristmill_service.pipeline.rows.validate import receive
from gristmill_service.pipeline.scheduling.plan import PADDING
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from tests import naive
from tests.pipeline import trees
from tests.rows import make_config, make_row
from tests.strategies import LAW, Row

RANDOM = st.integers(0, 2**32).map(Random)


def drawn(random: Random, **fixed: Any) -> tuple[list[Row], dict[str, Any]]:
    rows = trees.rollouts(random)
    return rows, trees.settings(random, rows, **fixed)


def built(rows: list[Row], config: dict[str, Any]) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(config), run="r", batch=0)


def merged(rows: list[Row], config: dict[str, Any]) -> list[naive.Merged]:
    return naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))


@LAW
@given(RANDOM)
def test_a_group_in_one_micro_batch_has_each_token_once(random: Random) -> None:
    rows, config = drawn(random, dp_size=1, micro_batch={"size": 1000}, vpp_size=1, critic_mini_batch_size=None)
    expected = merged(rows, config)
    plan = built(rows, config).plan
    by_group = groupby(expected, key=lambda row: row.steps[0]["uid"])
    assert plan.metrics["distinct_tokens"] == sum(naive.distinct_tokens(list(group)) for _, group in by_group)
    assert plan.metrics["tokens"] == sum(len(naive.tokens_of(row)) for row in expected)


@LAW
@given(RANDOM)
def test_caps_count_distinct_tokens_and_all_else_of_scheduling_stands(random: Random) -> None:
    rows, config = drawn(random)
    checked, expected = parse_config(config), merged(rows, config)
    batch = built(rows, config)
    for part in batch.plan.mini_batches:
        scheduled = sorted(row for rank in part.ranks for row in rank.rows if row >= 0)
        assert scheduled == list(range(part.start, part.end))
        assert len({len(rank.micro_batches) for rank in part.ranks}) == 1
        assert part.micro_batches_per_rank * checked.dp_size % checked.align_to == 0
        if checked.micro_batch.size is not None:
            assert len({len(rank.rows) for rank in part.ranks}) == 1
        if checked.micro_batch.count is not None:
            assert part.micro_batches_per_rank == checked.micro_batch.count
    for shard in batch.shards:
        for numbers, axis in naive.axes(shard):
            assert numbers
            if checked.token_cap is not None and len(numbers) > 1:
                assert len(axis.tensors["sequences"]) <= checked.token_cap
            assert checked.micro_batch.size is None or len(numbers) <= checked.micro_batch.size
    trained = [shard for shard in batch.shards if shard.address.model == "policy"]
    axes = [axis for shard in trained for axis in naive.axes(shard)]
    elements = sum(len(axis.tensors["sequences"]) for _, axis in axes)
    padding = sum(checked.padding_row_tokens for numbers, _ in axes for number in numbers if number < 0)
    metrics = batch.plan.metrics
    assert (metrics["padding_tokens"], metrics["distinct_tokens"]) == (padding, elements - padding)
    assert metrics["tokens"] == sum(len(naive.tokens_of(row)) for row in expected)
    stats = batch.stats()
    assert (stats.distinct, stats.padding_tokens) == (elements - padding, padding)
    assert stats.padding_shares["laid_out"] == pytest.approx(metrics["padding_share"])


@LAW
@given(RANDOM)
def test_a_group_that_fits_under_the_cap_is_in_one_micro_batch(random: Random) -> None:
    rows, config = drawn(random, dp_size=1, vpp_size=1, micro_batch={"max_tokens": 200}, balance="none")
    plan = built(rows, config).plan
    uids = [row.steps[0]["uid"] for row in merged(rows, config)]
    for part in plan.mini_batches:
        (rank,) = part.ranks
        of_group: dict[str, set[int]] = {}
        families: dict[str, int] = {}
        for number, positions in enumerate(rank.micro_batches):
            for at in positions:
                uid = uids[rank.rows[at]]
                of_group.setdefault(uid, set()).add(number)
                assert rank.shared is not None
                families[uid] = families.get(uid, 0) + (rank.shared[at] == 0)
        # Rows that share nothing are families of their own, which may be packed apart.
        assert all(len(numbers) <= families[uid] for uid, numbers in of_group.items())


@LAW
@given(RANDOM)
def test_the_order_of_arrival_changes_no_byte(random: Random) -> None:
    rows, config = drawn(random)
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["uid"])]
    shuffled = [row for group in groups for row in random.sample(group, len(group))]
    for one, other in zip(built(rows, config).shards, built(shuffled, config).shards, strict=True):
        assert naive.shard_bytes(one) == naive.shard_bytes(other)


def group(*samples: tuple[list[int], list[int]], uid: str = "p") -> list[Row]:
    """A prompt group of single turns: each sample's prompt and response."""
    return [
        make_row(
            uid=uid,
            sample=sample,
            prompt=prompt,
            response=response,
            rollout_logprobs=[-1.0 - sample] * len(response),
            reward=float(sample),
        )
        for sample, (prompt, response) in enumerate(samples)
    ]


CONFIG: dict[str, Any] = make_config(n_samples_per_prompt=3, layout="prefix_tree", micro_batch={"max_tokens": 100})


def only_axis(rows: list[Row], **changes: Any) -> dict[str, list[Any]]:
    (shard,) = built(rows, CONFIG | changes).shards
    ((_, axis),) = naive.axes(shard)
    return {name: values.tolist() for name, values in axis.tensors.items()}


def test_a_prompt_that_samples_share_stands_once() -> None:
    axis = only_axis(group(([1, 2, 3], [7, 8]), ([1, 2, 3], [9]), ([1, 2, 3], [6, 5])))
    assert axis["sequences"] == [1, 2, 3, 7, 8, 9, 6, 5]
    assert axis["position_ids"] == [0, 1, 2, 3, 4, 3, 3, 4]
    assert axis["parents"] == [-1, 0, 1, 2, 3, 2, 2, 6]
    assert axis["segment_starts"] == [0, 3, 5, 6]
    assert axis["segment_parents"] == [-1, 0, 0, 0]
    assert axis["row_ends"] == [4, 5, 7]
    assert axis["response_mask"] == axis["loss_mask"] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert axis["rewards"] == [0, 0, 0, 0, 0, 1, 0, 2]


def test_splitting_for_alignment_cuts_between_families_where_it_can() -> None:
    rows = []
    for prompt in range(4):
        rows += group(*(([prompt] * 6, [9, sample]) for sample in range(3)), uid=f"p{prompt}")
    sizes = {"train_batch_size": 4, "policy_mini_batch_size": 4, "dp_size": 2}
    plan = built(rows, CONFIG | sizes | {"micro_batch": {"max_tokens": 1000}}).plan
    assert [rank.rows for rank in plan.mini_batches[0].ranks] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert plan.metrics["distinct_tokens"] == 4 * (6 + 3 * 2)


@LAW
@given(RANDOM)
def test_whole_trailing_groups_are_dropped_where_that_aligns(random: Random) -> None:
    rows, config = drawn(random, dp_size=3, vpp_size=1, micro_batch={"max_tokens": 60}, critic_mini_batch_size=None)
    try:
        batch = built(rows, config | {"on_misaligned": "drop_trailing"})
    except MisalignedError:
        return
    uids = [row.steps[0]["uid"] for row in merged(rows, config)]
    dropped = {group.uid for group in batch.plan.dropped_groups}
    for part in batch.plan.mini_batches:
        kept = [row for rank in part.ranks for row in rank.rows]
        assert PADDING not in kept
        assert sorted(kept) == list(range(part.start, part.start + part.rows))
        assert {uids[row] for row in kept}.isdisjoint(dropped)
    trained = sum(len(naive.tokens_of(row)) for row in merged(rows, config) if row.steps[0]["uid"] not in dropped)
    assert batch.plan.metrics["tokens"] == trained


def test_a_batch_of_which_all_groups_are_stale_has_no_shards() -> None:
    rows = group(([1, 2], [3]), ([1, 2], [4])) + group(([1, 2], [3]), uid="q")
    rows = [row | {"policy_version": 0 if row["uid"] == "p" else 5} for row in rows]
    config = CONFIG | {"train_batch_size": 2, "max_staleness": 1, "stale": "drop"}
    plan = built(rows, config).plan
    assert ([group.uid for group in plan.dropped_groups], plan.metrics["distinct_tokens"]) == (["p"], 3)
    steps, checked = from_rows(rows[:2]), parse_config(config | {"train_batch_size": 1})
    assert build_batch(steps, checked, run="r", batch=0, policy_version=9).shards == []


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ({"name": "images", "dtype": "float32", "scope": "items"}, "images has scope: items"),
        ({"name": "mrope", "dtype": "int64", "scope": "token", "merge": "equal"}, "mrope has merge: equal"),
    ],
)
def test_columns_that_distinguish_rows_whose_tokens_are_alike_are_refused(column: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{problem}, so its values may differ .* layout: prefix_tree"):
        parse_config(CONFIG | {"columns": [column]})


def test_lengths_alone_are_not_planned() -> None:
    steps = from_rows(group(([1, 2], [3])))
    lengths = replace(steps, tokens=Ragged(steps.tokens.values[:0], np.zeros(1, np.int64), steps.tokens.lengths))
    with pytest.raises(
        InvalidArgumentError, match="needs tokens to find shared prefixes, but these rows have only lengths"
    ):
        plan_batch(lengths, parse_config(CONFIG), batch=0)


def steps_of_one_trajectory(*steps: tuple[list[int], list[int]]) -> list[Row]:
    return [
        make_row(prompt=prompt, response=response, step=step, is_last_step=step == len(steps) - 1)
        for step, (prompt, response) in enumerate(steps)
    ]


ONE_TRAJECTORY = {"n_samples_per_prompt": 1, "merge": "none"}


def test_a_step_that_continues_the_one_before_shares_more_with_an_earlier_one_that_has_more_of_it() -> None:
    rows = steps_of_one_trajectory(([2, 0, 1], [0, 0, 1, 1]), ([2, 0], [1]), ([2, 0, 1, 0, 1, 2], [2, 0, 2]))
    axis = only_axis(rows, **ONE_TRAJECTORY)
    assert axis["sequences"] == [2, 0, 1, 0, 0, 1, 1, 1, 2, 2, 0, 2]
    assert axis["parents"] == [-1, 0, 1, 2, 3, 4, 5, 3, 7, 8, 9, 10]


def test_a_step_shares_most_although_each_row_is_found_without_a_search() -> None:
    """Steps 0 and 1 sample 3 after the same prompt, and step 2 has more of step 0's response."""
    rows = steps_of_one_trajectory(([1, 2], [3, 4, 5]), ([1, 2], [3]), ([1, 2, 3, 4], [9]))
    axis = only_axis(rows, **ONE_TRAJECTORY)
    assert sorted(axis["sequences"]) == [1, 2, 3, 3, 4, 5, 9]


def test_a_step_shares_most_with_another_sample_that_comes_later_and_branches_earlier() -> None:
    rows = [
        *steps_of_one_trajectory(([1, 2], [3]), ([1, 2, 3, 4, 5], [9])),
        make_row(sample=1, prompt=[1, 2], response=[3, 4, 7], step=0, is_last_step=True),
    ]
    axis = only_axis(rows, **ONE_TRAJECTORY | {"n_samples_per_prompt": 2})
    assert sorted(axis["sequences"]) == [1, 2, 3, 3, 4, 5, 7, 9]


def test_a_step_and_the_one_that_it_continues_share_all_of_it_in_a_micro_batch_without_other_samples() -> None:
    """Another sample, with as much in common, is planned for another rank."""
    rows = [
        *steps_of_one_trajectory(([8, 7], [1]), ([8, 7, 1, 4], [5])),
        *(row | {"sample": 1} for row in steps_of_one_trajectory(([8, 7], [1, 6]), ([8, 7, 1, 6, 3], [2]))),
    ]
    changes = {"n_samples_per_prompt": 2, "dp_size": 2, "micro_batch": {"size": 2}, "balance": "none"}
    shards = built(rows, CONFIG | ONE_TRAJECTORY | changes).shards
    axes = [axis.tensors["sequences"].tolist() for shard in shards for _, axis in naive.axes(shard)]
    assert axes == [[8, 7, 1, 4, 5], [8, 7, 1, 6, 3, 2]]


def test_rows_of_a_trajectory_share_all_that_they_may_where_one_shares_more_with_a_sample_elsewhere() -> None:
    """Step 1 has three tokens in common with step 0, and four with the other sample, which may be elsewhere."""
    rows = steps_of_one_trajectory(([8, 7], [1, 4, 0]), ([8, 7, 1, 5, 1], [3]))
    rows.append(make_row(sample=1, prompt=[8, 7], response=[1, 5, 7], step=0, is_last_step=True))
    config = parse_config(CONFIG | ONE_TRAJECTORY | {"n_samples_per_prompt": 2})
    received = receive(from_rows(rows), config)
    sharing = find_sharing(merge_rows(received, config), received.steps.tokens, np.array([0, 3]))
    assert sharing.order.tolist() == [0, 2, 1]
    assert sharing.shared(np.array([0, 2, 1]), np.array([0])).tolist() == [0, 2, 4]
    assert sharing.shared(np.array([0, 1]), np.array([0])).tolist() == [0, 3]
