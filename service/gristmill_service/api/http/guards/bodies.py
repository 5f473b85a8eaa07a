"""Request bodies: read whole or refused, bounded before and after decompression, before any handler runs."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.errors import DeadlineExceededError, GristmillError, InvalidArgumentError, ResourceExhaustedError
from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN
from gristmill_service.api.errors import refusal
from gristmill_service.api.http.guards.turns import turn
from gristmill_service.api.http.json_bodies import check_size, most_bytes
from gristmill_service.api.places import Places
from gristmill_service.call_threads import CallThreads

TOO_LARGE = 413
_MOST_OF_ANYONE = 64 << 10
_SMALL_BYTES = 64 << 10
_AT_ONCE = 32
_LONGEST_S = 20.0
_LEAST_BYTES_A_S = 64 << 10
_NO_JSON = frozenset(["application/x-protobuf", "application/octet-stream"])
BODY = "gristmill.body"
"""The key under which a request's scope has its body, decompressed, for whoever passes the request on."""
CALLER = "gristmill.caller"
"""The key under which it has whose places the request takes."""


class BoundedBodies:
    """ASGI middleware. `refuse_too_large` raises ResourceExhaustedError for a size that is. Callers who are not known
    sign in, which takes little.

    Of bodies beyond 64 KiB a few are held at once, and each has to come at 64 KiB a second. threads: with whose calls
    those take turns that are to be decompressed.
    """

    def __init__(
        self, app: ASGIApp, limit: int, refuse_too_large: Callable[[int], None], threads: CallThreads | None = None
    ) -> None:
        self._app, self._threads = app, threads
        self._limit = limit
        self._refuse = refuse_too_large
        self._places = Places(
            _AT_ONCE, f"{_AT_ONCE} large requests are being read or answered; retry", _LONGEST_S, share=0.75
        )

    def _refuse_too_large(self, size: int) -> None:
        if caller.current() is ANYONE and size > _MOST_OF_ANYONE:
            raise ResourceExhaustedError(
                f"the request has more than {_MOST_OF_ANYONE} bytes, the most that the service reads from a caller "
                "without a known token; send a token"
            )
        self._refuse(size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[CALLER] = _caller_of(scope)
        with ExitStack() as held:
            try:
                hold = cache(lambda: self._hold(scope, held))
                body = await self._read(scope, receive, hold)
            except GristmillError as error:
                await _refuse(error)(scope, receive, send)
                return
            scope[BODY] = body
            await self._app(scope, _replay(body, receive), send)

    def _hold(self, scope: Scope, held: ExitStack) -> None:
        """Takes a place for a large body until it is answered. Raises _FullError where there is none."""
        try:
            place = held.enter_context(self._places.place(scope[CALLER], lambda: None))
        except ResourceExhaustedError as error:
            raise _FullError(str(error)) from None
        place.idle_since = None

    async def _read(self, scope: Scope, receive: Receive, hold: Callable[[], None]) -> bytes:
        headers, path = dict(scope["headers"]), scope["path"]
        body = await self._received(headers.get(b"content-length", b""), receive, hold)
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        most = self._limit if kind in _NO_JSON else min(self._limit, most_bytes(path))
        if encoding == "gzip":
            hold()
            async with nullcontext() if self._threads is None else turn(self._threads, scope):
                body = await run_in_threadpool(self._decompress, body, most)
        elif encoding != "identity":
            raise InvalidArgumentError(f"content-encoding {encoding!r} is not understood; send gzip or none")
        if kind not in _NO_JSON:
            check_size(body, path)
        return body

    async def _received(self, declared: bytes, receive: Receive, hold: Callable[[], None]) -> bytes:
        """Returns the body as it was sent. Raises InvalidArgumentError where the caller went away before its end."""
        if declared.isdigit():
            self._refuse_too_large(int(declared))
        pieces, size, more = list[bytes](), 0, True
        begin = asyncio.get_running_loop().time()
        while more:
            try:
                async with asyncio.timeout_at(begin + _LONGEST_S + size / _LEAST_BYTES_A_S):
                    message = await receive()
            except TimeoutError:
                raise _SlowError(
                    f"{size} bytes of the body came within {_LONGEST_S + size / _LEAST_BYTES_A_S:.0f} s; send it at "
                    f"{_LEAST_BYTES_A_S} bytes a second"
                ) from None
            if message["type"] == "http.disconnect":
                raise _cut(size)
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            self._refuse_too_large(size)
            if size > _SMALL_BYTES:
                hold()
            more = message.get("more_body", False)
        if declared.isdigit() and int(declared) != size:
            raise _cut(size)
        return b"".join(pieces)

    def _decompress(self, body: bytes, most: int) -> bytes:
        """One byte more than `most` where there are more."""
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            most = min(most, _MOST_OF_ANYONE) if caller.current() is ANYONE else most
            found = decompressor.decompress(body, most + 1)
        except zlib.error as error:
            raise InvalidArgumentError(f"content-encoding is gzip, and the body is not: {error}; send gzip") from None
        self._refuse_too_large(len(found))
        if len(found) > most:
            return found
        if not decompressor.eof:
            raise InvalidArgumentError(f"the gzip body ends early, after {len(body)} bytes; send all of it")
        if decompressor.unused_data:
            raise InvalidArgumentError(
                f"the gzip body has {len(decompressor.unused_data)} bytes after its end; send one gzip stream"
            )
        return found


def _caller_of(scope: Scope) -> str:
    """Who shares places with whom: callers by their names, and without tokens by the machines they call from."""
    found, address = caller.current(), scope.get("client") or ("",)
    return str(address[0]) if found is EVERYONE_IS_ADMIN else found.name


class _FullError(ResourceExhaustedError):
    """There is no place for a large body now."""


class _SlowError(DeadlineExceededError):
    """The body does not come."""


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
    if isinstance(error, _FullError | _SlowError):
        told = replace(told, type=type(error).__mro__[1].__name__)
        return JSONResponse(told.body, told.http_status, {**told.headers, "Connection": "close"})
    if isinstance(error, ResourceExhaustedError):
        # It stays too large: no Retry-After. The rest of the body is not read, so the connection cannot go on.
        body = {"error": {"code": told.code, "type": told.type, "message": told.message}}
        return JSONResponse(body, TOO_LARGE, {"Connection": "close"})
    return JSONResponse(told.body, told.http_status, told.headers)
