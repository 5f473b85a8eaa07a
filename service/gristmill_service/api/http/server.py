"""The HTTP server: uvicorn on the running event loop. The process, not uvicorn, handles signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.applications import Starlette

from gristmill.errors import UnavailableError
from gristmill_service.access.certificates import Certificates, HttpCertificates
from gristmill_service.api.http.guards.connections import Connection, Connections, Listener
from gristmill_service.process_tuning import most_connections
from gristmill_service.settings import split_address

_log = structlog.get_logger(__name__)

_UNSENT_BYTES = 128 << 10
_HEADERS_BYTES = 64 << 10
"""The limit of a request's line and headers: the URL may name 1,024 groups."""


class HttpServer:
    """Serves HTTP after `start`. The constructor raises UnavailableError if the address is in use.

    setting: the name of the address' setting, for errors. most: the maximum number of connections.
    """

    def __init__(
        self,
        app: Starlette,
        address: str,
        grace_s: float,
        certificates: Certificates | None = None,
        *,
        setting: str = "http_address",
        most: int | None = None,
    ) -> None:
        self._socket, self._setting = _bind(address, setting), setting
        host, port = split_address(address)[0], self._socket.getsockname()[1]
        scheme = "http" if certificates is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            # The caller's address is that of the connection's peer; headers with another address are ignored.
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEADERS_BYTES,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        config.load()
        tls = None if certificates is None else HttpCertificates(certificates)
        self._server = _Server(config, self._socket, tls, Connections(most or most_connections()))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the server, and returns when it accepts requests. Raises UnavailableError if it cannot start."""
        self._serving = asyncio.create_task(self._server.serve())
        self._serving.add_done_callback(self._log_failure)
        has_begun = asyncio.ensure_future(self._server.has_begun.wait())
        await asyncio.wait([self._serving, has_begun], return_when=asyncio.FIRST_COMPLETED)
        has_begun.cancel()
        if self._serving.done():
            failure = self._serving.exception()
            message = f"the HTTP server at {self.url} cannot start: {failure!r}; see logs"
            raise UnavailableError(f"{self._setting}: {message}")

    def close(self) -> None:
        """Releases the address if the server was never started."""
        self._socket.close()

    def refuse_new_calls(self) -> None:
        """Refuses new calls. Running calls may continue for the grace period."""
        self._server.should_exit = True

    async def wait_until_idle(self) -> None:
        """Returns when the last call has been answered; at once if the server was never started."""
        if self._serving is not None:
            await asyncio.wait([self._serving])

    def _log_failure(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (failure := serving.exception()) is not None:
            _log.error("HTTP server failed", url=self.url, exc_info=failure)


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        certificates: HttpCertificates | None,
        connections: Connections,
    ) -> None:
        super().__init__(config)
        self.has_begun = asyncio.Event()
        self._listener, self._certificates, self._connections = listener, certificates, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        await self.lifespan.startup()

        def connection(address: str) -> Connection:
            return Connection(
                self._connections,
                address,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )

        # Uvicorn closes the listener like an asyncio server.
        listener = Listener(self._listener, self._connections, connection, self._certificates)
        self.servers = [listener]  # type: ignore[list-item]
        self.started = True
        self.has_begun.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(address: str, setting: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            # Allows listening on a port on which earlier connections are still closing.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Otherwise the kernel would buffer megabytes of an unread answer.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            # Accepts a connection when its first bytes arrive, or after a second or two: otherwise a connection that
            # is closed immediately would often cost as much as a request.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
            listener.bind(where)
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UnavailableError(
            f"{setting}: cannot listen on {address}: {error.strerror}; stop the program that uses it, or set another "
            f"{setting} (--{setting.replace('_', '-')})"
        ) from None
    return listener
