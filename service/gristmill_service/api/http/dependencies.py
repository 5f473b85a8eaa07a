"""Dependencies of the handlers: the backend, the run that the path names, and whether the caller has gone.

Also the middleware that gives each request its id, and its span while calls are traced.
"""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_service import tracing
from gristmill_service.api import request_ids
from gristmill_service.api.context import ApiContext
from gristmill_service.run.run import Run


async def _context(request: Request) -> ApiContext:
    return cast(ApiContext, request.app.state.context)


ContextDep = Annotated[ApiContext, Depends(_context)]


def _run(context: ContextDep, run: Annotated[str, Path(description="The run's name.")]) -> Run:
    return context.runs.get(run)


RunDep = Annotated[Run, Depends(_run)]


class RequestIds:
    """ASGI middleware that gives each request an id, and its answer the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = request_ids.begin((name.decode("latin-1"), value) for name, value in scope["headers"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Replaces the header of a process that the request was passed on to.
                MutableHeaders(scope=message)[request_ids.HEADER] = found
            await send(message)

        if tracing.is_on() and scope["path"].startswith("/v1/"):
            await self._traced(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        call = tracing.call_span(f"HTTP {scope['method']}", headers, request_id=request_ids.current())

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    tracing.fail(call, str(message["status"]))
            await send(message)

        with tracing.within(call):
            try:
                await self._app(scope, receive, observed)
            finally:
                call.update_name(f"{scope['method']} {getattr(scope.get('route'), 'path', 'unknown')}")
                if run := scope.get("path_params", {}).get("run"):
                    call.set_attribute("gristmill.run", run)


async def gone(request: Request) -> None:
    """Returns when the caller has closed the connection. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
