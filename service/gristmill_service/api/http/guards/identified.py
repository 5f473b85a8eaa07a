"""Identity and permission of HTTP requests."""

from __future__ import annotations

import json

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.errors import GristmillError, ResourceExhaustedError, UnavailableError
from gristmill_service.access import caller, passed_on
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN, Caller
from gristmill_service.access.gate import AUTHORIZATION, Gate, check_alone
from gristmill_service.access.roles import OPEN_CALLS
from gristmill_service.api.admission import Admission
from gristmill_service.api.errors import error_response
from gristmill_service.api.http import models
from gristmill_service.api.http.guards.admitted import SLOT, THROTTLED, address_of
from gristmill_service.api.http.guards.bodies import BODY

_RANK = TypeAdapter(models.Int32)

COOKIE = "gristmill_token"
"""The cookie that a browser sends instead of the header, after sign-in."""

# These calls name the run or the rank in the body. All other calls name them in the path or the query.
_NAMED_IN_BODY = frozenset(["create_run", "acknowledge"])


class Identified:
    """ASGI middleware that identifies the caller before the body is read. A caller without a token can only make calls
    that need none. For a request that a replica forwarded, the original caller's address replaces the replica's."""

    def __init__(self, app: ASGIApp, gate: Gate, admission: Admission) -> None:
        self._app, self._gate, self._admission = app, gate, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if SLOT not in scope:
            await self._app(scope, receive, send)
            return
        try:
            self._begin_passed_on(scope)
            identity = await self._identify(scope)
            caller.begin(identity)
            await self._admit(scope, identity)
        except GristmillError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _begin_passed_on(self, scope: Scope) -> None:
        """Raises UnavailableError for a request that falsely claims to be forwarded by a replica."""
        try:
            came_from = self._gate.came_from(Headers(scope=scope))
        except UnavailableError:
            # The request is counted like a request with an unknown token.
            self._admission.refused(scope[THROTTLED], scope[THROTTLED], "UNAUTHENTICATED", 0, 0.0)
            raise
        passed_on.begin(came_from)
        if came_from:
            scope["client"] = (came_from, 0)
            scope[THROTTLED] = came_from

    async def _identify(self, scope: Scope) -> Caller:
        """Returns the caller. Raises UnauthenticatedError if a token is required but missing or unknown."""
        if self._gate.is_open:
            return EVERYONE_IS_ADMIN
        if _is_open(scope["path"]):
            # An invalid token is ignored, because a browser with an expired cookie must reach the page to sign in.
            return ANYONE
        headers = Headers(scope=scope)
        shown = _shown(headers)
        if not shown and (user := self._gate.user_of_proxy(headers, address_of(scope))):
            return user
        identity = await self._gate.identify(shown)
        if identity is ANYONE or scope["path"] == "/openapi.json":
            self._gate.check(identity, "openapi" if identity is not ANYONE else "a call over HTTP", None, None)
        return identity

    async def _admit(self, scope: Scope, identity: Caller) -> None:
        """Counts the slot for the caller. Raises ResourceExhaustedError like `Admission.enter` and `check`."""
        address = address_of(scope)
        is_known = identity is not ANYONE and identity is not EVERYONE_IS_ADMIN
        await scope[SLOT].move(identity.name if is_known else address)
        if is_known:
            # Invalid calls are counted per machine, so that other workers with the same token are not throttled.
            scope[THROTTLED] = f"{identity.name} {address}"
        self._admission.check(scope[THROTTLED])


def _is_open(path: str) -> bool:
    return path in ("/", "/docs", "/v1/session") or path.startswith("/page/")


def _shown(headers: Headers) -> str | None:
    check_alone(len(headers.getlist(AUTHORIZATION)))
    if shown := headers.get(AUTHORIZATION):
        return shown
    # SimpleCookie fails on cookies that other programs on the same host may have set.
    cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
    return None if cookie is None else f"Bearer {cookie}"


async def authorize(request: Request) -> None:
    """Checks the caller's permission; a dependency of every route. Raises PermissionDeniedError if the caller may not
    make the call, and ResourceExhaustedError if too many of its calls are in progress."""
    gate: Gate = request.app.state.api.gate
    call = request.scope["route"].name
    if not gate.is_open:
        body = _fields(request.scope.get(BODY, b"")) if call in _NAMED_IN_BODY else {}
        # The handler uses the run in the path, even if the query names another run.
        named = {**request.query_params, **body, **request.path_params}
        run = named.get("run")
        gate.check(caller.current(), call, None if run is None else str(run), _rank(named.get("rank")))
    if call not in OPEN_CALLS:
        run = request.path_params.get("run")
        try:
            request.scope[SLOT].count(caller.current(), run)
        except ResourceExhaustedError as error:
            gate.note_refusal(call, error, run)
            raise


def _fields(body: bytes) -> dict[str, object]:
    """Parses fields like the handlers' models, so that both use the same values. The handler rejects other bodies."""
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _rank(value: object) -> int | None:
    """Parses a rank like the handlers, which also accept "+1" and 1.0. Returns None if they reject it."""
    try:
        return _RANK.validate_python(value)
    except ValidationError:
        return None
