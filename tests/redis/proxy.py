"""A bad network between a client and a server: slow, narrow, silent, cut; and TLS for servers that have none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from tests.redis.servers import HOST, free_port

if TYPE_CHECKING:
    import trustme

_CHUNK = 64 << 10
_CALL_TIMEOUT_S = 20.0

T = TypeVar("T")
Direction = Literal["requests", "replies"]


class Proxy:
    """Forwards connections on `port`, which stays the same, to the target; faults may be set and lifted at any time.

    carried: bytes that were passed on so far, each way.
    With a `certificate` clients must speak TLS to it; it speaks plainly to the target. source: the address of this
    machine from which it calls the target.
    """

    def __init__(self, target_port: int, *, certificate: trustme.LeafCert | None = None, source: str = HOST) -> None:
        self.port, self._source = 0, source
        self.target_port = target_port
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(self._tls)
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._busy_until: dict[Direction, float] = {"requests": 0.0, "replies": 0.0}
        self._lose_reply = False
        self.carried: dict[Direction, int] = {"requests": 0, "replies": 0}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        self.accept()
        return self

    def close(self) -> None:
        """Cuts every connection and ends the proxy's thread."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            self.refuse()
            self.cut()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"{'redis' if self._tls is None else 'rediss'}://{HOST}:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def delay(self, seconds: float) -> None:
        """From now on what is sent arrives this much later, each way; 0 lifts it. Throughput stays."""
        self._delay_s = seconds

    def throttle(self, bytes_per_s: float | None) -> None:
        """All connections together carry at most this each way; None lifts it."""
        self._bytes_per_s = bytes_per_s

    def freeze(self) -> None:
        """Nothing is forwarded, though connections stay open and new ones are taken: a network that went silent."""
        self._call(self._flowing.clear)

    def thaw(self) -> None:
        """What was held is forwarded, as is all that follows."""
        self._call(self._flowing.set)

    def cut(self) -> None:
        """Closes every connection now, with what was under way in it; new ones are taken."""
        self._await(self._cut())

    def lose_next_reply(self) -> None:
        """The next reply of the server is lost and its connection cut: the request was carried out, and none knows."""
        self._lose_reply = True

    def refuse(self) -> None:
        """New connections are refused, as where nothing listens; open ones live on."""
        self._call(self._refuse)

    def accept(self) -> None:
        """New connections are taken, on the same port as before."""
        self._call(self._listen)

    def __enter__(self) -> Self:
        return self if self._thread.is_alive() else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self._await(run())

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_CALL_TIMEOUT_S)

    def _listen(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            self._bind(listener)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        # No task waits for the next one: cancelled at the wrong moment, it would lose what it had just been given.
        self._loop.add_reader(listener, self._take, listener)

    def _bind(self, listener: socket.socket) -> None:
        if self.port:
            listener.bind((HOST, self.port))
            return
        for _ in range(20):
            port = free_port()
            with contextlib.suppress(OSError):  # taken since it was looked at
                listener.bind((HOST, port))
                self.port = port
                return
        raise OSError("no port for the proxy")

    def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _take(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone before it was taken
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _cut(self) -> None:
        # One that is cancelled before it began would not close its connection.
        await asyncio.sleep(0)
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for _ in range(3):  # transports close their sockets in the loop's next turns
            await asyncio.sleep(0)

    async def _serve(self, connection: socket.socket) -> None:
        transports: list[asyncio.BaseTransport] = []
        try:
            client = await self._streams(connection, self._tls, transports)
            upstream = socket.socket()
            upstream.setblocking(False)
            upstream.bind((self._source, 0))
            try:
                await self._loop.sock_connect(upstream, (HOST, self.target_port))
            except BaseException:
                upstream.close()
                raise
            server = await self._streams(upstream, None, transports)
            directions = [
                self._loop.create_task(self._forward("requests", client[0], server[1])),
                self._loop.create_task(self._forward("replies", server[0], client[1])),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in directions:
                    task.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
        except OSError:  # refused upstream, a client that is gone, a failed handshake: the other end sees it closed
            pass
        finally:
            for transport in transports:
                if isinstance(transport, asyncio.WriteTransport):
                    transport.abort()

    async def _streams(
        self, connection: socket.socket, tls: ssl.SSLContext | None, transports: list[asyncio.BaseTransport]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(limit=_CHUNK, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
        except BaseException:
            connection.close()
            raise
        transports.append(transport)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _forward(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Bounded, and apart from writing, so that a delay makes what is sent late but not little.
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        reading = self._loop.create_task(self._read(reader, queue))
        try:
            while True:
                due, chunk = await queue.get()
                await self._wait_until(due)
                await self._flowing.wait()
                if not chunk:
                    return
                if direction == "replies" and self._lose_reply:
                    self._lose_reply = False
                    return
                await self._squeeze(direction, len(chunk))
                self.carried[direction] += len(chunk)
                writer.write(chunk)
                await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(self._chunk_bytes())
            except OSError:
                chunk = b""
            await queue.put((self._loop.time() + self._delay_s, chunk))

    def _chunk_bytes(self) -> int:
        # Narrow links carry small pieces, so that one connection does not hold it for long.
        return _CHUNK if self._bytes_per_s is None else max(1, min(_CHUNK, int(self._bytes_per_s / 50)))

    async def _squeeze(self, direction: Direction, size: int) -> None:
        if self._bytes_per_s is None:
            return
        until = max(self._loop.time(), self._busy_until[direction]) + size / self._bytes_per_s
        self._busy_until[direction] = until
        await self._wait_until(until)

    async def _wait_until(self, due: float) -> None:
        if (left := due - self._loop.time()) > 0:
            await asyncio.sleep(left)
