"""The command line: run in this process, and as people use it: piped, on a terminal, and followed line by line."""

from __future__ import annotations

import json
import os
import pty
import queue
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import typer.testing
from typer.testing import CliRunner

from gristmill_service.cli.commands import app

GRISTMILL = str(Path(sys.executable).with_name("gristmill"))
CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 2},
    "dp_size": 2,
    "max_buffered_batches": 2,
}


def environment(**more: str) -> dict[str, str]:
    """As the tests', but for settings of the service, and for a size of the terminal that is not that of ours."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GRISTMILL_") and name not in ("COLUMNS", "LINES")
    } | more


# Typer's runner makes the commands again at each call, which takes longer than most of them.
vars(typer.testing)["_get_command"] = cache(typer.main.get_command)


def gristmill(*arguments: object, expect: int | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which takes a hundredth of the time of a process.

    Args:
        expect: the exit status, where the caller does not look at it.
    """
    command = [*map(str, arguments)]
    cleared = dict.fromkeys(os.environ.keys() - environment().keys())
    result = CliRunner().invoke(app, command, env={**cleared, **variables})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert expect is None or result.exit_code == expect, result.stderr
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)


def gristmill_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process, with its own interpreter, streams and exit status."""
    return subprocess.run(
        [GRISTMILL, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(**variables),
        check=False,
    )


class Followed:
    """A command that goes on, with the JSON objects that it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends it, if it has not."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, event: str, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Everything that was printed up to the first of this event."""
        events: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while not events or events[-1]["event"] != event:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, f"it ended before {event!r}: {events}"
            events.append(json.loads(line))
        return events


@contextmanager
def followed(*arguments: object) -> Iterator[Followed]:
    command = [GRISTMILL, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    with closing(Followed(process)) as tail:
        yield tail


class Screen:
    """A command on a terminal; `text` is all that it wrote so far."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process, self._terminal = process, terminal
        self.text = ""

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            self._read()

    def ended(self) -> int:
        """Its exit status, once it has ended by itself."""
        deadline = time.monotonic() + 60.0
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read()
        return self.process.wait()

    @property
    def echoes(self) -> bool:
        """As a terminal does that was left as it was found."""
        return bool(termios.tcgetattr(self._terminal)[3] & termios.ECHO)

    def _read(self) -> None:
        os.set_blocking(self._terminal, False)
        try:
            self.text += os.read(self._terminal, 1 << 16).decode(errors="replace")
        except (BlockingIOError, OSError):
            time.sleep(0.02)


@contextmanager
def on_terminal(*arguments: object, width: int = 160) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, width))
    # The first terminal that the leader of a session opens is its own, so that Ctrl-C reaches it as from a keyboard.
    command = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', os.ttyname(theirs), GRISTMILL, *map(str, arguments)]
    process = subprocess.Popen(command, env=environment(TERM="xterm"), start_new_session=True)
    try:
        yield Screen(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)
