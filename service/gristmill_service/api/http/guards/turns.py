"""Requests are answered in turn with the calls of gRPC: callers share the service's time over both doors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

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

        body = await receive()
        gone = asyncio.ensure_future(receive())
        try:
            async with turn(self._threads, scope, gone) as is_awaited:
                if is_awaited:
                    await self._app(scope, _again(body, gone), sent)
        finally:
            gone.cancel()


def _again(body: Message, gone: asyncio.Future[Message]) -> Receive:
    """Gives the messages that were received already: the whole body, and that the caller is gone."""
    messages = [body]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.shield(gone)

    return receive


@asynccontextmanager
async def turn(threads: CallThreads, scope: Scope, gone: asyncio.Future[Message] | None = None) -> AsyncIterator[bool]:
    """Waits until it is the turn of the request's caller. What is within counts as the caller's, but for what says that
    it waits. gone: is done when nobody waits for the answer any more.

    Gives False where the caller went away before its turn: then nothing is to be done.
    """
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
        ends: list[asyncio.Future[Any]] = [granted] if gone is None else [granted, gone]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not granted.done():
            yield False
            return
        with found.at_work():
            yield True
    finally:
        found.end()


def _queue_of(scope: Scope) -> str:
    """As gRPC's calls queue: by the caller's name, and where that is not known by the machine."""
    found = caller.current()
    if found is not ANYONE and found is not EVERYONE_IS_ADMIN:
        return found.name
    address = str((scope.get("client") or ("",))[0])
    return f"ipv6:%5B{address}%5D" if ":" in address else f"ipv4:{address}"
