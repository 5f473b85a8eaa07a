"""Refuses requests that a browser sends here for a name of somebody else's.

A page may have its own name lead to this machine once it is loaded (DNS rebinding); the browser then takes the service
for a part of that page. Names that nobody can buy are not refused, nor are addresses: no page has one as its name.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill_service.api.http.answers import error_body
from gristmill_service.validation_messages import shown

# Of names that stand in no public registry (RFC 6761, RFC 6762, ICANN's board resolution 2024.07.29.06).
_PRIVATE = (".localhost", ".local", ".internal", ".svc")
_MISDIRECTED = 421


class HostNames:
    """ASGI middleware. known: patterns of further names that lead here, as a shell's."""

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
