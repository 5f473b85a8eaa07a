"""Request ids, metrics and traces of HTTP requests."""

from __future__ import annotations

import time
from contextlib import nullcontext

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_service import tracing
from gristmill_service.monitoring.metrics import Metrics

# nginx's status for a caller that disconnected before the answer began.
_HUNG_UP = 499


class Observed:
    """ASGI middleware that assigns an id to each request and its answer, records its duration by handler, and traces
    it if tracing is enabled. No browser may take an answer for another type than it says."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        request_id, start, status, span = tracing.begin_request(headers), time.monotonic(), _HUNG_UP, None
        if tracing.is_on() and scope["path"].startswith("/v1/"):
            span = tracing.call_span(f"HTTP {scope['method']}", headers, request_id=request_id)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Replaces the header from the owner, if the request was forwarded.
                headers = {tracing.REQUEST_ID: request_id, "X-Content-Type-Options": "nosniff"}
                MutableHeaders(scope=message).update(headers)
            await send(message)

        with nullcontext() if span is None else tracing.within(span):
            try:
                await self._app(scope, receive, sent)
            finally:
                route = scope.get("route")
                call = getattr(route, "name", "unknown")
                self._metrics.observe_call("http", call, str(status), time.monotonic() - start)
                if span is not None:
                    span.update_name(f"{scope['method']} {getattr(route, 'path', 'unknown')}")
                    span.set_attribute("http.response.status_code", status)
                    if run := scope.get("path_params", {}).get("run"):
                        span.set_attribute("gristmill.run", run)
                    if status >= 500:
                        tracing.fail(span, str(status))
