"""The runs of a service, with its threads."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import (
    AlreadyExistsError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.shard_store import ShardStore
from tests.on_loop import Run, Runs, on_loop
from tests.run.harness import CONFIG, BuildBatch, Shelf, group_rows, row, table, wait_until

PATIENCE_S = 60.0


@pytest.fixture
def serve() -> Iterator[Callable[..., Runs]]:
    """Starts the runs of a service; closed with the test."""
    started = []

    def start(store: ShardStore | None = None, **more: Any) -> Runs:
        runs = Runs(store or Shelf(), **({"build_batch": BuildBatch()} | more), make_monitor=Monitor)
        started.append(runs)
        return runs

    yield start
    for runs in started:
        runs.close(PATIENCE_S)


def await_batch(run: Run, number: int) -> dict[str, Any]:
    wait_until(lambda: run.batch(number).state is not BatchState.PENDING)
    plan: dict[str, Any] = json.loads(run.batch(number).plan)
    return plan


def train(run: Run, batch: int) -> None:
    plan = await_batch(run, batch)
    for index in range(len([part for part in plan["mini_batches"] if part["model"] == "policy"])):
        run.acknowledge("policy", 0, Position(batch, 0, index), 0, commit=True)


class TestNames:
    def test_the_same_name_with_the_same_configuration_is_the_same_run(self, serve: Callable[..., Runs]) -> None:
        runs = serve()
        assert runs.create("run", CONFIG) == ([], True)
        run = runs.get("run")
        assert runs.create("run", dict(CONFIG)) == ([], False)
        assert runs.get("run") is run
        with pytest.raises(AlreadyExistsError, match="train_batch_size was 2 and is now 4"):
            runs.create("run", CONFIG | {"train_batch_size": 4})

    @pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "\ud800"])
    def test_a_name_that_is_no_name_is_refused(self, serve: Callable[..., Runs], name: str) -> None:
        with pytest.raises(InvalidArgumentError, match="1 to 128 printable characters"):
            serve().create(name, CONFIG)

    @pytest.mark.parametrize("name", ["a/b", "r/groups", "../../etc", ".", ".."])
    def test_a_name_that_no_path_can_have_is_refused(self, serve: Callable[..., Runs], name: str) -> None:
        with pytest.raises(InvalidArgumentError, match="cannot be part of a URL's path"):
            serve().create(name, CONFIG)

    def test_an_unknown_run_is_named_with_those_that_exist(self, serve: Callable[..., Runs]) -> None:
        runs = serve()
        runs.create("b", CONFIG)
        runs.create("a", CONFIG)
        assert runs.names() == ["a", "b"]
        with pytest.raises(NotFoundError, match=r"run 'c' does not exist.*a, b"):
            runs.get("c")

    def test_many_who_create_the_same_run_at_once_create_it_once(self, serve: Callable[..., Runs]) -> None:
        runs = serve()
        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(lambda _: runs.create("run", CONFIG)[1], range(64)))
        assert created.count(True) == 1


def test_stragglers_are_closed_by_the_clock(serve: Callable[..., Runs]) -> None:
    now = [0.0]
    runs = serve(clock=lambda: now[0])
    runs.create("run", CONFIG | {"group_timeout_s": 60.0})
    runs.get("run").submit(table(row("a")))
    runs.tick()
    assert runs.get("run").status().groups_complete == 0
    now[0] = 60.0
    wait_until(lambda: runs.get("run").status().groups_complete == 1)


class TestFullStore:
    def test_it_is_not_failed_while_what_was_freed_is_still_being_removed(self, serve: Callable[..., Runs]) -> None:
        class SlowShelf(Shelf):
            removing, may_remove = threading.Event(), threading.Event()

            def free(self, run: str, batch: int) -> None:
                self.removing.set()
                assert self.may_remove.wait(PATIENCE_S)
                super().free(run, batch)

        shelf = SlowShelf(places=1)
        runs = serve(shelf)
        runs.create("run", CONFIG | {"train_batch_size": 1})
        run = runs.get("run")
        run.submit(table(*group_rows("a")))
        await_batch(run, 0)
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train, run, 0)
            assert shelf.removing.wait(PATIENCE_S)
            run.submit(table(*group_rows("b")))
            assert shelf.tried.wait(PATIENCE_S)
            shelf.may_remove.set()
            training.result(PATIENCE_S)
        await_batch(run, 1)

    @pytest.mark.parametrize(("places", "why"), [(0, "the shelf is full"), (-1, "the shelf refuses this user")])
    def test_a_batch_waits_for_a_store_that_takes_it(self, serve: Callable[..., Runs], places: int, why: str) -> None:
        shelf = Shelf(places)
        runs = serve(shelf)
        runs.create("run", CONFIG | {"train_batch_size": 1})
        run = runs.get("run")
        run.submit(table(*group_rows("a")))
        assert shelf.tried.wait(PATIENCE_S)
        wait_until(lambda: bool(runs.unhealthy_reason()))
        assert run.batch(0).state is BatchState.PENDING
        assert f"batch 0 waits: {why}" in run.blocked_reason
        shelf.places = 1
        await_batch(run, 0)
        wait_until(lambda: not runs.unhealthy_reason())

    def test_who_waits_for_room_is_ended_by_shutting_down(self, serve: Callable[..., Runs]) -> None:
        shelf = Shelf(places=1)
        runs = serve(shelf)
        runs.create("run", CONFIG | {"train_batch_size": 1})
        runs.get("run").submit(table(*group_rows("a"), *group_rows("b")))
        assert shelf.tried.wait(PATIENCE_S)
        began = time.monotonic()
        runs.close(PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S


class TestDeleting:
    def test_a_deleted_run_is_gone_with_all_it_held_and_waiting_callers_learn_it(
        self, serve: Callable[..., Runs]
    ) -> None:
        shelf = Shelf()
        runs = serve(shelf)
        runs.create("run", CONFIG)
        run = runs.get("run")
        run.submit(table(*group_rows("a"), *group_rows("b")))
        await_batch(run, 0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait_until, lambda: run.batch(1).state is not BatchState.PENDING)
            runs.delete("run")
            with pytest.raises(NotFoundError, match="run 'run' was deleted"):
                waiting.result(PATIENCE_S)
        assert shelf.batches == {}
        assert runs.names() == []
        for call in (run.status, run.finish, lambda: run.submit(table(row("c"))), run.policy_version):
            with pytest.raises(NotFoundError):
                call()
        with pytest.raises(NotFoundError):
            runs.delete("run")

    def test_a_batch_that_is_being_made_leaves_nothing_and_does_not_meet_a_new_run_of_the_name(
        self, serve: Callable[..., Runs]
    ) -> None:
        old_gate, gate, shelf = threading.Event(), threading.Event(), Shelf()
        build_batch = BuildBatch(gate=old_gate)
        runs = serve(shelf, build_batch=build_batch)
        runs.create("run", CONFIG | {"train_batch_size": 1})
        runs.get("run").submit(table(*group_rows("old"), *group_rows("older")))
        assert build_batch.entered.wait(PATIENCE_S)
        build_batch._gate = gate
        runs.delete("run")
        runs.create("run", CONFIG)
        run = runs.get("run")
        run.submit(table(*group_rows("new"), *group_rows("newer")))
        assert run.batch(0).state is BatchState.PENDING
        # One after the other: the batch of the deleted run would else be the last that this notes, or not.
        old_gate.set()
        wait_until(lambda: 0 in build_batch.batches)
        gate.set()
        await_batch(run, 0)
        assert list(dict.fromkeys(build_batch.batches[0].uids)) == ["new", "newer"]
        assert list(shelf.batches) == [("run", 0)]

    def test_the_name_is_free_only_when_nothing_of_the_run_is_left(self, serve: Callable[..., Runs]) -> None:
        class SlowShelf(Shelf):
            deleting, may_delete = threading.Event(), threading.Event()

            def delete_run(self, run: str) -> None:
                self.deleting.set()
                assert self.may_delete.wait(PATIENCE_S)
                super().delete_run(run)

        shelf = SlowShelf()
        runs = serve(shelf)
        runs.create("run", CONFIG)
        with ThreadPoolExecutor(1) as pool:
            deleting = pool.submit(runs.delete, "run")
            assert shelf.deleting.wait(PATIENCE_S)
            with pytest.raises(UnavailableError, match="run 'run' is being deleted; retry"):
                runs.create("run", CONFIG)
            shelf.may_delete.set()
            deleting.result(PATIENCE_S)
        assert runs.create("run", CONFIG)[1]

    def test_what_it_was_about_to_remove_is_not_removed_from_a_new_run_of_the_name(
        self, serve: Callable[..., Runs]
    ) -> None:
        order = []

        class SlowShelf(Shelf):
            removing, may_remove = threading.Event(), threading.Event()

            def free(self, run: str, batch: int) -> None:
                self.removing.set()
                assert self.may_remove.wait(PATIENCE_S)
                super().free(run, batch)
                order.append("freed")

            def delete_run(self, run: str) -> None:
                order.append("deleted")
                super().delete_run(run)

        shelf = SlowShelf()
        runs = serve(shelf)
        runs.create("run", CONFIG | {"train_batch_size": 1})
        run = runs.get("run")
        run.submit(table(*group_rows("a")))
        await_batch(run, 0)
        with ThreadPoolExecutor(2) as pool:
            training = pool.submit(train, run, 0)
            assert shelf.removing.wait(PATIENCE_S)
            deleting = pool.submit(runs.delete, "run")
            wait_until(lambda: run.is_deleted)
            shelf.may_remove.set()
            training.result(PATIENCE_S)
            deleting.result(PATIENCE_S)
        assert order == ["freed", "deleted"]

    def test_its_bytes_are_given_back_to_the_other_runs(self, serve: Callable[..., Runs]) -> None:
        runs = serve(max_row_bytes=100)
        for name in ("one", "another", "other"):
            runs.create(name, CONFIG | {"max_buffered_batches": 9})
        # Each has its share, and together they have more than all.
        for name in ("one", "another"):
            runs.get(name).submit(table(row("a", response=range(100))))
        other = runs.get("other")
        assert [admission.name for admission in other.begin_groups(0, ["a", "b", "c"]).admissions].count("NO_ROOM") == 1
        runs.delete("one")
        assert other.begin_groups(0, ["c"]).admissions[0].name == "ADMITTED"

    def test_creating_and_deleting_at_once_never_breaks(self, serve: Callable[..., Runs]) -> None:
        runs = serve()
        seen = []

        def churn(_: int) -> None:
            try:
                runs.create("run", CONFIG | {"train_batch_size": 1})
                runs.get("run").submit(table(*group_rows("a")))
                runs.delete("run")
            except GristmillError as error:
                seen.append(type(error))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(churn, range(200)))
        assert set(seen) <= {NotFoundError, UnavailableError}
        runs.create("run", CONFIG)


class TestClosing:
    def test_what_is_being_made_is_finished_and_every_call_is_refused(self, serve: Callable[..., Runs]) -> None:
        gate, shelf = threading.Event(), Shelf()
        build_batch = BuildBatch(gate=gate)
        runs = serve(shelf, build_batch=build_batch)
        runs.create("run", CONFIG)
        run = runs.get("run")
        run.submit(table(*group_rows("a"), *group_rows("b")))
        assert build_batch.entered.wait(PATIENCE_S)
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(await_batch, run, 0)
            closing = pool.submit(runs.close, PATIENCE_S)
            with pytest.raises(UnavailableError, match="shutting down"):
                waiting.result(PATIENCE_S)
            gate.set()
            closing.result(PATIENCE_S)
        assert ("run", 0) in shelf.batches
        for call in (run.status, lambda: runs.create("new", CONFIG), lambda: run.announce(1)):
            with pytest.raises(UnavailableError):
                call()
        runs.tick()
        runs.close(PATIENCE_S)

    def test_it_does_not_wait_longer_than_allowed(self, serve: Callable[..., Runs]) -> None:
        gate = threading.Event()
        build_batch = BuildBatch(gate=gate)
        runs = serve(build_batch=build_batch)
        runs.create("run", CONFIG | {"train_batch_size": 1})
        runs.get("run").submit(table(*group_rows("a")))
        assert build_batch.entered.wait(PATIENCE_S)
        began = time.monotonic()
        runs.close(0.01)
        assert time.monotonic() - began < PATIENCE_S / 2
        gate.set()


def test_logs_are_synced_each_second_also_while_one_takes_long_to_be_cleaned_up(
    tmp_path: Path, serve: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint on a slow disk took the others' promised second, and its own run's."""
    synced, flushing, may_end = list[str](), threading.Event(), threading.Event()

    def flush(log: JournalRunLog) -> None:
        flushing.set()
        assert may_end.wait(20)

    monkeypatch.setattr(JournalRunLog, "flush", flush)
    monkeypatch.setattr(JournalRunLog, "sync", lambda log: synced.append(log.run_id))
    runs = serve(run_store=JournalRunStore(tmp_path))
    for name in ("one", "two"):
        runs.create(name, CONFIG)
    assert flushing.wait(20)
    synced.clear()
    wait_until(lambda: all(synced.count(runs.get(name).run_id) >= 2 for name in ("one", "two")))
    may_end.set()


def test_runs_that_close_when_their_timers_begin_leave_no_work_unawaited(serve: Callable[..., Runs]) -> None:
    runs = serve()
    runs.create("r", CONFIG)

    async def close_at_once() -> None:
        timer = asyncio.ensure_future(runs._target._work_on_logs(lambda log: None))
        # It has tasks for the runs by then, which have not begun.
        await asyncio.sleep(0)
        timer.cancel()
        await asyncio.wait([timer])

    on_loop(close_at_once)
    gc.collect()
