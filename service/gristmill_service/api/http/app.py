"""The FastAPI application has the routes, errors in one form, probes, metrics and the OpenAPI page."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import gristmill
from gristmill.errors import GristmillError, InvalidArgumentError, UnavailableError
from gristmill_service.access.certificates import PeerCertificates
from gristmill_service.api.context import ApiContext
from gristmill_service.api.errors import STATUSES, refusal
from gristmill_service.api.http import models, rollouts, runs, trainers
from gristmill_service.api.http.dependencies import ContextDep, RequestIds
from gristmill_service.api.http.forwarding import Forwarding
from gristmill_service.api.http.guards.authentication import Authenticated, authorize, counted
from gristmill_service.api.http.guards.bodies import TOO_LARGE, BoundedBodies
from gristmill_service.api.http.guards.debts import Indebted
from gristmill_service.api.http.guards.host_names import HostNames
from gristmill_service.api.http.guards.passed_on import PassedOn
from gristmill_service.api.http.guards.same_origin import SameOrigin
from gristmill_service.api.http.guards.turns import Turns
from gristmill_service.api.http.page import page, page_details, session
from gristmill_service.api.http.page.told_refusals import ToldRefusals
from gristmill_service.call_threads import CallThreads
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.monitoring.views.batch_view import BatchViewCache
from gristmill_service.storage.run_store import OwnedElsewhereError
from gristmill_service.validation_messages import complaint, problems, shown

_log = structlog.get_logger(__name__)

_DESCRIPTION = (
    "Rollouts in, train-ready shards out. Every call may be repeated safely. Errors name the trajectory, field, value "
    "and remedy; 429 and 503 say in Retry-After when to try again. gRPC offers the same calls, and is faster."
)


def make_app(context: ApiContext, peers: PeerCertificates | None = None, threads: CallThreads | None = None) -> FastAPI:
    """threads: with whose calls the requests take turns; None: each is answered as it comes."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": models.Error, "description": code} for code, (_, status) in STATUSES.items()
    }
    errors[TOO_LARGE] = {"model": models.Error, "description": "the request is larger than max_message_bytes"}
    forwarding = Forwarding(context.runs.is_owner, peers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await forwarding.close()

    app = FastAPI(
        title="gristmill",
        version=gristmill.__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(authorize), *([Depends(counted)] if context.gate.counts_calls else [])],
    )
    app.state.context, app.state.batch_views = context, BatchViewCache()
    for router in (session.router, runs.router, rollouts.router, trainers.router, page.router, page_details.router):
        app.include_router(router, responses=errors)
    app.include_router(page.page)
    _add_probes(app)
    app.add_exception_handler(OwnedElsewhereError, forwarding.answer)
    app.add_exception_handler(GristmillError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_status)
    app.add_exception_handler(Exception, _tell)
    if threads is not None:
        app.add_middleware(Turns, threads=threads)
    app.add_middleware(
        BoundedBodies, limit=context.max_message_bytes, refuse_too_large=context.refuse_too_large, threads=threads
    )
    app.add_middleware(Indebted, gate=context.gate)
    app.add_middleware(Authenticated, gate=context.gate)
    app.add_middleware(SameOrigin)
    if context.gate.is_open:
        # Else a page of somebody else's has no token to show.
        app.add_middleware(HostNames, told=context.host_names)
    app.add_middleware(PassedOn, gate=context.gate)
    app.add_middleware(_Measured, metrics=context.metrics)
    app.add_middleware(RequestIds)
    # Outermost: metrics and traces have the status that was meant.
    app.add_middleware(ToldRefusals)
    return app


def _add_probes(app: FastAPI) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["probes"])
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "alive"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["probes"], responses={503: {"model": models.Error, "description": "UNAVAILABLE"}})
    def readyz(context: ContextDep) -> dict[str, str]:
        """The service takes calls; 503 says why not."""
        # In a thread: what stores the runs asks its file system.
        if reason := context.unhealthy_reason():
            raise UnavailableError(f"not ready: {reason}; send new work elsewhere or later")
        return {"status": "ready"}

    @app.get("/metrics", tags=["probes"], response_class=PlainTextResponse)
    def metrics(context: ContextDep) -> PlainTextResponse:
        """Prometheus metrics."""
        return PlainTextResponse(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    page = files(__package__).joinpath("docs.html").read_text(encoding="utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page)


async def _tell(request: Request, error: Exception) -> JSONResponse:
    told = refusal(error)
    _log.debug(
        "call refused", call=getattr(request.scope.get("route"), "name", ""), code=told.code, reason=told.message[:2000]
    )
    return JSONResponse(told.body, told.http_status, told.headers)


async def _tell_invalid(request: Request, error: Exception) -> JSONResponse:
    """Tells what pydantic found in the form of every refusal."""
    assert isinstance(error, RequestValidationError)
    # A body that is not said to be JSON is not read as such, so that all of it is of the wrong kind.
    if any(item["loc"] == ("body",) and isinstance(item["input"], bytes) for item in error.errors()):
        kind = request.headers.get("content-type")
        came = "without content-type" if kind is None else f"as content-type {shown(kind)}"
        reason = f"the body came {came}; send JSON with the header content-type: application/json"
    else:
        # A token that stands in the wrong place is not told again, nor logged.
        is_secret = getattr(request.scope.get("route"), "name", "") == "sign_in"
        reason = f"{problems(_explain(error, is_secret=is_secret))}; see /docs for what is expected"
    return await _tell(request, InvalidArgumentError(reason))


def _explain(error: RequestValidationError, *, is_secret: bool) -> Iterator[str]:
    for item in error.errors():
        has_none = is_secret or item["type"] in ("missing", "json_invalid")
        value = "" if has_none else f", got {shown(item['input'])}"
        yield complaint(item) + value


async def _tell_status(request: Request, error: Exception) -> JSONResponse:
    """Answers an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # So FastAPI says that it cannot read the body.
        return await _tell(
            request, InvalidArgumentError("the body is not JSON in UTF-8, or nested too deeply; send JSON")
        )
    code = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}.get(error.status_code, "INVALID_ARGUMENT")
    message = f"{request.method} {request.url.path}: {error.detail}; see /docs for all calls"
    body = {"error": {"code": code, "type": "GristmillError", "message": message}}
    return JSONResponse(body, error.status_code, error.headers)


class _Measured:
    """ASGI middleware that times each call under its handler's name, which is bounded, not its path."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            call = getattr(scope.get("route"), "name", "unknown")
            self._metrics.observe_call("http", call, str(status), time.monotonic() - start)
