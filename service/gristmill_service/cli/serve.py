"""`gristmill serve`: one service in one process, from flags to exit status. Imports what is heavy only when it runs."""

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
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin

import typer
from pydantic import ByteSize

from gristmill.errors import GristmillError, InvalidArgumentError
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


def _flag(name: str) -> typer.models.OptionInfo:
    field = Settings.model_fields[name]
    value = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
    default = "" if value is None else f" [default: {value}]"
    choices = "|".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else None
    info: typer.models.OptionInfo = typer.Option(help=f"{field.description}{default}", metavar=choices)
    return info


def serve_command(
    config_file: Annotated[Path | None, typer.Option(help="A YAML file with the settings below.")] = None,
    grpc_address: Annotated[str | None, _flag("grpc_address")] = None,
    http_address: Annotated[str | None, _flag("http_address")] = None,
    store: Annotated[str | None, _flag("store")] = None,
    shared_memory_dir: Annotated[Path | None, _flag("shared_memory_dir")] = None,
    redis_url: Annotated[str | None, _flag("redis_url")] = None,
    redis_username: Annotated[str | None, _flag("redis_username")] = None,
    redis_password: Annotated[str | None, _flag("redis_password")] = None,
    redis_ca_file: Annotated[Path | None, _flag("redis_ca_file")] = None,
    redis_prefix: Annotated[str | None, _flag("redis_prefix")] = None,
    redis_min_replicas: Annotated[int | None, _flag("redis_min_replicas")] = None,
    redis_wait_aof: Annotated[bool | None, _flag("redis_wait_aof")] = None,
    lease_s: Annotated[float | None, _flag("lease_s")] = None,
    advertise_grpc_address: Annotated[str | None, _flag("advertise_grpc_address")] = None,
    advertise_http_url: Annotated[str | None, _flag("advertise_http_url")] = None,
    journal_dir: Annotated[Path | None, _flag("journal_dir")] = None,
    journal_fsync: Annotated[str | None, _flag("journal_fsync")] = None,
    max_message_bytes: Annotated[str | None, _flag("max_message_bytes")] = None,
    max_row_bytes: Annotated[str | None, _flag("max_row_bytes")] = None,
    max_waiters: Annotated[int | None, _flag("max_waiters")] = None,
    max_streams: Annotated[int | None, _flag("max_streams")] = None,
    shutdown_grace_s: Annotated[float | None, _flag("shutdown_grace_s")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    log_format: Annotated[str | None, _flag("log_format")] = None,
    announce: Annotated[Path | None, _flag("announce")] = None,
) -> None:
    """Take rollouts, make batches of them, and give trainers their shards.

    A setting is taken from its flag, else from the environment (--max-waiters is GRISTMILL_MAX_WAITERS), else from the
    file that --config-file or GRISTMILL_CONFIG_FILE names, else it has its default. Runs are created through the API.
    The service listens on this machine only unless an address says otherwise; it asks nobody who they are.

    SIGTERM or Ctrl-C finishes what is being sealed and exits with 0; a second one exits at once. Exit status 2: a wrong
    setting, an address that is taken, or a Redis that does not answer for half a minute.
    """
    flags = dict(locals())
    try:
        settings = load_settings(flags)
    except InvalidArgumentError as error:
        print(f"gristmill serve: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_START) from None
    raise typer.Exit(serve(settings))


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
        service.start()
        try:
            with _announced(service, settings.announce):
                print(_ready_line(service), flush=True)
                stop_asked()
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
    return f"gristmill is ready: gRPC {service.grpc_address}, HTTP {service.http_url} (see {service.http_url}/docs)"


@contextmanager
def _stop_asked() -> Iterator[StopAsked]:
    """A function that returns with the first SIGTERM or SIGINT; the second ends the process there and then.

    The kernel may give a signal to any thread, while Python's handlers wait for the main one, which waits too: so a
    thread listens to the pipe that the interpreter writes each signal's number to, whoever was given it.
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
    """The file with the addresses, whole from the moment it exists, and there only while the service is."""
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
