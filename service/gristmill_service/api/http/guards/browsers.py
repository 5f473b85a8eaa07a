"""Guards for requests of browsers: rejects requests from pages of other sites, and adapts errors for the page."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill._wire import browsers
from gristmill_service.api.errors import error_body
from gristmill_service.validation_messages import shown

_MISDIRECTED, _FORBIDDEN = 421, 403

STATUS = "gristmill-status"
"""The header that contains the original status of an answer."""
_PREFERENCE = "errors=body"

COOKIE = "gristmill_token"
"""The cookie that a browser sends instead of a header, after sign-in. Its value is percent-encoded."""
_SHOWN = frozenset([401, 429])


class HostNames:
    """ASGI middleware that rejects requests for a host name of another site. known: additional names of this
    service, as shell patterns."""

    def __init__(self, app: ASGIApp, known: Sequence[str]) -> None:
        self._app, self._names = app, browsers.HostNames(known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if self._names.has(host):
            await self._app(scope, receive, send)
            return
        message = f"the host {shown(host)} is not a name of this service; add it to http_host_names"
        body = error_body("PERMISSION_DENIED", "PermissionDeniedError", message)
        await JSONResponse(body, _MISDIRECTED)(scope, receive, send)


class OwnCookie:
    """ASGI middleware that removes all cookies but the one with a token. Some versions of Python take seconds to
    unquote a cookie of 60 KB with backslashes (CVE-2024-7592), and frameworks parse the cookies of every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"] if scope["type"] == "http" else []
        if cookies := [value for name, value in headers if name == b"cookie"]:
            own = [one for one in b";".join(cookies).split(b";") if _is_token(one)]
            others = [(name, value) for name, value in headers if name != b"cookie"]
            scope["headers"] = others + [(b"cookie", one.strip()) for one in own[-1:]]
        await self._app(scope, receive, send)


def _is_token(cookie: bytes) -> bool:
    name, _, value = cookie.partition(b"=")
    return name.strip() == COOKIE.encode() and b"\\" not in value


class SameOrigin:
    """ASGI middleware that rejects calls from pages of other sites that change something: any website could otherwise
    send commands to a service on the loopback address of a machine with a browser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_call = scope["type"] == "http" and scope["method"] not in browsers.READS
        if is_call and browsers.is_of_other_site(Headers(scope=scope)):
            await _REFUSAL(scope, receive, send)
        else:
            await self._app(scope, receive, send)


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
    shows was deleted. Unknown tokens and throttled callers always get their status, because proxies count it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if (
                message["type"] == "http.response.start"
                and message["status"] >= 400
                and message["status"] not in _SHOWN
            ):
                headers = {STATUS: str(message["status"]), "preference-applied": _PREFERENCE}
                MutableHeaders(scope=message).update(headers)
                message["status"] = 200
            await send(message)

        wants_it = scope["type"] == "http" and Headers(scope=scope).get("prefer") == _PREFERENCE
        await self._app(scope, receive, sent if wants_it else send)
