"""Requests of browsers: requests from pages of other sites are refused, and errors are sent in a form for the page."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill_service.api.errors import error_body
from gristmill_service.validation_messages import shown

# Host names that nobody can register (RFC 6761, RFC 6762, ICANN's board resolution 2024.07.29.06).
_PRIVATE = (".localhost", ".local", ".internal", ".svc")
_MISDIRECTED, _FORBIDDEN = 421, 403
_READS = frozenset(["GET", "HEAD", "OPTIONS"])

STATUS = "gristmill-status"
"""The header with the status that the answer would otherwise have."""
_PREFERENCE = "errors=body"


class HostNames:
    """ASGI middleware that refuses requests for a host name of another site.

    A page may make its own name resolve to this machine after it was loaded (DNS rebinding), so that the browser treats
    the service as part of the page. Addresses, and names that nobody can register, are never refused: no page has one.

    known: patterns of further names of this service, as in a shell.
    """

    def __init__(self, app: ASGIApp, known: Sequence[str]) -> None:
        self._app, self._known = app, [pattern.strip().lower() for pattern in known]
        self._own = {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if self._is_known(_without_port(host).lower()):
            await self._app(scope, receive, send)
            return
        message = f"the request is for {shown(host)}, which is no name of this service; add it to http_host_names"
        body = error_body("PERMISSION_DENIED", "PermissionDeniedError", message)
        await JSONResponse(body, _MISDIRECTED)(scope, receive, send)

    def _is_known(self, name: str) -> bool:
        return (
            "." not in name
            or name in self._own
            or name.endswith(_PRIVATE)
            or _is_address(name)
            or any(fnmatchcase(name, pattern) for pattern in self._known)
        )


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class SameOrigin:
    """ASGI middleware that refuses calls from pages of other sites that change something: a service on the loopback of
    a machine with a browser must not take commands from any website."""

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


class ErrorsInBody:
    """ASGI middleware that answers errors with status 200 to callers that send `Prefer: errors=body` (RFC 7240).

    Browsers log every status of 400 and above as an error. The page expects some, such as after somebody has deleted
    the run that it shows.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                headers = {STATUS: str(message["status"]), "preference-applied": _PREFERENCE}
                MutableHeaders(scope=message).update(headers)
                message["status"] = 200
            await send(message)

        wants_it = scope["type"] == "http" and Headers(scope=scope).get("prefer") == _PREFERENCE
        await self._app(scope, receive, sent if wants_it else send)
