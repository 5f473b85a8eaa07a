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
    """Listens on the service's HTTP address from the first `report` until `close`, after which the service does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._server: HttpServer | None = None
        self._reason = ""

    async def report(self, reason: str) -> None:
        """Sets the reason in later answers. Raises UnavailableError if the address is in use."""
        self._reason = reason
        if self._server is None:
            settings = self._settings
            app = Starlette(routes=[Route("/healthz", _alive)])
            app.router.default = self._refuse
            self._server = HttpServer(app, settings.http_address, 1, Certificates.of(settings))
            await self._server.start()

    async def close(self) -> None:
        """Releases the address. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.refuse_new_calls()
            await server.wait_until_idle()
            server.close()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = UnavailableError(f"not ready: the service waits for its store: {self._reason}; retry")
        await error_response(refused)(scope, receive, send)


async def _alive(_: Request) -> Response:
    return JSONResponse({"status": "alive"})
