"""Requests are answered in turn with the calls of gRPC: callers share the service's time over both doors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN
from gristmill_service.call_threads import CallThreads, waiting

# Whoever asks them takes a service that is slow for one that is dead.
_PROBES = frozenset(["/healthz", "/readyz"])


class Turns:
    """ASGI middleware, for whom the body is there and the caller is known."""

    def __init__(self, app: ASGIApp, threads: CallThreads) -> None:
        self._app, self._threads = app, threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message.get("more_body"):
                # Until the caller has taken some of what came before.
                with waiting():
                    await send(message)
            else:
                await send(message)

        async with turn(self._threads, scope):
            await self._app(scope, receive, sent)


@asynccontextmanager
async def turn(threads: CallThreads, scope: Scope) -> AsyncIterator[None]:
    """Waits until it is the turn of the request's caller. What is within counts as the caller's, but for what says that
    it waits."""
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    granted: asyncio.Future[None] = loop.create_future()

    def grant() -> None:
        if not granted.done():
            granted.set_result(None)

    def begin() -> None:
        if threading.get_ident() == here:
            grant()
            return
        # A loop that is closed has nobody who waits any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(grant)

    found = threads.queue(_queue_of(scope), begin)
    try:
        await granted
        with found.at_work():
            yield
    finally:
        found.end()


def _queue_of(scope: Scope) -> str:
    """As gRPC's calls queue: by the caller's name, and where that is not known by the machine."""
    found = caller.current()
    if found is not ANYONE and found is not EVERYONE_IS_ADMIN:
        return found.name
    address = str((scope.get("client") or ("",))[0])
    return f"ipv6:%5B{address}%5D" if ":" in address else f"ipv4:{address}"
