"""Runs a command of gristmill, or a module, in a process that reports what it has in use, over a socket of its own.

    python -m tests.tools.soak.probed SOCKET DORMANT_S gristmill serve ...
    python -m tests.tools.soak.probed SOCKET DORMANT_S tests.tools.soak.clients ...

Python's own allocator is off (`PYTHONMALLOC=malloc`, which `start` sets), so that glibc counts every byte in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_PATIENCE_S = 60.0
_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


class InUse(NamedTuple):
    """What a process has in use. bytes: of its heap, without what is free in it."""

    bytes: int
    descriptors: int
    threads: int
    tasks: int


class Probed:
    """A probed process. socket: where it answers."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process, self._path = process, path

    def in_use(self) -> InUse:
        """Collects garbage there, and returns what is in use then."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_PATIENCE_S)
            client.connect(str(self._path))
            return InUse(*json.loads(client.makefile().readline()))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start(directory: Path, name: str, dormant_s: float, command: Sequence[str]) -> Probed:
    """Starts the command. Its log is `directory/name.log`; its standard input and output are pipes."""
    path = directory / f"{name}.sock"
    environment = {**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"}
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.soak.probed", str(path), str(dormant_s), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            # Ctrl-C is for the tool, which then stops its processes.
            start_new_session=True,
        )
    return Probed(process, path)


def _in_use() -> InUse:
    """Counts after a collection, twice, as a finalizer may free objects that the first one could not."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    for _ in range(2):
        gc.collect()
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    tasks = sum(isinstance(one, asyncio.Task) and not one.done() for one in gc.get_objects())
    return InUse(
        info.uordblks + info.hblkhd, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), tasks
    )


def _answer(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(json.dumps(_in_use()).encode() + b"\n")


def _hurry(command: str, dormant_s: float) -> None:
    """Ends after this many seconds without calls what otherwise ends after an hour, and looks for it each second.
    Lowers the limits of caches of which a warm-up would fill a small part."""
    if command == "serve":
        from gristmill_service.run import recent_tables
        from gristmill_service.run.rows import declared_prefixes
        from gristmill_service.run.runs import Runs

        vars(declared_prefixes)["_MOST_SUMS"] = 64
        vars(recent_tables)["MOST_BYTES"] = 256 << 10
        defaults: Any = Runs.__init__.__kwdefaults__
        defaults["dormant_after_s"] = dormant_s
    if command == "record":
        from gristmill_recorder import run, server

        vars(run)["_IDLE_S"] = dormant_s
        vars(server)["_BACKGROUND_S"] = 1.0


def main() -> None:
    path, dormant_s, *command = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    if command[0] != "gristmill":
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        return
    _hurry(command[1], float(dormant_s))
    from gristmill_service.cli import main as run

    sys.argv = command
    run()


if __name__ == "__main__":
    main()
