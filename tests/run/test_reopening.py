"""Runs whose log is lost, or cannot be read: they come back when what stores them does, and cost nobody anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gristmill.errors import FailedPreconditionError, UnavailableError
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run.machine.queries import conditions
from gristmill_service.run.runs import Runs
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory_runs import MemoryRunLog, MemoryRunStore
from gristmill_service.storage.memory_shards import MemoryShardStore
from tests.run.harness import CONFIG, BuildBatch, row, table

PATIENCE_S = 60.0


class FailingStore(JournalRunStore):
    """A journal on a file system that fails. failures: how many of the next openings; opened: how many there were."""

    failures = opened = 0

    def open(self, name: str) -> JournalRunLog:
        self.opened += 1
        if self.failures:
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


def test_a_run_that_cannot_be_opened_anew_at_first_is_there_when_it_can(store: FailingStore) -> None:
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


def test_a_run_is_not_unknown_while_it_is_read_anew(store: FailingStore) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.get("run").submit(table(row("a")))
    open_now, opening, may_open = store.open, threading.Event(), threading.Event()

    def open_slowly(name: str) -> JournalRunLog:
        opening.set()
        assert may_open.wait(PATIENCE_S)
        return open_now(name)

    store.open = open_slowly  # type: ignore[method-assign]
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


def test_a_damaged_run_is_read_again_when_it_is_asked_for_and_not_every_second(
    store: FailingStore, tmp_path: Path
) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.close(1)
    (tmp_path / "run-run" / "events-000000.log").write_bytes(b"damaged")
    runs = opened(store)
    before = store.opened
    for _ in range(3):
        runs._adopt_all()
    assert store.opened == before
    with pytest.raises(FailedPreconditionError, match="cannot be read"):
        runs.get("run")
    assert store.opened == before + 1
    runs.close(1)


def test_a_run_that_is_read_anew_takes_no_workers_result_though_its_lease_comes_back() -> None:
    """Its old self and its new one must not both decide."""

    class Leased(MemoryRunLog):
        is_lost = False

        def close(self) -> None:
            self.is_lost = True

    class Leases(MemoryRunStore):
        def __init__(self) -> None:
            self.logs: list[Leased] = []

        def create(self, name: str, config: bytes) -> Leased:
            self.logs.append(Leased(config))
            return self.logs[-1]

        def open(self, name: str) -> Leased:
            return self.create(name, self.logs[-1].config)

    store = Leases()
    runs = Runs(MemoryShardStore(), store, build_batch=BuildBatch(), make_monitor=Monitor)
    runs.create("run", CONFIG)
    before, found = runs.get("run"), list[bool]()

    def renew() -> None:
        store.logs[0].is_lost = False
        found.append(before.is_lost)

    before.wait(conditions.version_is_reached(7), renew)
    store.logs[0].is_lost = True
    after = runs.get("run")
    assert after is not before
    assert found == [True]
    runs.close(1)


def test_a_run_that_is_read_anew_while_it_is_deleted_is_deleted(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    before = runs.get("run")
    before.lose()
    assert runs.get("run") is not before
    monkeypatch.setattr(runs, "get", lambda name: before)
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
        runs._workers.wait_idle(("tick", "run"))
        store.may_delete.set()
        deleting.result(PATIENCE_S)
    assert [entry for entry in logged if entry["log_level"] == "error"] == []
    runs.close(1)


def test_a_run_that_comes_back_while_it_is_being_deleted_is_deleted_whole(store: FailingStore) -> None:
    runs = opened(store)
    runs.create("run", CONFIG)
    runs.close(1)
    store.failures = 1
    runs = opened(store)
    open_now, opening, may_open = store.open, threading.Event(), threading.Event()

    def open_slowly(name: str) -> JournalRunLog:
        opening.set()
        assert may_open.wait(PATIENCE_S)
        return open_now(name)

    store.open = open_slowly  # type: ignore[method-assign]
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
