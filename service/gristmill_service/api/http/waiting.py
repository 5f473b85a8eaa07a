"""Answers HTTP probes while the process waits for its stores, before the service starts: alive, not ready, and why."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gristmill.errors import UnavailableError
from gristmill_service.access.certificates import Certificates
from gristmill_service.api.errors import error_response
from gristmill_service.api.http.server import HttpServer
from gristmill_service.settings import Settings


class WaitingServer:
    """Listens on the service's HTTP addresses from the first `report` until `close`, after which the service does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._servers: list[HttpServer] = []
        self._reason = ""

    async def report(self, reason: str) -> None:
        """Sets the reason in later answers. Raises UnavailableError if the address is in use."""
        self._reason = reason
        if self._servers:
            return
        app, certificates = Starlette(routes=[Route("/healthz", _alive)]), Certificates.of(self._settings)
        app.router.default = self._refuse
        for setting in ("http_address", "probe_address"):
            if (address := getattr(self._settings, setting)) is not None:
                server = HttpServer(app, address, 1, certificates, setting=setting)
                self._servers.append(server)
                await server.start()

    async def close(self) -> None:
        """Releases the addresses. Idempotent."""
        while self._servers:
            server = self._servers.pop()
            server.refuse_new_calls()
            await server.wait_until_idle()
            server.close()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = UnavailableError(f"not ready: the service waits for its store: {self._reason}; retry")
        await error_response(refused)(scope, receive, send)


async def _alive(_: Request) -> Response:
    return JSONResponse({"status": "alive"})
