"""Who calls over HTTP, and whether the call is theirs to make."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.errors import GristmillError
from gristmill_service.access import caller
from gristmill_service.access.caller import ANYONE, Caller
from gristmill_service.access.gate import AUTHORIZATION, Gate
from gristmill_service.access.roles import OPEN_CALLS
from gristmill_service.api.errors import refusal
from gristmill_service.api.http import models
from gristmill_service.api.http.guards.bodies import BODY
from gristmill_service.api.http.guards.debts import refuse_unknown

_RANK = TypeAdapter(models.Int32)

COOKIE = "gristmill_token"
"""What a browser that signed in sends in place of the header."""

# Of the other calls run and rank stand in the path or the query.
_NAMED_IN_BODY = frozenset(["create_run", "acknowledge"])


class Authenticated:
    """ASGI middleware that finds out who calls before anything of a body is read. Only what anyone may call is read for
    a caller who shows no token."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._gate.is_open:
            await self._app(scope, receive, send)
            return
        try:
            caller.begin(await self._identify(scope))
        except GristmillError as error:
            await refuse_unknown(self._gate.debts, scope)
            told = refusal(error)
            headers = {**told.headers, "WWW-Authenticate": "Bearer"} if told.http_status == 401 else told.headers
            await JSONResponse(told.body, told.http_status, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _identify(self, scope: Scope) -> Caller:
        """Raises UnauthenticatedError where the caller shows no token that is known, and needs one."""
        if _is_open(scope["path"]):
            # Whatever is shown: a browser whose cookie has expired must still reach the page to sign in again.
            return ANYONE
        headers = Headers(scope=scope)
        shown, identify = _shown(headers), self._gate.identify
        if not shown and (user := self._gate.user_of_proxy(headers, (scope.get("client") or ("",))[0])):
            return user
        found = await run_in_threadpool(identify, shown) if self._gate.asks_issuer else identify(shown)
        if found is ANYONE:
            self._gate.check(found, "docs", None, None)
        return found


def _is_open(path: str) -> bool:
    return path in ("/", "/healthz", "/readyz", "/v1/session") or path.startswith("/page/")


def _shown(headers: Headers) -> str | None:
    if shown := headers.get(AUTHORIZATION):
        return shown
    # Not SimpleCookie, which gives up at what another program of the same host has set.
    cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
    return None if cookie is None else f"Bearer {cookie}"


async def authorize(request: Request) -> None:
    """A dependency of every route. Raises PermissionDeniedError where the caller may not make the call."""
    gate: Gate = request.app.state.context.gate
    if gate.is_open:
        return
    call = request.scope["route"].name
    body = _fields(request.scope.get(BODY, b"")) if call in _NAMED_IN_BODY else {}
    # The path is what the handler goes by, whatever else names a run.
    named = {**request.query_params, **body, **request.path_params}
    run = named.get("run")
    gate.check(caller.current(), call, None if run is None else str(run), _rank(named.get("rank")))


async def counted(request: Request) -> AsyncIterator[None]:
    """A dependency of every route where calls are counted. Raises ResourceExhaustedError where too many are being
    answered."""
    call = request.scope["route"].name
    if call in OPEN_CALLS:
        yield
        return
    gate: Gate = request.app.state.context.gate
    with gate.call(call, request.path_params.get("run")):
        yield


def _fields(body: bytes) -> dict[str, object]:
    """Read as the handlers' models are, so that no body says one thing here and another one there. What is no object is
    refused where it is read whole."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _rank(value: object) -> int | None:
    """Read as the handlers do, which take '+1' and 1.0, too; what is no rank is refused there."""
    try:
        return _RANK.validate_python(value)
    except ValidationError:
        return None
