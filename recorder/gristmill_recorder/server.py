"""Runs a recorder in this process until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from gristmill import FailedPreconditionError, UnavailableError
from gristmill_recorder.app import RecorderApp
from gristmill_recorder.columns import names_of
from gristmill_recorder.engines.connection import Engine
from gristmill_recorder.engines.probe import Probe
from gristmill_recorder.journal import Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.run import Service
from gristmill_recorder.runs import Runs
from gristmill_recorder.settings import RecorderSettings

_log = logging.getLogger("gristmill.recorder")

_SYNC_S = 1.0
_BACKGROUND_S = 60.0


class _InOneLine(logging.Filter):
    """Logs a malformed HTTP request, or its body, as one line of level info, without a traceback: callers may send
    many."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            record.msg, record.args, record.exc_info = "HTTP request malformed: %r", (_message(error)[:200],), None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def _message(error: Exception) -> str:
    return error.message if isinstance(error, HttpProcessingError) else str(error)


async def serve(settings: RecorderSettings) -> None:
    """Serves agents until SIGTERM or SIGINT; a second signal ends the process at once.

    Before it returns, it answers the calls in progress and delivers steps, for at most `shutdown_grace_s`. Undelivered
    steps stay in the journal until the next start. Raises GristmillError if the journal cannot be opened, or the
    address cannot be bound.
    """
    stopped = _stop_event()
    # Report an invalid address or certificate of the service now, not at the first call.
    service = Service(settings.address)
    journal, metrics = Journal(settings.journal), Metrics()
    runs = Runs(service, journal, names_of(settings.columns), metrics)
    if left := runs.resume():
        _log.info("%d open trajectories resumed from the journal", left)
    engine = Engine(settings)
    app = RecorderApp(settings, runs, engine, metrics)
    background = (_sync(journal), _expire(runs, journal, settings), Probe(engine, settings).run())
    tasks = [asyncio.create_task(each) for each in background]
    try:
        runner = await _listening(app, settings)
        print(f"gristmill record is ready: {_url(settings, runner)} in front of {settings.upstream}", flush=True)
        await stopped.wait()
        app.is_ready = False
        end = time.monotonic() + settings.shutdown_grace_s
        await runner.cleanup()
        await runs.close(max(0.0, end - time.monotonic()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
        journal.close()


async def _listening(app: RecorderApp, settings: RecorderSettings) -> web.AppRunner:
    server_logger.addFilter(_InOneLine())
    runner = web.AppRunner(
        app.application(), handler_cancellation=True, access_log=None, shutdown_timeout=settings.shutdown_grace_s
    )
    await runner.setup()
    host, _, port = settings.http_address.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), backlog=1024).start()
    except OSError as error:
        await runner.cleanup()
        raise UnavailableError(
            f"http_address: cannot listen on {settings.http_address}: {error.strerror}; stop the program that uses it, "
            "or set another --http-address"
        ) from None
    return runner


def _url(settings: RecorderSettings, runner: web.AppRunner) -> str:
    return f"http://{settings.http_address.rpartition(':')[0]}:{runner.addresses[0][1]}"


def _stop_event() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set. A second signal ends the process."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop(number: int) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return stopped


async def _sync(journal: Journal) -> None:
    while True:
        await asyncio.sleep(_SYNC_S)
        try:
            await asyncio.to_thread(journal.sync)
        except FailedPreconditionError as error:
            _log.error("journal not synced, will be retried: %s", error)


async def _expire(runs: Runs, journal: Journal, settings: RecorderSettings) -> None:
    """Regularly deletes old closed trajectories, aborts idle ones, and frees unused runs."""
    while True:
        try:
            runs.journal_outcomes()
            journal.forget(settings.keep_closed_s)
        except FailedPreconditionError as error:
            _log.error("closed trajectories not journaled or deleted, will be retried: %s", error)
        await runs.abandon(settings.idle_abort_s)
        await runs.drop_unused()
        await asyncio.sleep(min(_BACKGROUND_S, settings.idle_abort_s))
