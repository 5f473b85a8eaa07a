"""What a run does besides its calls: building batches again and again, and removing what is not needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gristmill.errors import UnavailableError
from gristmill_service.run.machine import archived_groups
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.archived_groups import Segment, digests_of
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import GroupKey
from tests.on_loop import on_loop
from tests.run.harness import Bench, BuildBatch, Shelf, group_rows, row


def blocked(shelf: Shelf, build_batch: BuildBatch | None = None) -> Bench:
    """A run whose batch is blocked on capacity in the store."""
    bench = Bench(store=shelf, build_batch=build_batch, train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    assert "batch 0 waits" in bench.run.blocked_reason
    return bench


def test_a_batch_that_was_blocked_and_is_given_up_blocks_nothing_any_more() -> None:
    bench = blocked(Shelf(places=0))
    bench.run.resume("policy", Checkpoint(Position(1), give_up_reason="lost"), "launch")
    bench.now += 2
    bench.run.tick()
    bench.make_batches()
    assert bench.run.blocked_reason == ""
    bench.now += 2
    bench.run.tick()
    assert bench.builders.waiting == []


def test_a_blocked_batch_is_tried_once_at_a_time_and_not_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = blocked(Shelf(places=0))
    for _ in range(3):
        bench.run.tick()
    assert bench.builders.waiting == [], "the next try is due a second after this one"
    bench.now += 2
    for _ in range(5):
        bench.run.tick()
    assert len(bench.builders.waiting) == 1

    publish, bench.now = bench.store.publish, bench.now + 2

    def publish_slowly(*given: Any) -> None:
        bench.now += 100
        bench.run._target.tick()
        publish(*given)

    monkeypatch.setattr(bench.store, "publish", publish_slowly)
    bench.builders.build()
    bench.run.tick()
    assert bench.builders.waiting == [], "the next try is due after three times as long as this one took"
    bench.now += 310
    bench.run.tick()
    assert len(bench.builders.waiting) == 1


def test_a_task_that_ends_in_a_defect_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(row("a", attempt=0))
    monkeypatch.setattr(bench.log, "remove", lambda numbers: 1 / 0)
    bench.submit(row("a", attempt=1))
    assert set(bench.log.tables) == {0, 1}
    monkeypatch.undo()
    bench.submit(row("a", attempt=2), row("a", 1, reward=2.0))
    bench.make_batches()
    assert set(bench.log.tables) == {0, 2}
    assert bench.run.batch(0).state is BatchState.PUBLISHED


def test_a_batch_that_was_computed_when_its_run_was_lost_is_not_published() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.run.lose()
    bench.builders.build()
    assert bench.store.batches == {}
    bench.reopen()
    bench.make_batches()
    assert bench.run.batch(0).state is BatchState.PUBLISHED


def test_a_batch_that_was_abandoned_is_not_published_and_nobody_waits_for_it() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    _, build = bench.builders.waiting[0]
    bench.run.abandon_build()
    bench.run.wait_idle()
    with pytest.raises(UnavailableError, match="abandoned"):
        build()
    assert bench.store.batches == {}


def test_a_batch_that_is_being_published_is_not_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    publish = bench.store.publish

    def publish_and_abandon(*given: Any) -> int:
        bench.run._target.abandon_build()
        return int(publish(*given))

    monkeypatch.setattr(bench.store, "publish", publish_and_abandon)
    bench.make_batches()
    assert bench.run.batch(0).state is BatchState.PUBLISHED


def test_large_segments_of_archived_groups_are_merged_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_groups, "_SMALL", 10)
    bench, merging = Bench(), list[threading.Thread]()
    archive, merged = bench.state.closed.archive, Segment.merged

    def noted(one: Segment, other: Segment) -> Segment:
        merging.append(threading.current_thread())
        return merged(one, other)

    monkeypatch.setattr(Segment, "merged", noted)
    keys = [GroupKey(0, f"u{number}") for number in range(60)]
    for first in (0, 20, 40):
        part = keys[first : first + 20]
        archive.add(digests_of(bench.run.run_id, part), [first] * len(part))
    assert (len(archive.segments), merging) == (3, [])
    bench.run.tick()
    assert len(archive.segments) == 1
    assert len(merging) == 2
    assert on_loop(threading.current_thread) not in merging
    assert bench.state.outcomes(keys) == {key: number // 20 * 20 for number, key in enumerate(keys)}
