"""The HTTP server: uvicorn in a thread of its own. Signals are the process's business."""

from __future__ import annotations

import socket
import threading

import uvicorn
from fastapi import FastAPI

from gristmill.errors import UnavailableError
from gristmill_service.settings import split_address


class HttpServer:
    """Listens from `start` on. Raises UnavailableError from the constructor where the address cannot be had."""

    def __init__(self, app: FastAPI, address: str, grace_s: float) -> None:
        self._socket = _bind(address)
        host, port = split_address(address)[0], self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                loop="asyncio",
                server_header=False,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered."""
        self._thread.start()
        self._server.is_started.wait()

    def close(self) -> None:
        """Frees the address of a server that was never started."""
        self._socket.close()

    def refuse_new_calls(self) -> None:
        """Calls being answered go on for at most the grace. Returns at once."""
        self._server.should_exit = True

    def wait_until_idle(self) -> None:
        self._thread.join()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_started = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_started.set()


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
            f"http_address: cannot listen on {address}: {error.strerror}; stop who listens there or choose another"
        ) from None
    return listener
