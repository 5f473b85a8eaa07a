"""What a run keeps of its batches for good: small, bounded, and exact in sum."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_service.pipeline.group_counts import GroupCounts, summed
from gristmill_service.run.machine.batch_records import MOST, MOST_TAGS, BatchRecord, keep, total
from gristmill_service.run.machine.codec import FORMAT, decode_events, encode_events
from gristmill_service.run.machine.events import BatchPublished

STAGES = ("queue", "gather", "validate", "merge", "advantage", "schedule", "layout", "plan", "publish")


def record(batch: int, tags: dict[str, GroupCounts] | None = None, **more: Any) -> BatchRecord:
    groups = GroupCounts(32, 256, 100.25, 1 << 20, 20, 4)
    sums = dict.fromkeys(BatchRecord._fields[5:17], 1 << 20)
    fields: dict[str, Any] = {
        **sums,
        "seconds": 61.125,
        "workers_waited": 3.5,
        "ranks_waited": 1.25,
        "stages": dict.fromkeys(STAGES, 0.25),
        "tags": tags or {},
    }
    return BatchRecord(batch, batch, 1, 1.8e9 + batch, groups, **(fields | more))


def kept(batches: int) -> list[BatchRecord]:
    found: list[BatchRecord] = []
    for batch in range(batches):
        keep(found, record(batch, tokens=batch))
    return found


@settings(max_examples=20)
@given(st.integers(1, 3 * MOST))
def test_many_batches_become_few_records_whose_sum_is_exact(batches: int) -> None:
    found = kept(batches)
    assert len(found) <= MOST
    whole = total(found)
    assert whole is not None
    assert (whole.first, whole.last, whole.batches) == (0, batches - 1, batches)
    assert whole.tokens == batches * (batches - 1) // 2
    assert whole.groups.score_sum == 100.25 * batches
    assert whole.stages["merge"] == 0.25 * batches


def test_records_follow_one_another_and_are_of_equally_many_batches() -> None:
    found = kept(10_000)
    assert [one.first for one in found[1:]] == [one.last + 1 for one in found[:-1]]
    assert {one.batches for one in found[:-1]} == {16}
    assert found[-1].batches <= 16


def test_a_batch_of_many_environments_takes_less_than_a_kilobyte_of_the_log() -> None:
    tags = {f"environment-{number:02}": GroupCounts(4, 32, 12.625, 1 << 16, 3, 1) for number in range(MOST_TAGS)}
    with_record = BatchPublished(0, {"policy": 4}, 1 << 30, (), record(0, tags))
    without = BatchPublished(0, {"policy": 4}, 1 << 30)
    assert len(encode_events([with_record])) - len(encode_events([without])) < 1024
    assert decode_events(encode_events([with_record])) == [with_record]


def test_a_log_from_before_records_is_read() -> None:
    fields = {"batch": 3, "mini_batches": {"policy": 1}, "nbytes": 5, "awaits": []}
    old = msgspec.msgpack.encode((FORMAT, [("BatchPublished", fields)]))
    assert decode_events(old) == [BatchPublished(3, {"policy": 1}, 5)]


def test_of_many_tags_those_with_most_groups_are_kept() -> None:
    found: list[BatchRecord] = [record(0, {"a": GroupCounts(groups=1)})]
    crowd = {f"t{number}": GroupCounts(groups=2) for number in range(MOST_TAGS)}
    whole = total([*found, record(1, crowd)])
    assert whole is not None
    assert whole.tags == crowd


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_counts_of_groups_add_up(pairs: list[tuple[int, int]]) -> None:
    found = summed(GroupCounts(groups=groups, score_sum=float(score)) for groups, score in pairs)
    assert found.groups == sum(groups for groups, _ in pairs)
    assert found.score_sum == pytest.approx(sum(score for _, score in pairs))
