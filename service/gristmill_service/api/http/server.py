"""The HTTP server: uvicorn in a thread of its own. The process handles signals, not uvicorn."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import partial
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from gristmill.errors import UnavailableError
from gristmill_service.access.certificates import Certificates, http_context
from gristmill_service.api.http.guards.connections import connections
from gristmill_service.process_tuning import most_connections
from gristmill_service.settings import split_address

_MOST_WAITING = 1024
_TLS_HELLO_S, _TLS_GOODBYE_S = 10.0, 1.0

_log = structlog.get_logger(__name__)


class HttpServer:
    """Listens from `start` on. Raises UnavailableError from the constructor where the address cannot be had."""

    def __init__(self, app: FastAPI, address: str, grace_s: float, certificates: Certificates | None = None) -> None:
        self._socket = _bind(address)
        host, port = split_address(address)[0], self._socket.getsockname()[1]
        scheme = "http" if certificates is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._has_begun = threading.Event()
        self._failure: BaseException | None = None
        most = most_connections()
        config = uvicorn.Config(
            app,
            http=connections(most),
            # So many are taken at once, before the protocol counts them.
            backlog=min(_MOST_WAITING, most // 2),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            loop="asyncio",
            server_header=False,
            # Who calls is the other end of the connection, whatever its headers say.
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        if certificates is not None:
            config.load()
            config.ssl = http_context(certificates)
        self._server = _Server(config, self._has_begun)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered. Raises UnavailableError where the server ends instead."""
        self._thread.start()
        self._has_begun.wait()
        if not self._server.started:
            self._thread.join()
            raise UnavailableError(f"http_address: the HTTP server at {self.url} cannot start: {self._failure!r}")

    def close(self) -> None:
        """Frees the address of a server that was never started."""
        self._socket.close()

    def refuse_new_calls(self) -> None:
        """Calls being answered go on for at most the grace. Returns at once."""
        self._server.should_exit = True

    def wait_until_idle(self) -> None:
        """Returns when the last call is answered; at once where the server never started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, who waits for the start is told
            self._failure = error
            _log.exception("HTTP server failed", url=self.url)
        finally:
            self._has_begun.set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, has_begun: threading.Event) -> None:
        super().__init__(config)
        self._has_begun = has_begun

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is not None:
            # Else a connection that its caller keeps open and does not read would hold up the end for half a minute.
            loop: Any = asyncio.get_running_loop()
            loop.create_server = partial(
                loop.create_server, ssl_shutdown_timeout=_TLS_GOODBYE_S, ssl_handshake_timeout=_TLS_HELLO_S
            )
        await super().startup(sockets)
        self._has_begun.set()


def _bind(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            # As every server does: a port whose last connections are still closing may be taken again.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(socket.SOMAXCONN)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UnavailableError(
            f"http_address: cannot listen on {address}: {error.strerror}; stop the program that uses it, or give "
            "another http_address (--http-address)"
        ) from None
    return listener
