"""A running service for tests: in this process (shared by a module's tests) or as a process of its own."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import HealthCheck, register_random, settings

from gristmill._client.connection import retries
from tests.serving import FREE_PORTS, ServiceProcess, StartService

if TYPE_CHECKING:
    from tests.faults.services import Services
    from tests.on_loop import Service

_run_numbers = itertools.count()

# Tests run side by side, one per core: torch's threads would wait for one another, and each spins while it waits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Laws are about values, not about how fast a busy machine draws and checks them; hangs end by pytest's timeout. The
# gate draws the same examples each time, so that it judges the change; people's runs go on looking for new ones.
settings.register_profile(
    "laws", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("laws")
# Pauses are drawn; a law that finds a counterexample has to find it again.
register_random(retries.JITTER)

# Hangs end by pytest's timeout; a busy machine may take more than httpx's 5 s.
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

# Where the tests run in a shell's background, SIGINT is ignored, and would be in every process that they start and
# interrupt as a person does.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
# Tests in these folders, and tests that use these fixtures, start processes or wait for real time.
SLOW_FOLDERS = {"demo", "deploy", "faults", "image", "release", "tools"}
SLOW_FIXTURES = {"browser", "service_process", "start_recorder", "start_service"}
# These take longest, and begin first, so that no process is left alone with one of them at the end.
LONGEST_FILES = (
    "tools/chaos/test_chaos.py",
    "demo/test_demo.py",
    "page/test_accessibility.py",
    "tools/power_loss/test_power_loss.py",
    "page/test_page.py",
    "faults/test_journal_faults.py",
    "serve/test_process.py",
    "serve/test_tracing.py",
    "client/test_columns.py",
    "faults/test_redis_faults.py",
    "serve/test_logs.py",
    "recorder/test_kills.py",
    "run/test_recovery.py",
    "redis/test_failover.py",
)
# These run each in a virtual environment of its own, by targets of their own.
OTHER_TARGETS = {"trainers", "environments", "agents"}
# Of processor time: a busy machine makes a test wait, but not compute more, except that two threads of one core compute
# at half its speed each. The limit allows for that. Laws may run more examples than `make test` has.
MAX_FAST_S = math.inf if "LAW_EXAMPLES" in os.environ else 20.0


def rank_of(item: pytest.Item) -> int:
    """Return the place of a test's file among those that begin first; the others are behind them."""
    file = item.path.relative_to(TESTS).as_posix()
    return LONGEST_FILES.index(file) if file in LONGEST_FILES else len(LONGEST_FILES)


def folder_of(item: pytest.Item) -> str:
    """Return the folder of `tests` that a test is in, or its file's name at the top."""
    return item.path.relative_to(TESTS).parts[0]


# Before pytest deselects tests by their markers, and after pytest-randomly has shuffled them.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests slow by their folder and fixtures: CONTRIBUTING.md says which tier a test belongs to. Order files."""
    for item in items:
        if folder_of(item) in SLOW_FOLDERS or not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=rank_of)


def processor_time() -> float:
    """Return the seconds of processor time that this process and its children that ended have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that computes for long without the marker `slow`, so that `make test` stays fast."""
    start = processor_time()
    yield
    used = processor_time() - start
    if used > MAX_FAST_S and item.get_closest_marker("slow") is None and folder_of(item) not in OTHER_TARGETS:
        pytest.fail(
            f"the test used {used:.1f} s of processor time, over {MAX_FAST_S:.0f} s; shorten it or mark it slow"
        )


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """With `grpc_address`, `http_url` and `runs`, in memory, on free ports. Give each test a run of its own."""
    # Only tests that serve need what serving needs.
    from gristmill_service.settings import Settings
    from tests.on_loop import Service

    running = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """Starts services in processes of their own, which a test may kill; stopped with the test."""
    from tests.faults.services import Services

    started = Services(tmp_path)
    yield started
    started.close()


@pytest.fixture
def run_name() -> str:
    """A name that no other test uses."""
    return f"run-{next(_run_numbers)}"


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[StartService]:
    """Starts `gristmill serve` with these flags more; returns when it is ready; stopped with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> ServiceProcess:
        announced = tmp_path / f"service-{len(started)}.json"
        command = [str(Path(sys.executable).with_name("gristmill")), "serve", "--announce", str(announced)]
        for name, value in FREE_PORTS.items():
            command += [f"--{name.replace('_', '-')}", value]
        with announced.with_suffix(".log").open("w") as log:
            process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=log, text=True)
        started.append(process)
        assert process.stdout is not None
        if "is ready" not in process.stdout.readline():
            pytest.fail(f"gristmill serve did not start: {announced.with_suffix('.log').read_text()}")
        addresses = json.loads(announced.read_text())
        return ServiceProcess(process, addresses["grpc_address"], addresses["http_url"], announced)

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def service_process(start_service: StartService, tmp_path: Path) -> ServiceProcess:
    """A ready `gristmill serve` with shared memory under the test's directory."""
    return start_service("--shared-memory-dir", str(tmp_path))
