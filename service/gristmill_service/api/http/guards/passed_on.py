"""Requests that a replica passed on: who it says that calls is who calls."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.errors import UnavailableError
from gristmill_service.access import passed_on
from gristmill_service.access.gate import Gate
from gristmill_service.api.errors import refusal
from gristmill_service.api.http.guards.debts import refuse_unknown


class PassedOn:
    """ASGI middleware. What is within sees the caller's address in place of the replica's, and refuses, bounds and
    counts as if the caller had come here."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            came_from = self._gate.came_from(Headers(scope=scope))
        except UnavailableError as error:
            if not self._gate.is_open:
                await refuse_unknown(self._gate.debts, scope)
            told = refusal(error)
            await JSONResponse(told.body, told.http_status, told.headers)(scope, receive, send)
            return
        passed_on.begin(came_from)
        if came_from:
            scope["client"] = (came_from, 0)
        await self._app(scope, receive, send)
