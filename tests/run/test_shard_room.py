"""A store that several runs fill: a run that finds it full goes on with whatever any of them gives back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gristmill.errors import FailedPreconditionError, NotFoundError, UnavailableError
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run.capacity import ShardRoom
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.machine.decisions.resume import Checkpoint
from tests.on_loop import Runs
from tests.run.harness import CONFIG, Bench, BuildBatch, Built, Shelf, group_rows, table, wait_until
from tests.run.test_served_bytes import PATIENCE_S, await_batch


def test_a_run_that_waits_is_notified_of_the_next_removal_once() -> None:
    room, calls = ShardRoom(), list[str]()
    room.wait(room.removals, lambda: calls.append("first"))
    assert calls == []
    room.removed()
    room.removed()
    assert calls == ["first"]


def test_a_run_that_waits_again_after_each_attempt_of_its_own_is_notified_once() -> None:
    class Waiting:
        retries = 0

        def retry(self) -> None:
            self.retries += 1

    room, run = ShardRoom(), Waiting()
    for _ in range(100):
        room.wait(room.removals, run.retry)
    room.removed()
    assert run.retries == 1


def test_a_removal_between_the_attempt_and_the_wait_is_not_missed() -> None:
    room, calls = ShardRoom(), list[str]()
    seen = room.removals
    room.removed()
    room.wait(seen, lambda: calls.append("at once"))
    assert calls == ["at once"]


@pytest.mark.parametrize("ending", ["trained on", "deleted"])
def test_a_run_whose_batch_waits_for_another_runs_room_goes_on_when_that_comes(ending: str) -> None:
    shelf = Shelf(places=1)
    runs = Runs(shelf, build_batch=BuildBatch(), make_monitor=Monitor)
    for name in ("one", "other"):
        runs.create(name, CONFIG | {"train_batch_size": 1})
        runs.get(name).submit(table(*group_rows("a")))
        if name == "one":
            await_batch(runs.get("one"), 0)
    assert shelf.tried.wait(PATIENCE_S)
    assert runs.get("other").batch(0).state is BatchState.PENDING
    if ending == "deleted":
        runs.delete("one")
    else:
        runs.get("one").acknowledge("policy", 0, Position(0), 0, commit=True)
    await_batch(runs.get("other"), 0)
    assert runs.get("other").status().failed_batches == {}
    runs.close(PATIENCE_S)


def test_a_run_deleted_while_its_batch_waits_for_room_is_in_no_ones_way() -> None:
    shelf = Shelf(places=1)
    runs = Runs(shelf, build_batch=BuildBatch(), make_monitor=Monitor)
    for name in ("one", "other", "third"):
        runs.create(name, CONFIG | {"train_batch_size": 1})
    runs.get("one").submit(table(*group_rows("a")))
    await_batch(runs.get("one"), 0)
    runs.get("other").submit(table(*group_rows("a")))
    assert shelf.tried.wait(PATIENCE_S)
    runs.get("third").submit(table(*group_rows("a")))
    runs.delete("other")
    runs.delete("one")
    await_batch(runs.get("third"), 0)
    assert list(shelf.batches) == [("third", 0)]
    runs.close(PATIENCE_S)


def test_one_runs_full_store_and_long_build_delay_no_other_run() -> None:
    gate = threading.Event()

    class SlowForOne(BuildBatch):
        def __call__(self, *args: Any, run: str, **named: Any) -> Built:
            if run == "slow":
                gate.wait(PATIENCE_S)
            return super().__call__(*args, run=run, **named)

    runs = Runs(Shelf(), build_batch=SlowForOne(), make_monitor=Monitor)
    for name in ("slow", "quick"):
        runs.create(name, CONFIG | {"train_batch_size": 1})
        runs.get(name).submit(table(*group_rows("a")))
    await_batch(runs.get("quick"), 0)
    assert runs.get("slow").batch(0).state is BatchState.PENDING
    gate.set()
    await_batch(runs.get("slow"), 0)
    runs.close(PATIENCE_S)


def test_batches_of_a_run_that_waits_for_room_are_published_in_order() -> None:
    shelf = Shelf(places=1)
    runs = Runs(shelf, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG | {"train_batch_size": 1, "max_buffered_batches": 4})
    run = runs.get("run")
    run.submit(table(*(row for uid in "abc" for row in group_rows(uid))))
    for number in range(3):
        await_batch(run, number)
        assert list(shelf.batches) == [("run", number)]
        run.acknowledge("policy", 0, Position(number), 0, commit=True)
    runs.close(PATIENCE_S)


@pytest.mark.parametrize("error", [FailedPreconditionError("NOPERM"), UnavailableError("away"), PermissionError("no")])
def test_an_acknowledgement_does_not_fail_for_shards_that_cannot_be_removed_and_they_are_removed_later(
    error: Exception,
) -> None:
    class Stuck(Shelf):
        is_stuck = True

        def free(self, run: str, batch: int) -> None:
            if self.is_stuck:
                raise error
            super().free(run, batch)

    shelf = Stuck()
    bench = Bench(train_batch_size=1, store=shelf)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    assert bench.run.acknowledge("policy", 0, Position(0), 0, commit=True).position == Position(1)
    assert list(shelf.batches) == [("run", 0)]
    shelf.is_stuck = False
    bench.now += 1
    bench.run.tick()
    assert shelf.batches == {}


def test_a_run_that_is_deleted_while_the_service_shuts_down_leaves_nothing() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.run.close(NotFoundError("deleted"))
    bench.run.close(UnavailableError("shutting down"))
    bench.make_batches()
    assert bench.store.batches == {}
    with pytest.raises(NotFoundError):
        bench.run.status()


def test_a_batch_built_while_the_run_is_deleted_leaves_no_shards() -> None:
    gate, shelf = threading.Event(), Shelf()
    build = BuildBatch(gate=gate)
    runs = Runs(shelf, build_batch=build, make_monitor=Monitor)
    runs.create("run", CONFIG | {"train_batch_size": 1})
    runs.get("run").submit(table(*group_rows("a")))
    assert build.entered.wait(PATIENCE_S)
    runs.delete("run")
    gate.set()
    runs.create("other", CONFIG | {"train_batch_size": 1})
    runs.get("other").submit(table(*group_rows("a")))
    await_batch(runs.get("other"), 0)
    wait_until(lambda: list(shelf.batches) == [("other", 0)])
    runs.close(PATIENCE_S)


def test_a_batch_that_is_cut_again_replaces_its_shards_also_in_a_store_that_refuses_to_write_over_them() -> None:
    bench = Bench(train_batch_size=1, dp_size=1, micro_batch={"size": 1})
    bench.submit(*group_rows("a"))
    for launch, dp_size in enumerate((2, 1, 2)):
        bench.make_batches()
        bench.run.resume("policy", Checkpoint(None), f"launch {launch}", dp_size)
    bench.make_batches()
    assert bench.run.batch(0).state is BatchState.PUBLISHED
    assert len(bench.store.batches["run", 0][1]) == 2
    assert bench.run.status().failed_batches == {}
