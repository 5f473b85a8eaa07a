"""What a recorder knows of a run holds only as long as the service answers, and costs nothing once nobody uses it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gristmill import NotFoundError, RolloutClient, UnavailableError
from gristmill_recorder import run as run_module
from gristmill_recorder.journal import Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.refusals import WrongCall
from gristmill_recorder.run import Run, Service
from gristmill_recorder.runs import Runs
from gristmill_service.settings import Settings
from tests.on_loop import Service as RunningService
from tests.recorder.recorders import Recorder, create_run, post
from tests.serving import FREE_PORTS

CONFIG = {"step_wise": True, "columns": [], "n_samples_per_prompt": 1, "max_samples_per_prompt": None, "surplus": 0}


class RestartedService:
    """A service, and the client of a run with one sample, that stops answering when `stopped` is set."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    def client(self, _: str) -> RestartedService:
        return self

    async def status(self, run: str) -> Any:
        known = {"run_id": "1", "generation": 0, "rows_accepted": 0, "policy_version": 0, "finished": False}
        return SimpleNamespace(run=run, config=CONFIG, **known)

    async def wait_policy_version(self, version: int, wait_s: float) -> int:
        await self.stopped.wait()
        raise UnavailableError("the service stopped")

    async def close(self) -> None:
        pass


def test_samples_are_not_refused_by_the_settings_of_a_run_from_before_the_service_was_away() -> None:
    async def work() -> None:
        service: Any = RestartedService()
        run = Run("run", service, (), Metrics())
        await run.check(0)
        with pytest.raises(WrongCall, match=r"sample 1 is not in 0\.\.0"):
            await run.check(1)
        service.stopped.set()
        # The task that waits for the next version learns it.
        await asyncio.sleep(0.1)
        await run.check(1)
        await run.close()

    asyncio.run(work())


def test_a_run_that_turns_out_to_be_unknown_after_its_call_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "PATIENCE_S", 0.02)

    async def work() -> None:
        answers = asyncio.Event()

        async def status(_: str) -> Any:
            await answers.wait()
            raise NotFoundError("run 'run' does not exist")

        service: Any = SimpleNamespace(status=status)
        run = Run("run", service, (), Metrics())
        await run.check(0)
        assert not run.is_unused, "the service is still asked"
        answers.set()
        await until(lambda: run.is_unused)
        await run.close()

    asyncio.run(work())


@pytest.fixture
def alone() -> Iterator[RunningService]:
    """A service that nothing else calls."""
    running = RunningService(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    running.start()
    yield running
    running.stop()


def waiting(service: RunningService) -> float:
    """The calls that wait at the service."""
    lines = httpx.get(f"{service.http_url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("gristmill_waiting_calls "))


async def until(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(is_done):
            await asyncio.sleep(0.02)


def using(service: RunningService, directory: Path, work: Callable[[Runs, Metrics], Awaitable[None]]) -> None:
    async def run(journal: Journal) -> None:
        metrics = Metrics()
        runs = Runs(Service(service.grpc_address), journal, (), metrics)
        await work(runs, metrics)
        await runs.close(5.0)

    with closing(Journal(directory / "journal.sqlite3")) as journal:
        asyncio.run(run(journal))


def end_by(service: RunningService, end: str) -> None:
    with RolloutClient(service.grpc_address, "run", timeout_s=20) as client:
        client.finish() if end == "finished" else client.delete_run()


@pytest.mark.parametrize("end", ["finished", "deleted", "idle for an hour"])
def test_a_run_that_nobody_uses_has_no_waiter_no_connection_and_no_series(
    alone: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """600 runs reached the service's --max-waiters."""
    monkeypatch.setattr(run_module, "_WATCH_S", 0.2)
    create_run(alone.grpc_address, "run")

    async def work(runs: Runs, metrics: Metrics) -> None:
        await runs.run("run").check(0)
        await until(lambda: waiting(alone) == 1)
        await runs.drop_unused()
        assert "run" in runs._runs
        if end == "idle for an hour":
            monkeypatch.setattr(run_module, "_IDLE_S", -1.0)
        else:
            await asyncio.to_thread(end_by, alone, end)
        await until(lambda: runs.run("run").is_unused)
        await runs.drop_unused()
        assert (runs._runs, b'run="run"' in metrics.text()) == ({}, False)
        await until(lambda: waiting(alone) == 0)
        assert [task for task in asyncio.all_tasks() if "run" in task.get_name()] == []
        # A call begins it again.
        if end == "deleted":
            await asyncio.to_thread(create_run, alone.grpc_address, "run")
        await runs.run("run").check(0)
        assert b'run="run"' in metrics.text()

    using(alone, tmp_path, work)


def test_a_run_that_is_finished_is_checked_at_each_call_and_waits_for_nothing(
    alone: RunningService, tmp_path: Path
) -> None:
    create_run(alone.grpc_address, "run")
    end_by(alone, "finished")

    async def work(runs: Runs, _: Metrics) -> None:
        await runs.run("run").check(0)
        await runs.run("run").check(0)
        assert (runs.run("run")._watch, runs.run("run").is_unused) == (None, True)

    using(alone, tmp_path, work)


def test_a_run_with_an_open_trajectory_is_kept(
    alone: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_IDLE_S", -1.0)
    create_run(alone.grpc_address, "run")

    async def work(runs: Runs, _: Metrics) -> None:
        await runs.run("run").check(0)
        with runs.recording(TrajectoryName("run", "a", 0, 0, 0)).calling():
            await runs.drop_unused()
            assert "run" in runs._runs
        await runs.drop_unused()
        assert runs._runs == {}

    using(alone, tmp_path, work)


def test_unknown_runs_share_one_connection(recorder: Recorder, run_name: str) -> None:
    """Each had one: 2,000 calls took 2,000 descriptors."""

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{recorder.process.pid}/fd"))

    def call(number: int) -> int:
        body = {"model": "toy", "messages": [{"role": "user", "content": "say hi"}]}
        return post(f"{recorder.base(f'{run_name}-{number}')}/v1/chat/completions", body)[0]

    call(0)
    before = descriptors()
    assert {call(number) for number in range(1, 50)} == {400}
    assert descriptors() < before + 20
