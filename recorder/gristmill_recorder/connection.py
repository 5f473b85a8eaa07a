"""An HTTP/1.1 connection to the engine, read by llhttp: a call at a time, and kept for the next.

Each call of an agent waits for this: what a general client does around a call was a third of what a bare proxy took of
the processor (docs/decisions/0013-recorder.md). The parser is httptools', as uvicorn's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httptools
from multidict import CIMultiDict

_MOST_HEAD_BYTES = 64 << 10
_MOST_WAITING = 1 << 20


class BrokenAnswerError(Exception):
    """The connection was lost, or what came over it is no answer."""


class Connection(asyncio.Protocol):
    """For one call after another. idle_since: by the loop's clock, when the last was over.

    status, headers: of the answer, once `begin` has returned.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.status = 0
        self.headers = CIMultiDict[str]()
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser: Any = None
        self._received = bytearray()
        self._head_bytes = 0
        self._has_head = self._is_over = self._is_kept = self._is_paused = False
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether another call may be made: the last answer is whole, and both sides keep the connection."""
        return self._is_over and self._is_kept and not self._transport.is_closing()

    @classmethod
    async def opened(cls, host: str, port: int, tls: ssl.SSLContext | None, within_s: float) -> Connection:
        """Raises BrokenAnswerError and TimeoutError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                _, connection = await loop.create_connection(cls, host, port, ssl=tls)
        except TimeoutError:
            raise
        except OSError as error:
            raise BrokenAnswerError(str(error)) from None
        return connection

    async def begin(self, request: bytes, silence_s: float) -> None:
        """Sends a request, and returns when the answer's head is here.

        silence_s: how long nothing may come. Raises BrokenAnswerError and TimeoutError.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._received.clear()
        self._head_bytes = 0
        self._has_head = self._is_over = self._is_kept = False
        self._transport.write(request)
        while not self._has_head:
            await self._more(silence_s)

    async def parts(self, silence_s: float) -> AsyncIterator[bytes]:
        """The answer's body, as it comes. As `begin`."""
        while True:
            if self._received:
                part = bytes(self._received)
                self._received.clear()
                if self._is_paused and not self._transport.is_closing():
                    self._is_paused = False
                    self._transport.resume_reading()
                yield part
            elif self._is_over:
                return
            else:
                await self._more(silence_s)

    def close(self) -> None:
        """At once; the engine sees that nobody waits for its answer."""
        self._transport.abort()

    async def _more(self, silence_s: float) -> None:
        """Returns when something has come."""
        if self._failure is not None:
            raise BrokenAnswerError(self._failure)
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(silence_s, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, problem: str) -> None:
        if self._failure is None:
            self._failure = problem
        self._is_kept = False
        self._transport.close()
        self._wake()

    # Of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._parser is None:
            # Nothing was asked for.
            self._fail("it sent more than its answer")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it changed its protocol")
        except httptools.HttpParserError as error:
            self._fail(f"what it sent is no HTTP: {error.__context__ or error}")
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._fail(f"its answer's head has more than {_MOST_HEAD_BYTES} bytes")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and not self._is_over and self._failure is None and exc is None and self._ends_with_it():
            self._is_over = True
        elif not self._is_over:
            self._fail("it closed the connection before its answer was whole")
        self._is_kept = False
        self._wake()

    def _ends_with_it(self) -> bool:
        """Whether the answer has no other end than the connection's."""
        return not ("content-length" in self.headers or "transfer-encoding" in self.headers)

    # Of the parser.

    def on_message_begin(self) -> None:
        if self._is_over:
            self._fail("it sent more than its answer")
        else:
            self.headers = CIMultiDict()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        if not self._is_over:
            self.status = self._parser.get_status_code()
            # One of 100 to 199 announces another.
            self._has_head = self.status >= 200

    def on_body(self, part: bytes) -> None:
        if self._is_over:
            return
        self._received += part
        if len(self._received) > _MOST_WAITING and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_over:
            self._is_over, self._is_kept = True, self._parser.should_keep_alive()


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
