"""Slots of HTTP requests: taken before a body is read, and released when the answer is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.errors import ResourceExhaustedError
from gristmill_service.api.admission import Admission, Kind, Slot
from gristmill_service.api.errors import CLOSE, STATUSES, TOO_LARGE, error_response
from gristmill_service.api.http.guards.connections import ABORT
from gristmill_service.api.meter import metered, spent_s

SLOT = "gristmill.slot"
"""The key of the slot in a request's scope. Probes and the files of the page have no slot, so that they are always
answered."""

THROTTLED = "gristmill.throttled"
"""The key of the name for which invalid calls of the request's caller are counted."""

HELD = "gristmill.held"
"""The key of the number of bytes that a handler uses in memory until its whole answer is sent."""

_FILES = frozenset(["/healthz", "/readyz", "/", "/docs"])
_PART_BYTES = 128 << 10
_CODES = {status: code for code, (_, status) in STATUSES.items()} | {TOO_LARGE: "INVALID_ARGUMENT"}


class Admitted:
    """ASGI middleware that takes a slot, and delays errors for a caller that made too many invalid calls."""

    def __init__(
        self, app: ASGIApp, admission: Admission, recognize: Callable[[Scope], tuple[str, Kind]], *, throttles: bool
    ) -> None:
        """recognize: returns the name and the kind of a request's slot, and sets THROTTLED. throttles: whether invalid
        calls are counted; False without tokens, as callers are unknown."""
        self._app, self._admission, self._recognize, self._throttles = app, admission, recognize, throttles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _FILES or scope["path"].startswith("/page/"):
            await self._app(scope, receive, send)
            return
        name, kind = self._recognize(scope)
        try:
            slot = scope[SLOT] = await self._admission.enter(name, kind, scope.get(ABORT))
        except ResourceExhaustedError as error:
            await error_response(error, CLOSE)(scope, receive, send)
            return
        # The middleware `Bodies` has its own timeout.
        slot.due = None
        nbytes = 0

        async def counted() -> Message:
            nonlocal nbytes
            message = await receive()
            nbytes += len(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                if code := "INVALID_ARGUMENT" if slot.is_wrong else _CODES.get(message["status"]):
                    await self._refuse(slot.caller, scope[THROTTLED], code, nbytes, message)
                await send(message)
            else:
                await _send_in_parts(message, slot, scope.get(HELD, 0), send)

        try:
            await metered(self._app(scope, counted, sent))  # type: ignore[arg-type]
        finally:
            slot.close()

    async def _refuse(self, caller: str, connection: str, code: str, nbytes: int, message: Message) -> None:
        if not self._throttles:
            return
        if delay_s := self._admission.refused(caller, connection, code, nbytes, spent_s()):
            await asyncio.sleep(delay_s)
            MutableHeaders(scope=message).update(CLOSE)


async def _send_in_parts(message: Message, slot: Slot, held: int, send: Send) -> None:
    """Sends a part of an answer as fast as it is read, and counts the unsent bytes. held: the bytes that the handler
    has in memory."""
    body, more_body = message.get("body", b""), message.get("more_body", False)
    if len(body) <= _PART_BYTES and not held:
        await send(message)
        return
    view = memoryview(body)
    for begin in range(0, max(1, len(body)), _PART_BYTES):
        end = begin + _PART_BYTES
        await slot.hold(held + len(body) - begin)
        await send({**message, "body": view[begin:end], "more_body": more_body or end < len(body)})
        # No deadline for the caller until there is more to send.
        slot.due = None


def address_of(scope: Scope) -> str:
    """Returns the address of the machine that sent the request."""
    return str((scope.get("client") or ("",))[0])
