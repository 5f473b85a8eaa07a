"""Reads request bodies completely, or rejects them, before a handler runs. Both the compressed and the decompressed
size are limited."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import numpy as np
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.errors import DeadlineExceededError, GristmillError, InvalidArgumentError, ResourceExhaustedError
from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE
from gristmill_service.api.admission import LEAST_BYTES_PER_S, REQUEST_S, SMALL_BYTES, Slot
from gristmill_service.api.bounds import check_json, check_query, is_json, of_path
from gristmill_service.api.calls import ON_LOOP_BYTES
from gristmill_service.api.errors import CLOSE, TOO_LARGE, error_body, error_response
from gristmill_service.api.http.guards.admitted import SLOT
from gristmill_service.off_loop import OneByOne

_MOST_OF_ANYONE = 64 << 10
BODY = "gristmill.body"
"""The key of the decompressed body in a request's scope, which is used to forward the request."""


class Bodies:
    """ASGI middleware that reads the body. It limits the number of large bodies in memory, and each must arrive at
    64 KiB/s.

    refuse_too_large: raises ResourceExhaustedError for a size above the limit. limit: the largest valid size.
    """

    def __init__(self, app: ASGIApp, limit: int, refuse_too_large: Callable[[int], None]) -> None:
        self._app, self._limit, self._refuse_too_large = app, limit, refuse_too_large
        self._one_by_one = OneByOne()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_query(scope.get("query_string", b""))
            if SLOT not in scope:
                await self._app(scope, receive, send)
                return
            body = scope[BODY] = await self._read(scope, receive)
        except _TooLargeError as error:
            # No Retry-After, because retrying cannot help. The rest of the body is not read, so the connection is
            # closed.
            refused = error_body("RESOURCE_EXHAUSTED", "ResourceExhaustedError", str(error))
            await JSONResponse(refused, TOO_LARGE, CLOSE)(scope, receive, send)
            return
        except GristmillError as error:
            await error_response(error, None if isinstance(error, InvalidArgumentError) else CLOSE)(
                scope, receive, send
            )
            return
        is_unread = True

        async def replay() -> Message:
            """Returns the body once, then later messages, such as the caller's disconnect."""
            nonlocal is_unread
            if is_unread:
                is_unread = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | memoryview:
        headers, slot, path = dict(scope["headers"]), scope[SLOT], scope["path"]
        body = await self._received(headers.get(b"content-length", b""), receive, slot)
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        json = of_path(path) if is_json(scope["method"], path, kind) else None
        most = self._limit if json is None else min(self._limit, json.nbytes)
        if encoding == "gzip":
            await slot.place()
            # The body is decompressed to at most one byte above the limit, which shows that it is too large.
            body = await self._one_by_one(_decompressed, body, min(most, self._most()) + 1)
            self._check_size(len(body))
        elif encoding != "identity":
            raise InvalidArgumentError(f"content-encoding {encoding!r} is not supported; send gzip, or no encoding")
        if json is not None:
            if len(body) <= ON_LOOP_BYTES:
                check_json(body, json)
            else:
                await self._one_by_one(check_json, body, json)
            body = bytes(body)
        await slot.came(len(body))
        return body

    async def _received(self, declared: bytes, receive: Receive, slot: Slot) -> bytes | memoryview:
        """Returns the body as it was sent. Raises InvalidArgumentError if the caller disconnects before its end."""
        length = int(declared) if declared.isdigit() else 0
        self._check_size(length)
        # Filled while it arrives, because joining the pieces of a large body would hold up the event loop.
        large = np.empty(length, np.uint8).data if length > SMALL_BYTES else None
        begin, pieces, size, more = asyncio.get_running_loop().time(), list[bytes](), 0, True
        while more:
            if max(length, size) > SMALL_BYTES:
                await slot.place()
            limit_s = REQUEST_S + size / LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout_at(begin + limit_s):
                    message = await receive()
            except TimeoutError:
                arrived = f"only {size} bytes of the body arrived within {limit_s:.0f} s"
                raise DeadlineExceededError(f"{arrived}; send at least {LEAST_BYTES_PER_S} bytes per second") from None
            if message["type"] == "http.disconnect":
                raise _cut(size)
            piece = message.get("body", b"")
            size += len(piece)
            self._check_size(size)
            if large is None:
                pieces.append(piece)
            elif size <= length:
                large[size - len(piece) : size] = piece
            more = message.get("more_body", False)
        if declared.isdigit() and length != size:
            raise _cut(size)
        return b"".join(pieces) if large is None else large

    def _most(self) -> int:
        """Returns the limit for the caller. It is low for an unknown caller, which can only sign in."""
        return min(self._limit, _MOST_OF_ANYONE) if caller.current() is ANYONE else self._limit

    def _check_size(self, size: int) -> None:
        """Raises _TooLargeError."""
        if caller.current() is ANYONE and size > _MOST_OF_ANYONE:
            raise _TooLargeError(
                f"the request exceeds {_MOST_OF_ANYONE} bytes, the limit for a caller without a valid token; send one"
            )
        try:
            self._refuse_too_large(size)
        except ResourceExhaustedError as error:
            raise _TooLargeError(str(error)) from None


class _TooLargeError(Exception):
    """The body exceeds every limit."""


def _cut(size: int) -> InvalidArgumentError:
    """Returns the error of an incomplete body. Only metrics and traces use it, because the caller has disconnected."""
    return InvalidArgumentError(f"the body is incomplete: the request ended after {size} bytes; send it again")


def _decompressed(body: bytes | memoryview, most: int) -> bytes:
    """Decompresses the body to at most this many bytes."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        data = decompressor.decompress(body, most)
    except zlib.error as error:
        raise InvalidArgumentError(f"content-encoding is gzip, but the body is not: {error}; send gzip") from None
    if len(data) == most:
        return data
    if not decompressor.eof:
        raise InvalidArgumentError(f"the gzip body is incomplete: it ends after {len(body)} bytes; send all of it")
    if decompressor.unused_data:
        raise InvalidArgumentError(
            f"the gzip body has {len(decompressor.unused_data)} bytes after its end; send one gzip stream"
        )
    return data
