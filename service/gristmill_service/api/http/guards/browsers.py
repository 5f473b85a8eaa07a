"""Guards for requests of browsers: rejects requests from pages of other sites, and adapts errors for the page."""

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

# Domains that cannot be registered (RFC 6761, RFC 6762, ICANN's board resolution 2024.07.29.06).
_PRIVATE = (".localhost", ".local", ".internal", ".svc")
_MISDIRECTED, _FORBIDDEN = 421, 403
_READS = frozenset(["GET", "HEAD", "OPTIONS"])

STATUS = "gristmill-status"
"""The header that contains the original status of an answer."""
_PREFERENCE = "errors=body"


class HostNames:
    """ASGI middleware that rejects requests for a host name of another site.

    The site of a page may let its name resolve to this machine after the page is loaded (DNS rebinding). The browser
    then treats the service as part of that site. IP addresses and names that cannot be registered are accepted, because
    no other site has them.

    known: additional names of this service, as shell patterns.
    """

    def __init__(self, app: ASGIApp, known: Sequence[str]) -> None:
        self._app, self._known = app, [pattern.strip().lower() for pattern in known]
        self._own = {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if self._is_known(_without_port(host).lower()):
            await self._app(scope, receive, send)
            return
        message = f"the host {shown(host)} is not a name of this service; add it to http_host_names"
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
    """ASGI middleware that rejects calls from pages of other sites that change something: any website could otherwise
    send commands to a service on the loopback address of a machine with a browser."""

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

    Browsers log every status of 400 and above as an error. The page expects some errors, such as after the run that it
    shows was deleted.
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
