"""Request bodies: read whole or refused, bounded before and after decompression, before any handler runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.errors import GristmillError, InvalidArgumentError, ResourceExhaustedError
from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE
from gristmill_service.api.errors import refusal

TOO_LARGE = 413
_MOST_OF_ANYONE = 64 << 10
BODY = "gristmill.body"
"""The key under which a request's scope has its body, decompressed, for whoever passes the request on."""


class BoundedBodies:
    """ASGI middleware. `refuse_too_large` raises ResourceExhaustedError for a size that is. Callers who are not known
    sign in, which takes little."""

    def __init__(self, app: ASGIApp, limit: int, refuse_too_large: Callable[[int], None]) -> None:
        self._app = app
        self._limit = limit
        self._refuse = refuse_too_large

    def _refuse_too_large(self, size: int) -> None:
        if caller.current() is ANYONE and size > _MOST_OF_ANYONE:
            raise ResourceExhaustedError(
                f"the request has more than the {_MOST_OF_ANYONE} bytes that are read of a caller who is not known; "
                "show a token"
            )
        self._refuse(size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(dict(scope["headers"]), receive)
        except GristmillError as error:
            await _refuse(error)(scope, receive, send)
            return
        scope[BODY] = body
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        body = await self._received(headers.get(b"content-length", b""), receive)
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
        if encoding == "gzip":
            return await run_in_threadpool(self._decompress, body)
        if encoding != "identity":
            raise InvalidArgumentError(f"content-encoding {encoding!r} is not understood; send gzip or none")
        return body

    async def _received(self, declared: bytes, receive: Receive) -> bytes:
        """Returns the body as it was sent. Raises InvalidArgumentError where the caller went away before its end."""
        if declared.isdigit():
            self._refuse_too_large(int(declared))
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _cut(size)
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            self._refuse_too_large(size)
            more = message.get("more_body", False)
        if declared.isdigit() and int(declared) != size:
            raise _cut(size)
        return b"".join(pieces)

    def _decompress(self, body: bytes) -> bytes:
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            most = _MOST_OF_ANYONE if caller.current() is ANYONE else self._limit
            found = decompressor.decompress(body, most + 1)
        except zlib.error as error:
            raise InvalidArgumentError(f"the body is not gzip as content-encoding says: {error}") from None
        self._refuse_too_large(len(found))
        if not decompressor.eof:
            raise InvalidArgumentError(f"the gzip body ends early, after {len(body)} bytes; send all of it")
        if decompressor.unused_data:
            raise InvalidArgumentError(
                f"the gzip body has {len(decompressor.unused_data)} bytes after its end; send one gzip stream"
            )
        return found


def _cut(size: int) -> InvalidArgumentError:
    """The error is seen in metrics and traces only: its caller has gone."""
    return InvalidArgumentError(f"the request ended after {size} bytes of its body, before it was whole; send it again")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body, once, and then what comes after it: the caller's going away."""
    unread = True

    async def replay() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _refuse(error: GristmillError) -> JSONResponse:
    told = refusal(error)
    if isinstance(error, ResourceExhaustedError):
        # It stays too large: no Retry-After. The rest of the body is not read, so the connection cannot go on.
        body = {"error": {"code": told.code, "type": told.type, "message": told.message}}
        return JSONResponse(body, TOO_LARGE, {"Connection": "close"})
    return JSONResponse(told.body, told.http_status, told.headers)
