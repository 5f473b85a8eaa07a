"""What a run leaves to other threads: building batches again and again, and removing rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.commands.trainer_commands import Checkpoint
from tests.run.harness import Bench, BuildBatch, Shelf, group_rows, row


def blocked(shelf: Shelf, build_batch: BuildBatch | None = None) -> Bench:
    """A run whose batch waits for room on the shelf."""
    bench = Bench(store=shelf, build_batch=build_batch, train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    assert "batch 0 waits" in bench.run.blocked_reason
    return bench


def test_rows_are_removed_when_what_took_their_place_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.submit(row("a", attempt=0))
    calls: list[str] = []
    append = bench.log.append

    def noted(record: bytes, tables: Collection[int] = ()) -> None:
        calls.append("append")
        append(record, tables)

    monkeypatch.setattr(bench.log, "append", noted)
    monkeypatch.setattr(bench.log, "sync", lambda: calls.append("sync"))
    monkeypatch.setattr(bench.log, "remove", lambda numbers: calls.append("remove"))
    bench.submit(row("a", attempt=1))
    assert calls[: calls.index("remove") + 1] == ["append", "sync", "remove"]


def test_rows_of_a_record_that_may_have_been_written_are_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.submit(row("a"))
    removed: list[int] = []
    append = bench.log.append

    def fail_afterwards(record: bytes, tables: Collection[int] = ()) -> None:
        append(record, tables)
        raise RuntimeError("a defect")

    monkeypatch.setattr(bench.log, "append", fail_afterwards)
    monkeypatch.setattr(bench.log, "remove", removed.extend)
    with pytest.raises(RuntimeError, match="a defect"):
        bench.submit(row("b"))
    assert removed == []


def test_a_batch_that_was_blocked_and_is_given_up_blocks_nothing_any_more() -> None:
    bench = blocked(Shelf(places=0))
    bench.run.resume("policy", Checkpoint(Position(1), give_up_reason="lost"), "launch")
    bench.now += 2
    bench.run.tick()
    bench.make_batches()
    assert bench.run.blocked_reason == ""
    assert not bench.run.is_due


def test_a_blocked_batch_is_tried_once_at_a_time_and_not_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    build_batch = BuildBatch()
    bench = blocked(Shelf(places=0), build_batch=build_batch)
    queued: list[Callable[[], None]] = []

    def submit(key: tuple[str, str], task: Callable[[], None]) -> None:
        if key[0] == "build":
            queued.append(task)

    monkeypatch.setattr(bench.tasks, "submit", submit)
    bench.now += 2
    for _ in range(5):
        bench.run.tick()
    assert len(queued) == 1

    publish, bench.now = bench.store.publish, bench.now + 2

    def publish_slowly(*given: Any) -> None:
        bench.now += 100
        bench.run.tick()
        publish(*given)

    monkeypatch.setattr(bench.store, "publish", publish_slowly)
    task = queued.pop()
    task()
    bench.run.tick()
    assert queued == [], "the next try is due a second after this one failed"
    bench.now += 2
    bench.run.tick()
    assert len(queued) == 1
