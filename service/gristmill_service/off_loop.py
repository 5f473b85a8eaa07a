"""Awaits work in the thread pool, and repeats background tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import structlog

from gristmill.errors import GristmillError, NotFoundError, UnavailableError

_log = structlog.get_logger(__name__)

_PAUSE_S = 1e-5
"""In fact some 60 µs, about as long as a check of few rows."""

P = ParamSpec("P")
T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Awaits work that must not be interrupted: a cancellation takes effect after the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await asyncio.wait([task])
        if not task.cancelled() and not isinstance(error := task.exception(), GristmillError | OSError | None):
            _log.error("task failed", exc_info=error)
        raise


def ignore_error(task: asyncio.Future[Any]) -> None:
    """Marks an error of the task as handled: asyncio logs the error of a task that nobody awaits any more."""
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())


async def each(pieces: Iterator[T]) -> AsyncIterator[T]:
    """Yields the items of a blocking iterator. Each item is read in a thread."""
    try:
        # The read must finish, because an iterator cannot be closed while it is read.
        while (piece := await finished(asyncio.to_thread(next, pieces, None))) is not None:
            yield piece
    finally:
        close: Any = getattr(pieces, "close", None)
        if close is not None:
            await asyncio.to_thread(close)


async def every(seconds: float, do: Callable[[], Awaitable[None]]) -> None:
    """Calls a function again and again, pausing between calls. Logs errors."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await do()
        except Exception:  # noqa: BLE001 - one failure is no reason to stop
            _log.exception("timer failed")


async def quietly(work: Callable[[], Awaitable[Any]]) -> None:
    """Ignores errors of a task: `unhealthy_reason` reports a store that refuses, and a run may be deleted in the
    meantime."""
    with suppress(UnavailableError, NotFoundError):
        await work()


def let_the_loop_run() -> None:
    """Pauses the current thread, which computes for long. It delays the event loop each time the loop releases the
    GIL."""
    time.sleep(_PAUSE_S)


class OneByOne:
    """Runs slow functions that need much memory in the thread pool, one at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._lock:
            return await finished(asyncio.to_thread(function, *args, **kwargs))
