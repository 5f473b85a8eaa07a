"""`gristmill serve` runs one service in one process, and returns its exit status. Heavy modules are imported when it
runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gristmill.errors import GristmillError, InvalidArgumentError
from gristmill_service.cli.options import flags_of
from gristmill_service.settings import Settings, load_settings

if TYPE_CHECKING:
    from gristmill_service.service import Service

OK, CANNOT_START = 0, 2

_STORE_PAUSE_S = 1.0

_POOL_THREADS = 16


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("serve")(serve_command)


def serve_command(**flags: object) -> None:
    """Serve runs: accept rollouts, build batches, and serve shards to trainers.

    A setting is read from its flag, else from the environment (--max-waiters is GRISTMILL_MAX_WAITERS), else from the
    file in --config-file or GRISTMILL_CONFIG_FILE, else it has its default. Runs are created through the API. The
    service listens only on this machine; other addresses require certificates and tokens (docs/security.md).

    After SIGTERM or Ctrl-C it finishes sealed batches and exits with 0; after a second signal it exits at once. Exit
    status 2: an invalid setting, or an address in use. While Redis is unreachable, or another service uses the journal,
    it waits: /healthz answers, and /readyz reports the reason.
    """
    try:
        settings = load_settings(flags)
    except InvalidArgumentError as error:
        print(f"gristmill serve: {error}", file=sys.stderr)
        raise typer.Exit(CANNOT_START) from None
    raise typer.Exit(serve(settings))


serve_command.__signature__ = flags_of(Settings)  # type: ignore[attr-defined]


def serve(settings: Settings) -> int:
    """Serves until a stop signal. Returns the exit status."""
    # Imported before the event loop starts, because the import takes most of a second.
    import gristmill_service.service  # noqa: F401
    from gristmill_service.logs import configure_logs
    from gristmill_service.process_tuning import tune_process
    from gristmill_service.tracing import configure_tracing

    configure_logs(settings.log_level, settings.log_format)
    tune_process()
    try:
        end_tracing = configure_tracing()
    except GristmillError as error:
        print(f"gristmill serve: {error}", file=sys.stderr)
        return CANNOT_START
    try:
        return asyncio.run(_serve(settings))
    finally:
        end_tracing()


async def _serve(settings: Settings) -> int:
    from gristmill_service.api.meter import MeteredPool
    from gristmill_service.process_tuning import spare_what_is_there, started_pool

    stop_asked = _stop_asked()
    try:
        asyncio.get_running_loop().set_default_executor(started_pool(_POOL_THREADS, "gristmill-pool", MeteredPool))
        service = await _started(settings, stop_asked)
    except (GristmillError, OSError) as error:
        print(f"gristmill serve: {error}", file=sys.stderr)
        return CANNOT_START
    if service is None:
        return OK
    try:
        with _announced(service, settings.announce):
            spare_what_is_there()
            print(ready_line(service.grpc_address, service.http_url, settings, service.probe_url), flush=True)
            await stop_asked.wait()
    except OSError as error:
        print(
            f"gristmill serve: announce: cannot write {settings.announce}: {error.strerror}; pass a writable path",
            file=sys.stderr,
        )
        return CANNOT_START
    finally:
        await service.stop()
    return OK


async def _started(settings: Settings, stop_asked: asyncio.Event) -> Service | None:
    """Starts the service once its store answers, and answers probes until then. Returns None after a stop signal."""
    import structlog

    from gristmill_service.api.http.waiting import WaitingServer
    from gristmill_service.service import Service
    from gristmill_service.storage.backends import StorageUnreachableError

    waiting, reason = WaitingServer(settings), ""
    try:
        while True:
            service = Service(settings, waiting)
            try:
                await service.start()
                return service
            except StorageUnreachableError as error:
                before, reason = reason, str(error)
            if reason != before:
                structlog.get_logger(__name__).warning("waiting for the store", reason=reason)
            await waiting.report(reason)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop_asked.wait(), _STORE_PAUSE_S)
                return None
    finally:
        await waiting.close()


def ready_line(grpc_address: str, url: str, settings: Settings, probe_url: str | None = None) -> str:
    """Returns what is printed when the service answers."""
    probes = "" if probe_url is None else f", probes and metrics {probe_url}"
    line = f"gristmill is ready: gRPC {grpc_address}, HTTP {url}{probes}; its page: {url}/, its API: {url}/docs"
    lost = "; its runs are only in memory, and end with it (--journal-dir keeps them)"
    return line + lost if settings.run_store == "memory" else line


def _stop_asked() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets. The second signal ends the process at once."""
    asked = asyncio.Event()

    def ask(number: int) -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ask, number)
    return asked


@contextmanager
def _announced(service: Service, path: Path | None) -> Iterator[None]:
    """Writes the addresses to a file in one step, so that it is never incomplete, and removes the file at the end."""
    if path is None:
        yield
        return
    addresses = {"grpc_address": service.grpc_address, "http_url": service.http_url, "probe_url": service.probe_url}
    document = {**addresses, "pid": os.getpid()}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document) + "\n", encoding="utf-8")
    draft.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
