"""What a run keeps of its batches for good: small, bounded, and exact in sum."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill_service.pipeline.figures import LEVELS, MOST_TAGS, Figures, GroupCounts
from gristmill_service.run.machine.batch_records import MOST, keep, total
from gristmill_service.run.machine.codec import FORMAT, decode_events, encode_event, record_of
from gristmill_service.run.machine.events import BatchPublished

STAGES = ("queue", "gather", "validate", "merge", "advantage", "schedule", "layout", "plan", "publish")


def record(batch: int, tags: dict[str, GroupCounts] | None = None, **more: Any) -> Figures:
    counts = ("rows", "merged", "trained", "padding", "tokens", "distinct", "elements", "loss_tokens", "merged_tokens")
    fields: dict[str, Any] = {
        **dict.fromkeys(counts, 1 << 20),
        "groups": GroupCounts(32, 256, 100.25, 1 << 20, 20, 4, 100.25, 1 << 10, 1 << 20, 1 << 20, 1 << 16),
        "seconds": 61.125,
        "workers_waited": 3.5,
        "ranks_waited": 1.25,
        "stages": dict.fromkeys(STAGES, 0.25),
        "tags": tags or {},
        "mismatches": {"prompt": 1 << 8, "further": 1 << 8},
        "padding_shares": dict.fromkeys(LEVELS, 0.125),
    }
    return Figures(first=batch, last=batch, at=1.8e9 + batch, **(fields | more))


def kept(batches: int) -> list[Figures]:
    records: list[Figures] = []
    for batch in range(batches):
        keep(records, record(batch, tokens=batch))
    return records


@settings(max_examples=20)
@given(st.integers(1, 3 * MOST))
def test_many_batches_become_few_records_whose_sum_is_exact(batches: int) -> None:
    records = kept(batches)
    assert len(records) <= MOST
    whole = total(records)
    assert whole is not None
    assert (whole.first, whole.last, whole.batches) == (0, batches - 1, batches)
    assert whole.tokens == batches * (batches - 1) // 2
    assert whole.groups.score_sum == 100.25 * batches
    assert whole.stages["merge"] == 0.25 * batches


def test_records_follow_one_another_and_are_of_equally_many_batches() -> None:
    records = kept(10_000)
    assert [one.first for one in records[1:]] == [one.last + 1 for one in records[:-1]]
    assert {one.batches for one in records[:-1]} == {16}
    assert records[-1].batches <= 16


def test_a_batch_of_many_environments_takes_less_than_a_kilobyte_of_the_log() -> None:
    counts = GroupCounts(4, 32, 12.625, 1 << 16, 3, 1, 12.625, 128, 1 << 16, 1 << 16, 1 << 10)
    tags = {f"environment-{number:02}": counts for number in range(MOST_TAGS)}
    with_record = BatchPublished(0, {"policy": 4}, 1 << 30, (), record(0, tags))
    without = BatchPublished(0, {"policy": 4}, 1 << 30)
    assert len(record_of([encode_event(with_record)])) - len(record_of([encode_event(without)])) < 1024
    assert decode_events(record_of([encode_event(with_record)])) == [with_record]


def test_a_log_from_before_records_is_read() -> None:
    fields = {"batch": 3, "mini_batches": {"policy": 1}, "nbytes": 5, "awaits": []}
    old = msgspec.msgpack.encode((FORMAT, [("BatchPublished", fields)]))
    assert decode_events(old) == [BatchPublished(3, {"policy": 1}, 5)]


def test_a_record_from_before_figures_were_added_is_read_and_joined() -> None:
    old = [
        3,
        4,
        2,
        1.5,
        [2, 8, 1.5, 40, 1, 0],
        *range(12),
        1.0,
        0.5,
        0.25,
        {"merge": 0.5},
        {"a": [1, 4, 0.5, 20, 1, 0]},
    ]
    fields = {"batch": 4, "mini_batches": {}, "nbytes": 0, "record": old}
    [event] = decode_events(msgspec.msgpack.encode((FORMAT, [("BatchPublished", fields)])))
    assert isinstance(event, BatchPublished)
    assert event.record is not None
    joined = event.record.joined(record(5, {"a": GroupCounts(groups=2, reward_sum=1.0)}))
    assert (joined.first, joined.last, joined.batches, joined.stalest) == (3, 5, 3, 11)
    assert joined.rows == 0 + (1 << 20)
    assert joined.stages["merge"] == 0.75
    assert joined.tags == {"a": GroupCounts(3, 4, 0.5, 20, 1, 0, 1.0)}
    assert joined.mismatches == {"prompt": 1 << 8, "further": 1 << 8}


def test_of_many_tags_those_with_most_groups_are_kept() -> None:
    records: list[Figures] = [record(0, {"a": GroupCounts(groups=1)})]
    crowd = {f"t{number}": GroupCounts(groups=2) for number in range(MOST_TAGS)}
    whole = total([*records, record(1, crowd)])
    assert whole is not None
    assert whole.tags == crowd


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_counts_of_groups_add_up(pairs: list[tuple[int, int]]) -> None:
    counts = sum((GroupCounts(groups=groups, score_sum=float(score)) for groups, score in pairs), GroupCounts())
    assert counts.groups == sum(groups for groups, _ in pairs)
    assert counts.score_sum == pytest.approx(sum(score for _, score in pairs))
