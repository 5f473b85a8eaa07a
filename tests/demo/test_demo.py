"""`make demo`, shortened: real processes from the first turn to the picture, and nothing left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "clients" / "demo"
BATCH_LINE = re.compile(r"^ *\d+ +[-+]\d\.\d\d +\d+% +(\d+) → (\d+) +\d+% +(\d\.\d) ", re.MULTILINE)


class Demo:
    """One run as a process of its own, with its shards and temporary files under the test's directory."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.picture, self.shards, self.scratch = directory / "demo.png", directory / "shards", directory / "scratch"
        self.shards.mkdir()
        self.scratch.mkdir()
        environment = {**os.environ, "GRISTMILL_SHARED_MEMORY_DIR": str(self.shards), "TMPDIR": str(self.scratch)}
        command = [sys.executable, "-u", str(DEMO), "--picture", str(self.picture), *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.output = ""

    def read_until(self, pattern: re.Pattern[str]) -> None:
        assert self.process.stdout is not None
        while not pattern.search(self.output):
            line = self.process.stdout.readline()
            assert line, f"the demo ended first:\n{self.output}"
            self.output += line

    def end(self) -> int:
        """The exit status, once it has ended by itself."""
        self.output += self.process.communicate(timeout=240)[0]
        return self.process.returncode

    def descendants(self) -> dict[int, str]:
        """Its processes and theirs, with their command lines."""
        commands, unseen = {}, [self.process.pid]
        while unseen:
            for task in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
                for pid in map(int, task.read_text().split()):
                    commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    unseen.append(pid)
        return commands

    def leftovers(self) -> list[Path]:
        return [*self.shards.iterdir(), *self.scratch.glob("gristmill-demo-*")]


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        if demo.process.poll() is None:
            demo.process.terminate()
            demo.process.communicate(timeout=30)


@pytest.mark.parametrize(("layout", "count"), [("left_padded", 4), ("prefix_tree", 1)])
def test_a_short_run_trains_every_batch_and_leaves_only_its_picture(
    tmp_path: Path, demos: list[Demo], layout: str, count: int
) -> None:
    demo = Demo(tmp_path, "--batches", str(count), "--least-rise", "-9", "--layout", layout)
    demos.append(demo)

    assert demo.end() == 0, demo.output
    batches = BATCH_LINE.findall(demo.output)
    assert len(batches) == count
    assert all(int(merged) < int(received) for received, merged, _ in batches)
    assert all(float(lag) <= 2 for _, _, lag in batches)
    assert demo.picture.read_bytes().startswith(b"\x89PNG")
    assert demo.leftovers() == []


def test_a_reward_that_does_not_rise_is_a_failure(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path, "--batches", "2", "--least-rise", "9")
    demos.append(demo)

    assert demo.end() == 1
    assert "was to rise by 9" in demo.output


def test_ctrl_c_ends_all_processes_and_removes_what_they_made(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.read_until(BATCH_LINE)
    processes = demo.descendants()
    assert len(processes) >= 5  # two workers, two ranks, the service

    os.killpg(demo.process.pid, signal.SIGINT)  # as a terminal does

    assert demo.end() == 130, demo.output
    assert "Traceback" not in demo.output
    assert demo.leftovers() == []
    assert not [command for pid, command in processes.items() if _is_running(pid, command)]


def test_a_process_that_dies_ends_the_demo_and_is_named(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.read_until(BATCH_LINE)
    victim = next(pid for pid, command in demo.descendants().items() if "spawn_main" in command)

    os.kill(victim, signal.SIGKILL)

    assert demo.end() == 1
    assert re.search(r"the (rollout worker|trainer rank) \d (ended with -9|failed)", demo.output)
    assert demo.leftovers() == []


def test_a_service_that_dies_ends_the_demo_at_once(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path)
    demos.append(demo)
    demo.read_until(BATCH_LINE)
    service = next(pid for pid, command in demo.descendants().items() if "gristmill serve" in command)

    os.kill(service, signal.SIGKILL)

    assert demo.end() == 1
    assert "gristmill serve ended with -9" in demo.output


def _is_running(pid: int, command: str) -> bool:
    """Whether it is still this process; it may take a moment until an orphan is reaped."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except FileNotFoundError:
            return False
        if now != command:
            return False
        time.sleep(0.1)
    return True
