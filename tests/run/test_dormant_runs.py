"""Runs that have ended and that nobody calls are closed, are still listed, and are opened by a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError, UnavailableError
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.monitoring.health.health import summary
from gristmill_service.monitoring.health.report import described, listed, reported
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.run.waiters import version_is_reached
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.on_loop import Run, Runs, on_loop
from tests.run.harness import CONFIG, BuildBatch, Shelf, group_rows, table, wait_until

PATIENCE_S, DORMANT_S = 60.0, 3600.0

Serve = Callable[..., tuple[Any, Any]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class CountingStore(JournalRunStore):
    """A journal that counts the openings of each run, and refuses marks while `refuses` is set."""

    refuses = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.opened = list[str]()

    def open(self, name: str) -> Any:
        self.opened.append(name)
        return super().open(name)

    def set_dormant(self, name: str, description: bytes) -> None:
        if self.refuses:
            raise UnavailableError("the disk is full")
        super().set_dormant(name, description)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve(tmp_path: Path, clock: Clock) -> Iterator[Serve]:
    """Starts the runs of a service on one journal; ends those that were started before."""
    started: list[tuple[Runs, JournalRunStore]] = []

    def end() -> None:
        while started:
            runs, store = started.pop()
            runs.close(PATIENCE_S)
            store.close()

    def start(**more: Any) -> tuple[Runs, CountingStore]:
        end()
        store = CountingStore(tmp_path)
        runs = Runs(
            Shelf(), store, build_batch=BuildBatch(), make_monitor=Monitor, clock=clock, describe=described, **more
        )
        started.append((runs, store))
        return runs, store

    yield start
    end()


def finished(runs: Runs, name: str = "run") -> Run:
    """A run of one batch, which is trained and freed, and that is finished."""
    runs.create(name, CONFIG | {"train_batch_size": 1})
    run: Run = runs.get(name)
    run.submit(table(*group_rows("a")))
    wait_until(lambda: run.batch(0).state is BatchState.PUBLISHED)
    run.acknowledge("policy", 0, Position(0), 0, commit=True)
    run.finish()
    return run


def own(runs: Runs) -> list[str]:
    return [run.name for run in runs.own()]


def await_dormant(runs: Runs, clock: Clock) -> None:
    clock.now += DORMANT_S
    wait_until(lambda: own(runs) == [])


def test_a_run_that_ended_is_closed_an_hour_after_its_last_call_and_opened_by_the_next(
    serve: Serve, clock: Clock, tmp_path: Path
) -> None:
    runs, store = serve()
    finished(runs)
    clock.now += DORMANT_S - 1
    before = runs.get("run").status()
    clock.now += DORMANT_S - 1
    on_loop(runs._target._close_dormant)
    assert own(runs) == ["run"], "it was called less than an hour ago"
    shown = on_loop(summary, runs.get("run", is_call=False))
    await_dormant(runs, clock)
    assert {path.name for path in (tmp_path / "run-run").iterdir()} == {"journal.sqlite", "dormant.json"}
    assert (runs.names(), runs.leases()["dormant"], runs.usage()) == (["run"], 1, {})
    description = runs.descriptions(["run", "other"])["run"]
    assert len(description) < 5000
    report = reported(description)
    assert report is not None
    assert (report.status, report.state) == (before, "finished")
    assert listed("run", description) == shown
    assert store.opened == []
    assert runs.get("run").batch(1).state is BatchState.END
    assert (store.opened, own(runs), runs.leases()["dormant"]) == (["run"], ["run"], 0)
    assert runs.descriptions(["run"]) == {}
    await_dormant(runs, clock)


def test_neither_a_restart_nor_a_list_opens_a_dormant_run(serve: Serve, clock: Clock) -> None:
    runs, _ = serve()
    finished(runs, "ended")
    runs.create("going on", CONFIG)
    clock.now += DORMANT_S
    wait_until(lambda: own(runs) == ["going on"])
    runs, store = serve()
    assert (store.opened, own(runs), runs.names()) == (["going on"], ["going on"], ["ended", "going on"])
    assert [*runs.descriptions(runs.names())] == ["ended"]
    on_loop(runs._target._adopt)
    assert store.opened == ["going on"]
    assert runs.get("ended").status().finished


@pytest.mark.parametrize("restarts", [False, True])
def test_a_dormant_run_is_deleted_without_being_opened(
    serve: Serve, clock: Clock, tmp_path: Path, restarts: bool
) -> None:
    runs, store = serve()
    finished(runs)
    await_dormant(runs, clock)
    if restarts:
        runs, store = serve()
    runs.delete("run")
    assert (store.opened, runs.names(), runs.leases()["dormant"]) == ([], [], 0)
    assert not (tmp_path / "run-run").exists()
    with pytest.raises(NotFoundError):
        runs.get("run")
    with pytest.raises(NotFoundError):
        runs.delete("run")
    assert runs.create("run", CONFIG) == ([], True)
    assert runs.get("run").status().finished is False


def test_a_dormant_run_keeps_its_name_and_counts_as_a_run(serve: Serve, clock: Clock) -> None:
    runs, _ = serve(max_runs=1)
    finished(runs)
    await_dormant(runs, clock)
    with pytest.raises(ResourceExhaustedError, match="1 runs exist, and max_runs is 1"):
        runs.create("other", CONFIG)
    assert runs.create("run", CONFIG | {"train_batch_size": 1}) == ([], False)
    await_dormant(runs, clock)
    with pytest.raises(AlreadyExistsError, match="train_batch_size was 1 and is now 2"):
        runs.create("run", CONFIG)


@pytest.mark.parametrize("what_is_left", ["not finished", "a batch", "a waiting call"])
def test_a_run_that_has_not_ended_stays_open(serve: Serve, clock: Clock, what_is_left: str) -> None:
    runs, _ = serve()
    runs.create("run", CONFIG | {"train_batch_size": 1})
    run, condition, wakes = runs.get("run"), version_is_reached(1), threading.Event()
    if what_is_left == "a batch":
        run.submit(table(*group_rows("a")))
        wait_until(lambda: run.batch(0).state is BatchState.PUBLISHED)
    if what_is_left != "not finished":
        run.finish()
    if what_is_left == "a waiting call":
        run.wait(condition, wakes.set)
    clock.now += DORMANT_S
    on_loop(runs._target._close_dormant)
    assert own(runs) == ["run"]
    assert not wakes.is_set()
    run.stop_waiting(condition, wakes.set)


def test_a_call_that_comes_while_its_run_is_closed_opens_it_again(serve: Serve, clock: Clock) -> None:
    runs, store = serve()
    finished(runs)
    marking, may_mark, set_dormant = threading.Event(), threading.Event(), store.set_dormant

    def mark_slowly(name: str, description: bytes) -> None:
        marking.set()
        assert may_mark.wait(PATIENCE_S)
        set_dormant(name, description)

    store.set_dormant = mark_slowly
    clock.now += DORMANT_S
    assert marking.wait(PATIENCE_S)
    threading.Timer(0.1, may_mark.set).start()
    assert runs.get("run").status().finished
    assert store.opened == ["run"]


def test_a_dormant_run_that_is_being_opened_is_known_to_other_calls_and_counts_as_a_run(
    serve: Serve, clock: Clock
) -> None:
    runs, store = serve(max_runs=1)
    finished(runs)
    await_dormant(runs, clock)
    opening, may_open, open_now = threading.Event(), threading.Event(), store.open

    def open_slowly(name: str) -> Any:
        opening.set()
        assert may_open.wait(PATIENCE_S)
        return open_now(name)

    store.open = open_slowly
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(runs.get, "run")
        assert opening.wait(PATIENCE_S)
        second = pool.submit(runs.get, "run")
        with pytest.raises(ResourceExhaustedError, match="1 runs exist"):
            runs.create("other", CONFIG)
        may_open.set()
        assert first.result(PATIENCE_S).run_id == second.result(PATIENCE_S).run_id
    assert store.opened == ["run"]


def test_a_run_that_cannot_be_marked_stays_open(serve: Serve, clock: Clock) -> None:
    runs, store = serve()
    finished(runs)
    store.refuses = True
    clock.now += DORMANT_S
    wait_until(lambda: store.opened == ["run"])
    assert runs.get("run").status().finished
    assert runs.leases()["dormant"] == 0


def test_a_mark_that_cannot_be_read_concerns_its_run_alone(serve: Serve, clock: Clock, tmp_path: Path) -> None:
    runs, _ = serve()
    for name in ("run", "damaged"):
        finished(runs, name)
    await_dormant(runs, clock)
    mark = tmp_path / "run-damaged" / "dormant.json"
    mark.unlink()
    mark.mkdir()
    (tmp_path / "run-lost").symlink_to("x" * 300)
    runs, store = serve()
    assert store.opened == ["lost"]
    assert [*runs.descriptions(runs.names())] == ["run"]
    assert "File name too long" in runs.unreadable["lost"]
    with pytest.raises(UnavailableError, match="Is a directory"):
        runs.get("damaged")
    runs.delete("damaged")
    assert runs.names() == ["lost", "run"]


def test_a_description_of_another_version_is_not_shown(serve: Serve) -> None:
    assert reported(b'{"now":1.0}') is None
    assert reported(b"{") is None
    assert listed("run", None).model_dump(exclude_unset=True) == {"run": "run"}


def test_a_run_in_memory_stays_open() -> None:
    clock = Clock()
    runs = Runs(Shelf(), build_batch=BuildBatch(), make_monitor=Monitor, clock=clock)
    finished(runs)
    clock.now += DORMANT_S
    on_loop(runs._target._close_dormant)
    assert own(runs) == ["run"]
    runs.close(PATIENCE_S)
