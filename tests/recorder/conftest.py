"""Engines, a service and recorders for tests. Those of most tests are started once: each test has a run of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill_service.settings import Settings
from tests.on_loop import Service
from tests.recorder.engine import Engine, serving
from tests.recorder.recorders import Recorder, Restarted, StartRecorder, create_run, end, start
from tests.serving import FREE_PORTS, StartService


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with serving(Engine()) as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang() -> Iterator[Engine]:
    with serving(Engine(is_sglang=True)) as engine:
        yield engine


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    running = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def recorder(engine: Engine, service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    directory = tmp_path_factory.mktemp("recorder")
    journal = str(directory / "journal.sqlite3")
    running = start(directory / "log", engine.url, service.grpc_address, "--journal", journal)
    yield running
    end(running)


@pytest.fixture
def start_recorder(tmp_path: Path) -> Iterator[StartRecorder]:
    """Starts one in front of an engine, at a service's address, with these flags more; all with one journal."""
    started: list[Recorder] = []

    def start_one(upstream: str, address: str, *flags: str) -> Recorder:
        log, journal = tmp_path / f"recorder-{len(started)}.log", str(tmp_path / "journal.sqlite3")
        started.append(start(log, upstream, address, "--journal", journal, *flags))
        return started[-1]

    yield start_one
    for recorder in started:
        end(recorder)


@pytest.fixture
def run(service: Service, run_name: str) -> str:
    """A run of the service in which each trajectory is a batch."""
    create_run(service.grpc_address, run_name)
    return run_name


@pytest.fixture
def restarted(start_service: StartService, tmp_path: Path) -> Restarted:
    return Restarted(start_service, tmp_path)
