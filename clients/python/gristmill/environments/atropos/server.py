"""The routes over HTTP, in one process, until it is asked to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from gristmill.environments.atropos.routes import Routes, TrainerFacts
from gristmill.errors import UnavailableError

_GRACE_S = 10
"""Posts that wait for room for longer are sent away; their environments post them again."""


def serve(address: str, run: str, host: str, port: int, facts: TrainerFacts) -> None:
    """Serves the routes before a run of the service at `address`. Returns after SIGTERM or Ctrl-C, when what was being
    answered is; a second Ctrl-C does not wait for that.

    Raises UnavailableError where the address cannot be had.
    """
    with _listening(host, port) as listener, _ending_quietly():
        listened = listener.getsockname()
        print(f"gristmill atropos is ready: http://{listened[0]}:{listened[1]} feeds run {run!r}", flush=True)
        app = Routes(address, run, facts).app()
        config = uvicorn.Config(
            app, log_config=None, access_log=False, ws="none", loop="asyncio", timeout_graceful_shutdown=_GRACE_S
        )
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it, or choose another --port"
        ) from None
    with listener:
        yield listener


@contextmanager
def _ending_quietly() -> Iterator[None]:
    """uvicorn raises a signal again that it has obeyed."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
