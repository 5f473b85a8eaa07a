"""`gristmill serve`: one service in one process, from flags to exit status. The service is imported when it runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gristmill.errors import GristmillError, InvalidArgumentError
from gristmill_service.cli.options import flags_of
from gristmill_service.settings import Settings, load_settings

if TYPE_CHECKING:
    from gristmill_service.service import Service

OK, CANNOT_START = 0, 2

# A failover of Redis takes a few seconds.
_STORE_AWAY_S = 30.0
_STORE_PAUSE_S = 1.0

StopAsked = Callable[..., bool]
"""Whether the process was asked to stop, within so many seconds where they are given."""


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("serve")(serve_command)


def serve_command(**flags: object) -> None:
    """Take rollouts, make batches of them, and give trainers their shards.

    A setting is taken from its flag, else from the environment (--max-waiters is GRISTMILL_MAX_WAITERS), else from the
    file that --config-file or GRISTMILL_CONFIG_FILE names, else it has its default. Runs are created through the API.
    The service listens on this machine only; to listen wider it needs certificates and tokens (docs/security.md).

    SIGTERM or Ctrl-C finishes what is being sealed and exits with 0; a second one exits at once. Exit status 2: a wrong
    setting, an address that is taken, or a Redis that does not answer for half a minute.
    """
    try:
        settings = load_settings(flags)
    except InvalidArgumentError as error:
        print(f"gristmill serve: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_START) from None
    raise typer.Exit(serve(settings))


serve_command.__signature__ = flags_of(Settings)  # type: ignore[attr-defined]


def serve(settings: Settings) -> int:
    """Serves until a signal asks to stop. Returns the exit status."""
    from gristmill_service.logs import configure_logs
    from gristmill_service.process_tuning import tune_process
    from gristmill_service.tracing import configure_tracing

    configure_logs(settings.log_level, settings.log_format)
    tune_process()
    with ExitStack() as at_end, _stop_asked() as stop_asked:
        try:
            at_end.callback(configure_tracing())
            service = _made(settings, stop_asked)
        except (GristmillError, OSError) as error:
            print(f"gristmill serve: {error}", file=sys.stderr)
            return CANNOT_START
        if service is None:
            return OK
        try:
            service.start()
            with _announced(service, settings.announce):
                print(_ready_line(service), flush=True)
                stop_asked()
        except GristmillError as error:
            print(f"gristmill serve: {error}", file=sys.stderr)
            return CANNOT_START
        except OSError as error:
            print(f"gristmill serve: announce: cannot write {settings.announce}: {error.strerror}", file=sys.stderr)
            return CANNOT_START
        finally:
            service.stop()
    return OK


def _made(settings: Settings, stop_asked: StopAsked) -> Service | None:
    """The service, as soon as its store answers; None where it is asked to stop before that."""
    import structlog

    from gristmill_service.service import Service
    from gristmill_service.storage.backends import StorageAwayError

    deadline, reason = time.monotonic() + _STORE_AWAY_S, ""
    while True:
        try:
            return Service(settings)
        except StorageAwayError as error:
            if time.monotonic() >= deadline:
                raise
            before, reason = reason, str(error)
        if reason != before:
            structlog.get_logger(__name__).warning("waiting for the store", reason=reason, for_s=_STORE_AWAY_S)
        if stop_asked(_STORE_PAUSE_S):
            return None


def _ready_line(service: Service) -> str:
    url = service.http_url
    return f"gristmill is ready: gRPC {service.grpc_address}, HTTP {url}; its page: {url}/, its API: {url}/docs"


@contextmanager
def _stop_asked() -> Iterator[StopAsked]:
    """Yields a function that returns with the first SIGTERM or SIGINT; the second ends the process there and then.

    The kernel may give a signal to any thread, while Python runs handlers in the main one, which waits too: so a thread
    reads the pipe that the interpreter writes each signal's number to, whichever thread was given it. Blocking signals
    and `sigwait` would need less, but also that no library starts a thread before, which NumPy does as it is imported.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    asked = threading.Event()

    def listen() -> None:
        while numbers := os.read(woken, 1):
            if asked.is_set():
                os._exit(128 + numbers[0])
            asked.set()

    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    pipe_before = signal.set_wakeup_fd(wake)
    listener = threading.Thread(target=listen, name="gristmill-signals", daemon=True)
    listener.start()
    try:
        yield asked.wait
    finally:
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        listener.join()
        os.close(woken)


@contextmanager
def _announced(service: Service, path: Path | None) -> Iterator[None]:
    """Writes the addresses to a file, whole from the moment it exists, and removes it at the end."""
    if path is None:
        yield
        return
    document = {"grpc_address": service.grpc_address, "http_url": service.http_url, "pid": os.getpid()}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document) + "\n", encoding="utf-8")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
