"""Identity and permission of HTTP requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from gristmill.errors import GristmillError, ResourceExhaustedError, UnauthenticatedError, UnavailableError
from gristmill_service.access import caller, passed_on
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN, Caller
from gristmill_service.access.gate import AUTHORIZATION, Gate, check_alone
from gristmill_service.access.roles import OPEN_CALLS
from gristmill_service.api.admission import Admission, Kind
from gristmill_service.api.errors import error_response
from gristmill_service.api.http import models
from gristmill_service.api.http.guards.admitted import SLOT, THROTTLED, address_of
from gristmill_service.api.http.guards.bodies import BODY
from gristmill_service.api.http.guards.browsers import COOKIE

_RANK = TypeAdapter(models.Int32)

# These calls name the run or the rank in the body. All other calls name them in the path or the query.
_NAMED_IN_BODY = frozenset(["create_run", "acknowledge"])


_SESSION = "/v1/session"
_IDENTITY = "gristmill.identity"
"""The key of the caller of a request; None for a web token that is to be verified; the error of an unknown token."""


def recognizer(gate: Gate, admission: Admission) -> Callable[[Scope], tuple[str, Kind]]:
    """Returns a function that looks up the caller of a request before it takes a slot, and returns the name and the
    kind of the slot: a known caller waits for nothing that unknown callers occupy."""

    def recognize(scope: Scope) -> tuple[str, Kind]:
        try:
            identity = scope[_IDENTITY] = _known(gate, scope)
        except GristmillError as error:
            scope[_IDENTITY], identity = error, ANYONE
            if isinstance(error, UnavailableError):
                # The request is counted like a request with an unknown token.
                admission.refused(address_of(scope), address_of(scope), UnauthenticatedError.code, 0, 0.0)
        address = address_of(scope)
        if identity in (ANYONE, None):
            # Wrong tokens of others do not keep a person from signing in.
            scope[THROTTLED] = f"sign-in {address}" if scope["path"] == _SESSION else address
            return scope[THROTTLED], "stranger"
        scope[THROTTLED] = _throttled(identity, scope)
        return address if identity is EVERYONE_IS_ADMIN else identity.name, "call"

    return recognize


def _known(gate: Gate, scope: Scope) -> Caller | None:
    """Like `Gate.known`. For a request that a replica forwarded, the original caller's address replaces the replica's.
    Raises UnavailableError for a request that falsely claims to be forwarded."""
    headers = Headers(scope=scope)
    came_from = gate.came_from(headers)
    passed_on.begin(came_from)
    if came_from:
        scope["client"] = (came_from, 0)
    if gate.is_open:
        return EVERYONE_IS_ADMIN
    if scope["path"] == _SESSION:
        # An invalid token is ignored, because a browser with an expired cookie must be able to sign in.
        return ANYONE
    shown = _shown(headers)
    if not shown and (user := gate.user_of_proxy(headers, address_of(scope))):
        return user
    return gate.known(shown)


def _throttled(identity: Caller, scope: Scope) -> str:
    # Invalid calls are counted per machine, so that other workers with the same token are not throttled.
    return f"{identity.name} {address_of(scope)}"


class Identified:
    """ASGI middleware that identifies the caller before the body is read. A caller without a token can only sign in and
    out."""

    def __init__(self, app: ASGIApp, gate: Gate, admission: Admission) -> None:
        self._app, self._gate, self._admission = app, gate, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if SLOT in scope:
            # The error leaves the scope, because its frames refer to the scope.
            identity = scope.pop(_IDENTITY)
            try:
                if not isinstance(identity, GristmillError):
                    caller.begin(await self._identified(scope, identity))
            except GristmillError as error:
                identity = error
            if isinstance(identity, GristmillError):
                await error_response(identity)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _identified(self, scope: Scope, identity: Caller | None) -> Caller:
        """Returns the caller. Raises UnauthenticatedError and UnavailableError like `Gate.identify`, and
        ResourceExhaustedError if it is known and made too many invalid calls."""
        if identity is None:
            pace = partial(self._admission.pace, scope[THROTTLED])
            identity = await self._gate.identify(_shown(Headers(scope=scope)), pace)
            scope[THROTTLED] = _throttled(identity, scope)
            await scope[SLOT].move(identity.name, "call")
        if identity is not ANYONE:
            self._admission.check(scope[THROTTLED])
        elif scope["path"] != _SESSION:
            self._gate.check(identity, "a call over HTTP", None, None)
        if scope["path"] == "/openapi.json":
            self._gate.check(identity, "openapi", None, None)
        return identity


def _shown(headers: Headers) -> str | None:
    check_alone(len(headers.getlist(AUTHORIZATION)))
    if shown := headers.get(AUTHORIZATION):
        return shown
    # SimpleCookie fails on cookies that other programs on the same host may have set.
    cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
    return None if cookie is None else f"Bearer {unquote(cookie)}"


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
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _rank(value: object) -> int | None:
    """Parses a rank like the handlers, which also accept "+1" and 1.0. Returns None if they reject it."""
    try:
        return _RANK.validate_python(value)
    except ValidationError:
        return None
