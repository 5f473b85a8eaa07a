"""Refuses what a browser sends for a page of another site: a service on the loopback of a machine where a browser runs
is not every website's to command."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill_service.api.http.answers import error_body

_READS = frozenset(["GET", "HEAD", "OPTIONS"])
_FORBIDDEN = 403


class SameOrigin:
    """ASGI middleware. Calls that change something come from no page at all, or from one of this service's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READS and _is_foreign(Headers(scope=scope)):
            await _REFUSAL(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


_REFUSAL = JSONResponse(
    error_body(
        "PERMISSION_DENIED",
        "GristmillError",
        "the call comes from a web page of another site; call the service from a program",
    ),
    _FORBIDDEN,
)
