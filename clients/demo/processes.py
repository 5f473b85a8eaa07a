"""The demonstration's processes: `gristmill serve`, and Python children that report to their parent.

Leaves no process behind. Children are spawned and ignore Ctrl-C, which the terminal sends to all: the parent ends them.
They also end when the parent is gone. A failure of a child is raised in the parent as ProcessFailedError.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S, STOP_S, CHECK_S = 30.0, 15.0, 1.0

_spawn = multiprocessing.get_context("spawn")


class ProcessFailedError(Exception):
    """A process of the demonstration failed; the message has its output."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service that is ready."""

    grpc_address: str
    http_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise ProcessFailedError if it is gone."""
        if self.process.poll() is not None:
            raise ProcessFailedError(f"gristmill serve ended with {self.process.returncode}:\n{self.log.read_text()}")


@contextmanager
def serve(directory: Path) -> Iterator[Service]:
    """Start `gristmill serve` on free ports and wait until it is ready; stop it and remove its shards at the end."""
    announced, log = directory / "service.json", directory / "service.log"
    command = [str(Path(sys.executable).with_name("gristmill")), "serve", "--announce", str(announced)]
    command += ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--shutdown-grace-s", "5"]
    with log.open("wb") as output:
        # A session of its own, so that Ctrl-C reaches the parent alone and the clients go before the service.
        process = subprocess.Popen(  # noqa: S603
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, announced, log)
        document = json.loads(announced.read_text(encoding="utf-8"))
        yield Service(document["grpc_address"], document["http_url"], process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], announced: Path, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not announced.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ProcessFailedError(f"gristmill serve did not start:\n{log.read_text()}")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Ended:
    """The child of this name has ended without an error."""

    name: str


@dataclass(frozen=True, slots=True)
class _Failure:
    """Sent by a child that raised."""

    traceback: str


class Children:
    """Child processes. Leaving the block ends all that still run.

    check: called while waiting for their reports; raises if something else failed.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._processes: dict[str, BaseProcess] = {}
        self._reports: dict[str, Connection] = {}

    def start(self, name: str, target: Callable[..., None], *arguments: Any, reports: bool = False) -> None:
        """Run `target(*arguments)` in a process. A target that reports gets a function for it as its last argument."""
        receiver, sender = _spawn.Pipe(duplex=False)
        process = _spawn.Process(target=_run, args=(target, arguments, sender, reports), name=name, daemon=True)
        process.start()
        sender.close()
        self._processes[name], self._reports[name] = process, receiver

    def reports(self) -> Iterator[Any]:
        """Yield the children's reports as they arrive, and Ended for each child that has ended.

        Returns after the last child. Raises ProcessFailedError as soon as one fails.
        """
        names = {connection: name for name, connection in self._reports.items()}
        while names:
            self._check()
            for ready in wait(list(names), CHECK_S):
                assert isinstance(ready, Connection)
                try:
                    report = ready.recv()
                except EOFError:
                    report = self._ended(names.pop(ready))
                if isinstance(report, _Failure):
                    raise ProcessFailedError(f"the {names[ready]} failed:\n{report.traceback}")
                yield report

    def _ended(self, name: str) -> Ended:
        process = self._processes[name]
        process.join(STOP_S)
        if process.exitcode != 0:
            raise ProcessFailedError(f"the {name} ended with {process.exitcode}")
        return Ended(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


def _run(target: Callable[..., None], arguments: tuple[Any, ...], sender: Connection, reports: bool) -> None:
    """Run the target in the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(*arguments, *([sender.send] if reports else []))
    except Exception:  # noqa: BLE001
        sender.send(_Failure(traceback.format_exc()))
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
