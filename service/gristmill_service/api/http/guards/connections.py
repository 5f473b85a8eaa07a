"""HTTP connections: counted when accepted, before the TLS handshake, and closed if they make no progress."""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio import sslproto
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import h11
import structlog
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gristmill_service.access.certificates import HttpCertificates
from gristmill_service.api.errors import NO_REQUEST, error_body

_log = structlog.get_logger(__name__)

REQUEST_S = 20.0
"""Seconds within which the headers of a connection's next request must arrive. Uvicorn closes idle connections
earlier."""

ABORT = "gristmill.abort"
"""The key of a function in a request's scope that closes its connection at once."""

UNREAD_S = 60.0
"""Seconds after which a connection is aborted if its peer does not read the answer."""

_READ_BYTES, _FIRST_READ_BYTES = 256 << 10, 8 << 10
"""How much is read at once of a body whose length is known, and of anything else: a connection's bytes are parsed as a
whole, and a chunk, a header or a request may have a few bytes, and each takes some 15 µs."""

_HANDSHAKE_S = 5.0
_TLS_TIMES = {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": 1.0}
# By default asyncio allocates 256 KiB per encrypted connection; TLS records have at most 16 KiB.
sslproto.SSLProtocol.max_size = 32 << 10
_PAUSE_S = 0.5
_DROPPED_S = 1.0
_REFUSAL = "the bytes are no HTTP/1.1 request, or its URL and headers exceed 64 KiB; list fewer values in the URL"
_AT_ONCE = 16
_MOST_OF_A_MACHINE = 0.75


class Connections:
    """The open connections of a server. At the limit, a new connection replaces the connection that has waited longest
    for its peer.

    most: the limit. One machine may have three quarters of it; then its new connections replace its own connections.
    """

    def __init__(self, most: int) -> None:
        self._most, self._share = most, max(1, int(most * _MOST_OF_A_MACHINE))
        self._count = 0
        self._counts: dict[str, int] = {}
        # Connections that wait for their peers, those that wait longest first.
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_of: dict[str, OrderedDict[Connection, None]] = {}

    def has_room(self, address: str) -> bool:
        """Returns whether a machine may open another connection. Closes an open one for it if needed."""
        if self._counts.get(address, 0) >= self._share:
            waiting = self._waiting_of.get(address)
        elif self._count >= self._most:
            waiting = self._waiting
        else:
            return True
        if not waiting:
            return False
        next(iter(waiting)).abort()
        return True

    def add(self, connection: Connection) -> None:
        self._count += 1
        self._counts[connection.address] = self._counts.get(connection.address, 0) + 1

    def remove(self, connection: Connection) -> None:
        self.note(connection, is_waiting=False)
        self._count -= 1
        self._counts[connection.address] -= 1
        if not self._counts[connection.address]:
            del self._counts[connection.address]

    def note(self, connection: Connection, *, is_waiting: bool) -> None:
        """Records that a connection starts or stops waiting for its peer."""
        of_address = self._waiting_of.setdefault(connection.address, OrderedDict())
        for waiting in (self._waiting, of_address):
            waiting.pop(connection, None)
            if is_waiting:
                waiting[connection] = None
        if not of_address:
            del self._waiting_of[connection.address]


_Wait = Literal["request", "body", "reader"]
"""What a connection waits for. request: a TLS handshake or the next request; body: the rest of a body; reader: its peer
to read."""


class Connection(H11Protocol):
    """An accepted connection. Its requests are cancelled when it closes."""

    def __init__(self, connections: Connections, address: str, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.address, self._connections = address, connections
        self._app, self.app = self.app, self._answer
        self._opening: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[Any] | None = None
        self._wait: _Wait | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_open, self._is_refused = True, False
        connections.add(self)
        self._watch()

    def open(self, accepted: socket.socket, certificates: HttpCertificates | None) -> None:
        """Starts the handshake. If it fails, the connection is closed."""
        self._opening = self.loop.create_task(self._open(accepted, certificates))

    async def _open(self, accepted: socket.socket, certificates: HttpCertificates | None) -> None:
        tls: dict[str, Any] = {}
        try:
            with suppress(OSError):
                if certificates is not None:
                    await self._first_bytes(accepted)
                    tls = {"ssl": certificates.context(), **_TLS_TIMES}
                await self.loop.connect_accepted_socket(lambda: self, accepted, **tls)
        finally:
            self._opening = None
            if self.transport is None:
                self._leave()
                accepted.close()

    async def _first_bytes(self, accepted: socket.socket) -> None:
        """Waits for the first bytes of the peer's handshake, because a handshake needs hundreds of kilobytes of memory.
        Raises OSError if the peer disconnects or sends nothing."""
        came = self.loop.create_future()
        self.loop.add_reader(accepted, came.set_result, None)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await came
        finally:
            self.loop.remove_reader(accepted)
        if _has_hung_up(accepted):
            raise ConnectionResetError

    def abort(self) -> None:
        self._leave()
        if self.transport is not None:
            self.transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Otherwise tens of kilobytes could remain unread without a timeout.
        transport.set_write_buffer_limits(high=1, low=0)
        self._read_at_most(_FIRST_READ_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)
        if self._answering is not None and not self.cycle.response_complete:
            self._answering.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are no request. What else arrives is dropped for a moment: a connection closed with unread
        bytes is reset, often before its peer has read the answer."""
        body = json.dumps(error_body("INVALID_ARGUMENT", "InvalidArgumentError", _REFUSAL)).encode()
        head = f"HTTP/1.1 {NO_REQUEST} Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        self.transport.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
        self._is_refused = True
        self.loop.call_later(_DROPPED_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        is_long = self.conn.their_state is h11.SEND_BODY and any(name == b"content-length" for name, _ in self.headers)
        self._read_at_most(_READ_BYTES if is_long else _FIRST_READ_BYTES)
        self._watch()

    def _read_at_most(self, nbytes: int) -> None:
        transport: Any = self.transport
        # Of asyncio's unencrypted transports; an encrypted one has a limit of its own.
        transport.max_size = nbytes

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. `send` returns when its message is in the kernel's buffer."""
        if self.cycle.disconnected:
            return
        answering = self._answering = asyncio.current_task()

        async def sent(message: Any) -> None:
            await send(message)
            await self.flow.drain()
            if message.get("more_body"):
                # Lets other requests be answered between parts, even if the peer reads fast.
                await asyncio.sleep(0)

        scope[ABORT] = self.abort
        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            if self._is_open:
                raise
        finally:
            del scope[ABORT]
            if self._answering is answering:
                self._answering = None

    def _watch(self) -> None:
        """Updates what the connection waits for. A wait that continues keeps its deadline."""
        wait = self._waits_for() if self._is_open else None
        if wait == self._wait:
            return
        self._wait = wait
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not self._is_open:
            return
        self._connections.note(self, is_waiting=wait is not None)
        if wait == "request":
            self._deadline = self.loop.call_later(REQUEST_S, self.abort)
        elif wait == "reader":
            self._look_for_reader(None)

    def _waits_for(self) -> _Wait | None:
        if self.flow is not None and self.flow.write_paused:
            return "reader"
        if self.conn.their_state is h11.SEND_BODY:
            # The unread rest of a body of an answered request has the timeout of the next request.
            return "request" if self.conn.our_state is h11.DONE else "body"
        return "request" if self.conn.their_state is h11.IDLE else None

    def _look_for_reader(self, unread: int | None) -> None:
        """Aborts the connection if the peer has read nothing since the last check."""
        now = self.transport.get_write_buffer_size()
        if unread is not None and now >= unread:
            self.abort()
        else:
            self._deadline = self.loop.call_later(UNREAD_S, self._look_for_reader, now)

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._connections.remove(self)
            self._watch()
            # Breaks a reference cycle, so that the memory is freed at once.
            self.app = self._app


class Listener:
    """Accepts connections, one per iteration of the loop, so that other calls are answered in between. Connections that
    their peers have already closed are cheap, so several are dropped per iteration.

    make(address): creates the connection. certificates: for TLS; None: not encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make: Callable[[str], Connection],
        certificates: HttpCertificates | None,
    ) -> None:
        self._listener, self._connections, self._make, self._certificates = listener, connections, make, certificates
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._accepting])

    async def _accept(self) -> None:
        loop, count = asyncio.get_running_loop(), 0
        with self._listener:
            while True:
                try:
                    accepted, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    # The peer has disconnected, or the process has no free file descriptor.
                    _log.warning("connection not accepted", reason=error.strerror)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                count += 1
                is_there = not _has_hung_up(accepted)
                if is_there and self._connections.has_room(address[0]):
                    self._make(address[0]).open(accepted, self._certificates)
                else:
                    accepted.close()
                if is_there or count % _AT_ONCE == 0:
                    await asyncio.sleep(0)


def _has_hung_up(accepted: socket.socket) -> bool:
    """Returns whether the peer closed the connection without sending anything."""
    try:
        return not accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
