"""Partitions: rows that are never in one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.plan_document import encode_plan
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan
from tests import naive
from tests.client.test_shards import as_shard
from tests.pipeline.test_schedule_laws import BY_COUNT, BY_SIZE, BY_TOKENS, DROPPING, PADDED, STRICT, batches
from tests.plans import Batch, all_micro_batches, micro_batches, naive_kept, planned, real_rows, settings_of

ANY = BY_SIZE | BY_TOKENS | BY_COUNT


@st.composite
def partitioned(draw: st.DrawFn, /, **kinds: Any) -> tuple[Batch, list[int]]:
    """A batch with mini-batches of the policy alone, and the partition of each row, by first appearance."""
    batch = draw(batches(**kinds))
    balance = draw(st.sampled_from(["none", "none", "tokens"]))
    changes: dict[str, Any] = {"critic_mini_batch_size": None, "balance": balance}
    if batch.config.micro_batch.size is not None:
        limit = batch.config.micro_batch.model_copy(update={"full": draw(st.booleans())})
        changes["micro_batch"] = limit
    drawn = [draw(st.sampled_from("abc")) for _ in batch.lengths]
    names = list(dict.fromkeys(drawn))
    return Batch(batch.groups, batch.config.model_copy(update=changes)), [names.index(name) for name in drawn]


def planned_or_refused(batch: Batch, partitions: Sequence[int]) -> list[MiniBatchPlan] | None:
    try:
        return planned(batch.groups, batch.config, partitions)
    except InvalidArgumentError:
        return None


def alone(batch: Batch, plan: MiniBatchPlan, partitions: Sequence[int], partition: int) -> tuple[Batch, list[int]]:
    """The rows of one partition that the mini-batch trains, as a batch of their own, and their numbers."""
    rows = [row for row in range(plan.start, plan.kept_end) if partitions[row] == partition]
    bounds = batch.bounds
    groups = [[row for row in rows if bounds[group] <= row < bounds[group + 1]] for group in plan.groups]
    config = batch.config.model_copy(update={"policy_mini_batch_size": len(groups), "on_misaligned": "pad"})
    if config.micro_batch.count is not None:
        count = plan.partitions.tolist().count(partition)
        config = config.model_copy(update={"micro_batch": config.micro_batch.model_copy(update={"count": count})})
    return Batch([[batch.lengths[row] for row in group] for group in groups if group], config), rows


@given(partitioned(micro_batch=ANY, on_misaligned=PADDED) | partitioned(on_misaligned=DROPPING | STRICT))
def test_each_partition_is_scheduled_as_if_it_were_the_mini_batch(drawn: tuple[Batch, list[int]]) -> None:
    batch, partitions = drawn
    for plan in planned_or_refused(batch, partitions) or []:
        order = list(dict.fromkeys(partitions[plan.start : plan.kept_end]))
        assert list(dict.fromkeys(plan.partitions.tolist())) == order
        ranks = micro_batches(plan)
        begin = 0
        for partition in order:
            own, rows = alone(batch, plan, partitions, partition)
            (expected,) = planned(own.groups, own.config)
            end = begin + expected.micro_batches_per_rank
            assert set(plan.partitions[begin:end].tolist()) == {partition}
            assert [rank[begin:end] for rank in ranks] == [
                [[PADDING if row == PADDING else rows[row] for row in micro] for micro in rank]
                for rank in micro_batches(expected)
            ]
            begin = end
        assert {len(rank) for rank in ranks} == {begin}


@given(partitioned(micro_batch=ANY, on_misaligned=PADDED) | partitioned(on_misaligned=DROPPING | STRICT))
def test_no_micro_batch_mixes_partitions_and_every_kept_row_trains_once(drawn: tuple[Batch, list[int]]) -> None:
    batch, partitions = drawn
    for plan in planned_or_refused(batch, partitions) or []:
        assert real_rows(plan) == list(range(plan.start, plan.kept_end))
        for rank in micro_batches(plan):
            for micro, partition in zip(rank, plan.partitions.tolist(), strict=True):
                assert {partitions[row] for row in micro if row != PADDING} <= {partition}
        if batch.config.micro_batch.size is not None:
            assert len({len(rank.rows) for rank in plan.ranks}) == 1
        if batch.config.micro_batch.count is not None:
            assert plan.micro_batches_per_rank == batch.config.micro_batch.count


@given(partitioned(on_misaligned=DROPPING))
def test_groups_are_dropped_until_every_partition_can_be_aligned(drawn: tuple[Batch, list[int]]) -> None:
    batch, partitions = drawn
    size, count = batch.config.policy_mini_batch_size, len(batch.groups)
    for index, first in enumerate(range(0, count, size)):
        mini_batch = range(first, min(first + size, count))
        kept = next((n for n in range(len(mini_batch), 0, -1) if fits(batch, partitions, mini_batch, n)), None)
        plans = planned_or_refused(batch, partitions)
        if kept is None:
            assert plans is None
            return
        assert plans is None or len(plans[index].groups) == kept


def fits(batch: Batch, partitions: Sequence[int], mini_batch: range, kept: int) -> bool:
    """Whether the first groups of a mini-batch can be aligned, each partition by itself."""
    rows = range(batch.bounds[mini_batch.start], batch.bounds[mini_batch.start + kept])
    if kept < len(mini_batch) and len(rows) < batch.config.align_to:
        return False
    for partition in {partitions[row] for row in rows}:
        mine = [batch.lengths[row] for row in rows if partitions[row] == partition]
        config = batch.config.model_copy(update={"policy_mini_batch_size": 1, "on_misaligned": "error"})
        if naive_kept(Batch([mine], config), range(1)) is None:
            return False
    return True


@given(batches(micro_batch=ANY, on_misaligned=PADDED) | batches(on_misaligned=DROPPING))
def test_one_partition_is_as_good_as_none(batch: Batch) -> None:
    plain = planned_or_refused(batch, [0] * len(batch.lengths))
    assume(plain is not None)
    assert repr(plain) == repr(planned(batch.groups, batch.config))


def test_micro_batches_of_a_fixed_number_go_where_most_rows_are() -> None:
    config = settings_of(micro_batch={"count": 4}, dp_size=2)
    (plan,) = planned([[2] * 10], config, [0] * 2 + [1] * 8)
    assert plan.partitions.tolist() == [0, 1, 1, 1]
    assert all_micro_batches(plan) == [[0], [2, 3], [4], [5], [1], [6, 7], [8], [9]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch": {"count": 1}}, "policy mini-batch 0: its rows have 2 partitions, .* raise the count"),
        ({"micro_batch": {"size": 8192, "full": True}, "dp_size": 16}, "the limit is 131072 in total; send fewer part"),
    ],
)
def test_partitions_that_micro_batches_cannot_be_divided_among_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        planned([[2, 2]], settings_of(**settings), [0, 1])


SETTINGS: dict[str, Any] = {
    "train_batch_size": 1,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"max_tokens": 64},
    "step_wise": True,
    "merge": "prefix",
}


def steps(sample: int, *partitions: str, **changes: Any) -> list[dict[str, Any]]:
    """A trajectory whose steps extend each other."""
    return [
        {
            "uid": "a",
            "sample": sample,
            "step": step,
            "is_last_step": step == len(partitions) - 1,
            "prompt_token_ids": list(range(1, 3 + 2 * step)),
            "response_ids": [3 + 2 * step],
            "loss_mask": [1],
            "reward": float(sample),
            **({"partition": partition} if partition else {}),
            **changes,
        }
        for step, partition in enumerate(partitions)
    ]


def built(rows: list[dict[str, Any]], **changes: Any) -> BuiltBatch:
    return build_batch(from_rows(rows), parse_config(SETTINGS | changes), run="r", batch=0)


@pytest.mark.parametrize("merge", ["prefix", "tree"])
def test_steps_of_different_partitions_are_rows_of_their_own_and_reported(merge: str) -> None:
    plan = built([*steps(0, "", "sft", "sft"), *steps(1, "", "")], merge=merge).plan
    assert plan.rows == 3
    (mismatch,) = plan.merge_mismatches
    assert (mismatch.sample, mismatch.step, mismatch.column) == (0, 1, "partition")


@pytest.mark.parametrize("layout", ["left_padded", "packed", "prefix_tree"])
def test_plan_metadata_and_micro_batches_name_the_partition(layout: str) -> None:
    rows = [*steps(0, "", "sft"), *steps(1, "sft", "")]
    batch = built(rows, layout=layout, dp_size=2)
    assert [part.partitions for part in batch.plan.mini_batches] == [["", "sft"]]
    names = {0: "", 1: "sft", 2: "sft", 3: ""}
    for shard in batch.shards:
        micros = list(as_shard(naive.shard_bytes(shard)).micro_batches())
        assert [micro.partition for micro in micros] == ["", "sft"]
        for micro in micros:
            assert {names[row] for row in micro["row"].tolist() if row != PADDING} <= {micro.partition}


def test_without_partitions_plans_and_shards_do_not_mention_them() -> None:
    batch = built([*steps(0, ""), *steps(1, "")])
    assert b"partition" not in encode_plan(batch.plan)
    (shard,) = batch.shards
    (micro,) = as_shard(naive.shard_bytes(shard)).micro_batches()
    assert "partitions" not in micro.metadata
    assert micro.partition == ""


def test_rows_with_a_partition_are_refused_where_a_mini_batch_is_a_number_of_rows() -> None:
    settings = {"mini_batch_unit": "sequence", "micro_batch": {"size": 1}}
    with pytest.raises(InvalidArgumentError, match=r"sample 0 step 1: partition 'sft' would .*; omit partition, or"):
        built([*steps(0, "", "sft"), *steps(1, "")], **settings)
