"""Runs whose log is lost, or cannot be read: they come back when what stores them does, and cost nobody anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gristmill.errors import FailedPreconditionError, NotFoundError, UnavailableError
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run import waiters as conditions
from gristmill_service.run.machine.answers import BatchState, Outcome
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryRunLog, MemoryRunStore, MemoryShardStore
from gristmill_service.storage.run_store import CheckNames, any_names
from tests.on_loop import Runs, loop, on_loop
from tests.run.harness import CONFIG, BuildBatch, Shelf, group_rows, row, table, wait_until
from tests.run.logs import RecordingLog, RecordingStore
from tests.run.test_served_bytes import await_batch

PATIENCE_S = 60.0


class FailingStore(JournalRunStore):
    """A journal on a file system that fails. failures: how many of the next openings of runs that `fails` names;
    opened: how many there were."""

    failures = opened = 0
    fails = "run", "a"

    def open(self, name: str) -> JournalRunLog:
        self.opened += 1
        if self.failures and name in self.fails:
            self.failures -= 1
            raise UnavailableError("the journal cannot be read: too many open files")
        return super().open(name)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FailingStore]:
    store = FailingStore(tmp_path)
    yield store
    store.close()


def opened(store: FailingStore) -> Runs:
    return Runs(MemoryShardStore(), store, build_batch=BuildBatch(), make_monitor=Monitor)


def test_a_run_that_cannot_be_recovered_at_first_is_there_when_it_can(store: FailingStore) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.get("run").submit(table(row("a")))
    store.failures = 1
    runs.get("run")._writer.lose()
    with pytest.raises(UnavailableError, match="too many open files"):
        runs.get("run")
    assert runs.names() == ["run"]
    assert runs.get("run").status().rows_accepted == 1
    assert runs.unreadable == {}
    runs.close(1)


def hold_opens(store: FailingStore, held: str = "run") -> tuple[threading.Event, threading.Event]:
    """Makes the store open a log slowly: it sets the first when it begins to, and waits for the second."""
    open_now, opening, may_open = store.open, threading.Event(), threading.Event()

    def open_slowly(name: str) -> JournalRunLog:
        if name == held:
            opening.set()
            assert may_open.wait(PATIENCE_S)
        return open_now(name)

    store.open = open_slowly  # type: ignore[method-assign]
    return opening, may_open


def test_a_run_is_not_unknown_while_it_is_recovered(store: FailingStore) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.get("run").submit(table(row("a")))
    opening, may_open = hold_opens(store)
    runs.get("run").lose()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(runs.get, "run")
        assert opening.wait(PATIENCE_S)
        second = pool.submit(runs.get, "run")
        assert runs.names() == ["run"]
        time.sleep(0.1)
        may_open.set()
        assert second.result(PATIENCE_S) is first.result(PATIENCE_S)
    assert runs.get("run").status().rows_accepted == 1
    runs.close(1)


def test_a_run_that_cannot_be_opened_at_the_start_keeps_no_other_from_being_served(store: FailingStore) -> None:
    runs = opened(store)
    for name in "ab":
        runs.create(name, CONFIG)
    runs.close(1)
    store.failures = 1
    runs = opened(store)
    assert [run.name for run in runs.own()] == ["b"]
    assert list(runs.unreadable) == ["a"]
    assert runs.get("a").name == "a"
    runs.close(1)


def test_a_run_with_a_long_replay_delays_neither_the_start_nor_the_other_runs(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = opened(store)
    for name in "ab":
        runs.create(name, CONFIG)
    runs.get("a").submit(table(row("u")))
    runs.close(1)
    monkeypatch.setattr("gristmill_service.run.runs._START_S", 0.1)
    opening, may_open = hold_opens(store, "a")
    runs = opened(store)
    assert opening.wait(PATIENCE_S)
    assert runs.names() == ["a", "b"]
    assert "is being recovered" in runs.unreadable["a"]
    assert runs.get("b").submit(table(row("u"))).outcomes == [Outcome.ACCEPTED]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runs.get, "a")
        may_open.set()
        assert waiting.result(PATIENCE_S).status().rows_accepted == 1, "its callers wait"
    assert runs.unreadable == {}
    runs.close(1)


def test_a_deleted_run_whose_store_failed_late_leaves_no_name(store: FailingStore) -> None:
    runs, delete = opened(store), store.delete

    def delete_and_fail(name: str) -> None:
        delete(name)
        raise UnavailableError("the answer is lost")

    store.delete = delete_and_fail  # type: ignore[method-assign]
    runs.create("run", CONFIG)
    with capture_logs() as logged, pytest.raises(UnavailableError, match="the answer is lost"):
        runs.delete("run")
    assert [(line["event"], line["log_level"]) for line in logged] == [("run not deleted", "warning")]
    with pytest.raises(NotFoundError):
        runs.get("run")
    assert runs.names() == []
    runs.close(1)


def test_a_damaged_run_is_read_again_when_it_is_asked_for_and_not_every_second(
    store: FailingStore, tmp_path: Path
) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.close(1)
    (tmp_path / "run-run" / "journal.sqlite").write_bytes(b"damaged")
    runs = opened(store)
    before = store.opened
    for _ in range(3):
        on_loop(runs._target._adopt)
    assert store.opened == before
    with pytest.raises(FailedPreconditionError, match="cannot be read"):
        runs.get("run")
    assert store.opened == before + 1
    runs.close(1)


def test_a_run_that_is_recovered_takes_no_result_of_its_tasks_though_its_lease_comes_back() -> None:
    """The run that was open before and the recovered one must not both own it."""

    class Leased(MemoryRunLog):
        is_lost = False

        def close(self) -> None:
            self.is_lost = True

    class Leases(MemoryRunStore):
        def __init__(self) -> None:
            self.logs: list[Leased] = []

        def create(self, name: str, config: bytes, check: CheckNames = any_names) -> Leased:
            self.logs.append(Leased(config))
            return self.logs[-1]

        def open(self, name: str) -> Leased:
            return self.create(name, self.logs[-1].config)

    store = Leases()
    runs = Runs(MemoryShardStore(), store, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG)
    before, losses = runs.get("run"), list[bool]()

    def renew() -> None:
        store.logs[0].is_lost = False
        losses.append(before._target.is_lost)

    before.wait(conditions.version_is_reached(7), renew)
    store.logs[0].is_lost = True
    after = runs.get("run")
    assert after is not before
    assert losses == [True]
    runs.close(1)


def test_a_run_that_is_recovered_while_it_is_deleted_is_deleted(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    before = runs.get("run")
    before.lose()
    assert runs.get("run") is not before

    async def get_before(name: str) -> Any:
        return before._target

    monkeypatch.setattr(runs._target, "get", get_before)
    runs.delete("run")
    assert (runs.names(), store.names()) == ([], [])
    runs.close(1)


def test_the_clock_of_a_run_that_is_deleted_is_no_error() -> None:
    class SlowStore(MemoryShardStore):
        deleting, may_delete = threading.Event(), threading.Event()

        def delete_run(self, run: str) -> None:
            self.deleting.set()
            assert self.may_delete.wait(PATIENCE_S)
            super().delete_run(run)

    store = SlowStore()
    runs = Runs(store, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG | {"group_timeout_s": 1000.0})
    runs.get("run").submit(table(row("a")))
    with capture_logs() as logged, ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(runs.delete, "run")
        assert store.deleting.wait(PATIENCE_S)
        runs.tick()
        store.may_delete.set()
        deleting.result(PATIENCE_S)
    assert [entry for entry in logged if entry["log_level"] == "error"] == []
    runs.close(1)


def test_a_run_whose_tables_are_being_checked_is_deleted_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, checking, may_check = RecordingStore(), threading.Event(), threading.Event()
    plain = RecordingLog.get_all

    def check_slowly(log: RecordingLog, numbers: Collection[int]) -> Any:
        checking.set()
        assert may_check.wait(PATIENCE_S)
        return plain(log, numbers)

    runs = Runs(Shelf(), store, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG)
    for number in range(9):
        # More tables than are checked at once.
        runs.get("run").submit(table(row("a", step=number, last=False)))
    monkeypatch.setattr(RecordingLog, "get_all", check_slowly)
    with capture_logs() as logged, ThreadPoolExecutor(1) as pool:
        runs.get("run").lose()
        runs.get("run")
        assert checking.wait(PATIENCE_S)
        deleting = pool.submit(runs.delete, "run")
        wait_until(lambda: runs.get("run").is_deleted)
        may_check.set()
        deleting.result(PATIENCE_S)
    assert [entry for entry in logged if entry["log_level"] == "error"] == []
    runs.close(1)


def test_a_run_that_comes_back_while_it_is_being_deleted_is_deleted_whole(store: FailingStore) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.close(1)
    store.failures = 1
    runs = opened(store)
    opening, may_open = hold_opens(store)
    with ThreadPoolExecutor(2) as pool:
        back = pool.submit(runs.get, "run")
        assert opening.wait(PATIENCE_S)
        deleted = pool.submit(runs.delete, "run")
        time.sleep(0.1)
        may_open.set()
        run = back.result(PATIENCE_S)
        deleted.result(PATIENCE_S)
    assert run.is_deleted
    assert runs.names() == []
    runs.close(1)


def test_a_failed_append_has_the_run_read_again_from_its_log() -> None:
    store, shelf = RecordingStore(), Shelf()
    runs = Runs(shelf, store, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG | {"train_batch_size": 1})
    run = runs.get("run")
    run.submit(table(*group_rows("a")))
    await_batch(run, 0)
    woken = threading.Event()
    run.wait(conditions.version_is_reached(7), woken.set)
    store.logs["run"].refuses = 1
    with pytest.raises(UnavailableError, match="the book is full; the run is being recovered from its store, so retry"):
        run.submit(table(*group_rows("b")))
    assert woken.wait(PATIENCE_S)
    assert runs.leases()["lost"] + store.opened == 1, "it is opened again within a second, or by who asks"
    again = runs.get("run")
    assert again is not run
    assert store.opened == 1
    assert (again.status().rows_accepted, again.batch(0).state) == (2, BatchState.PUBLISHED)
    with pytest.raises(UnavailableError):
        run.status()
    assert again.submit(table(*group_rows("b"))).outcomes == [Outcome.ACCEPTED] * 2
    await_batch(again, 1)
    runs.close(1)


def test_many_calls_at_once_over_appends_that_fail_lose_nothing_that_was_answered() -> None:
    store, accepted = RecordingStore(), set[str]()
    runs = Runs(Shelf(), store, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG | {"train_batch_size": 400, "policy_mini_batch_size": 400})

    def send(number: int) -> None:
        while True:
            try:
                outcomes = runs.get("run").submit(table(row(f"u{number}"))).outcomes
            except UnavailableError:
                continue
            assert set(outcomes) <= {Outcome.ACCEPTED, Outcome.DUPLICATE}
            accepted.add(f"u{number}")
            return

    def fail() -> None:
        for _ in range(10):
            store.logs["run"].refuses = 1
            time.sleep(0.03)

    with ThreadPoolExecutor(9) as pool:
        failing = pool.submit(fail)
        list(pool.map(send, range(200)))
        failing.result(PATIENCE_S)
    store.logs["run"].refuses = 0
    assert store.opened > 0
    run = runs.get("run")
    assert run.status().rows_accepted == 200
    assert {group.uid for part in run.groups() for group in part} == accepted
    runs.close(1)


class TestCallersThatGoAway:
    def test_a_run_whose_creator_has_gone_is_there_whole(self, store: FailingStore) -> None:
        creating, may_create, create = threading.Event(), threading.Event(), store.create

        def create_slowly(name: str, config: bytes, check: CheckNames = any_names) -> JournalRunLog:
            creating.set()
            assert may_create.wait(PATIENCE_S)
            return create(name, config)

        store.create = create_slowly  # type: ignore[method-assign]
        runs = opened(store)
        gone = asyncio.run_coroutine_threadsafe(runs._target.create("run", CONFIG), loop())
        assert creating.wait(PATIENCE_S)
        gone.cancel()
        may_create.set()
        assert runs.create("run", CONFIG) == ([], False)
        assert runs.get("run").submit(table(row("a"))).outcomes == [Outcome.ACCEPTED]
        runs.close(1)

    def test_a_run_that_was_opened_for_one_who_has_gone_is_everybodys(self, store: FailingStore) -> None:
        runs = opened(store)
        runs.create("run", CONFIG)
        runs.get("run").submit(table(row("a")))
        opening, may_open, open_now = threading.Event(), threading.Event(), store.open

        def open_slowly(name: str) -> JournalRunLog:
            opening.set()
            assert may_open.wait(PATIENCE_S)
            return open_now(name)

        store.open = open_slowly  # type: ignore[method-assign]
        runs.get("run").lose()
        gone = asyncio.run_coroutine_threadsafe(runs._target.get("run"), loop())
        assert opening.wait(PATIENCE_S)
        gone.cancel()
        may_open.set()
        run = runs.get("run")
        assert run.submit(table(row("a"), row("b"))).outcomes == [Outcome.DUPLICATE, Outcome.ACCEPTED]
        assert store.opened == 1
        runs.close(1)


def test_a_run_that_is_created_while_the_service_shuts_down_is_there_when_it_comes_back(store: FailingStore) -> None:
    creating, may_create, create = threading.Event(), threading.Event(), store.create
    logs: list[JournalRunLog] = []

    def create_slowly(name: str, config: bytes, check: CheckNames = any_names) -> JournalRunLog:
        creating.set()
        assert may_create.wait(PATIENCE_S)
        logs.append(create(name, config))
        return logs[-1]

    store.create = create_slowly  # type: ignore[method-assign]
    runs = opened(store)
    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(runs.create, "run", CONFIG)
        assert creating.wait(PATIENCE_S)
        runs.close(1)
        may_create.set()
        with pytest.raises(UnavailableError, match="shutting down"):
            created.result(PATIENCE_S)
    assert logs[0].is_closed
    runs = opened(store)
    assert [run.name for run in runs.own()] == ["run"]
    runs.close(1)
