"""The FastAPI application: routes, uniform errors, probes, metrics and the OpenAPI page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import gristmill
from gristmill.errors import GristmillError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.access.certificates import PeerCertificates
from gristmill_service.api.context import ApiContext
from gristmill_service.api.errors import NO_REQUEST, STATUSES, TOO_LARGE, error_body, error_response, refusal
from gristmill_service.api.http import models, page, rollouts, runs, trainers
from gristmill_service.api.http.dependencies import ApiDep
from gristmill_service.api.http.forwarding import Forwarding
from gristmill_service.api.http.guards.admitted import Admitted
from gristmill_service.api.http.guards.bodies import Bodies
from gristmill_service.api.http.guards.browsers import ErrorsInBody, HostNames, OwnCookie, SameOrigin
from gristmill_service.api.http.guards.identified import Identified, authorize, recognizer
from gristmill_service.api.http.guards.observed import Observed
from gristmill_service.off_loop import OneByOne
from gristmill_service.storage.run_store import OwnedElsewhereError
from gristmill_service.validation_messages import complaint, problems, shown

_log = structlog.get_logger(__name__)

_PROBES = ("/healthz", "/readyz", "/metrics")

_DESCRIPTION = (
    "Rollouts in, train-ready shards out. Every call may be repeated safely. Errors name the trajectory, field, value "
    "and remedy; 429 and 503 have a Retry-After header. gRPC offers the same calls and is faster."
)


def make_app(api: ApiContext, peers: PeerCertificates | None = None) -> FastAPI:
    """Creates the application. peers: certificates for connections to other replicas; None: not encrypted."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": models.Error, "description": code} for code, (_, status) in STATUSES.items()
    }
    errors[TOO_LARGE] = {"model": models.Error, "description": "the request is larger than max_message_bytes"}
    errors[NO_REQUEST] = {"model": models.Error, "description": "no HTTP request, or too long a URL and headers"}
    forwarding = Forwarding(api.runs.is_owner, peers)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await forwarding.close()

    app = FastAPI(
        title="gristmill",
        version=gristmill.__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        dependencies=[Depends(authorize)],
    )
    app.state.api, app.state.batch_views, app.state.json_rows = api, OneByOne(), OneByOne()
    for router in (runs.router, rollouts.router, trainers.router, page.router):
        app.include_router(router, responses=errors)
    app.include_router(page.page)
    _add_probes(app)
    app.add_exception_handler(OwnedElsewhereError, forwarding.answer)
    app.add_exception_handler(GristmillError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _refuse_status)
    app.add_exception_handler(Exception, _refuse)
    # Middleware is added from the innermost to the outermost.
    app.add_middleware(Bodies, limit=api.max_message_bytes, refuse_too_large=api.refuse_too_large)
    app.add_middleware(Identified, gate=api.gate, admission=api.admission)
    recognize = recognizer(api.gate, api.admission)
    app.add_middleware(Admitted, admission=api.admission, recognize=recognize, throttles=not api.gate.is_open)
    app.add_middleware(SameOrigin)
    if api.gate.is_open:
        # No token is required, so a page of another site could otherwise read runs.
        app.add_middleware(HostNames, known=api.host_names)
    app.add_middleware(Observed, metrics=api.metrics)
    # This is outside of metrics and traces, which record the original status.
    app.add_middleware(ErrorsInBody)
    app.add_middleware(OwnCookie)
    return app


def _add_probes(app: FastAPI) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["probes"])
    async def healthz() -> dict[str, str]:
        """Returns 200 while the process is alive."""
        return {"status": "alive"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["probes"], responses={503: {"model": models.Error, "description": "UNAVAILABLE"}})
    async def readyz(api: ApiDep) -> dict[str, str]:
        """Returns 200 if the service accepts calls, else 503 with the reason. waits: why batches of a run cannot be
        published now."""
        await api.runs.look()
        if reason := api.not_ready or api.runs.store_reason:
            raise UnavailableError(f"not ready: {reason}; retry later, or call another replica")
        # For example, shared memory is full. Rows are still accepted, and only the run's trainers can free capacity.
        waits = api.unhealthy_reason()
        return {"status": "ready", "waits": waits} if waits else {"status": "ready"}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["probes"], response_class=PlainTextResponse)
    async def metrics(api: ApiDep) -> PlainTextResponse:
        """Returns Prometheus metrics, including those of the runs that the caller may see."""
        write = api.metrics.read(api.gate.sees_labels())
        return PlainTextResponse(await asyncio.to_thread(write), media_type=CONTENT_TYPE_LATEST)

    async def description(_: Request) -> JSONResponse:
        # The first call takes a second.
        return JSONResponse(await asyncio.to_thread(app.openapi))

    app.add_route("/openapi.json", description, include_in_schema=False)


def make_probe_app(app: FastAPI) -> Starlette:
    """Creates the application of probe_address: the probes and metrics of `app`, with its guards, and no other path."""
    probes = Starlette(routes=[Route(path, app) for path in _PROBES])
    probes.router.default, probes.router.redirect_slashes = _refuse_path, False
    return probes


async def _refuse_path(scope: Scope, receive: Receive, send: Send) -> None:
    refused = NotFoundError(f"probe_address serves only {', '.join(_PROBES)}; use http_address for other calls")
    await error_response(refused, {"X-Content-Type-Options": "nosniff"})(scope, receive, send)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    refused = refusal(error)
    _log.debug("call refused", call=_call(request), code=refused.code, reason=refused.message[:2000])
    return error_response(error)


async def _refuse_invalid(request: Request, error: Exception) -> JSONResponse:
    """Answers a validation error of pydantic like other errors."""
    assert isinstance(error, RequestValidationError)
    # FastAPI does not parse a body without the content type of JSON, and reports the whole body as invalid.
    if any(item["loc"] == ("body",) and isinstance(item["input"], bytes) for item in error.errors()):
        kind = request.headers.get("content-type")
        came = "without content-type" if kind is None else f"as content-type {shown(kind)}"
        reason = f"the body was sent {came}; send JSON with the header content-type: application/json"
    else:
        # The value may be a token in the wrong field, so it must not be quoted or logged.
        is_secret = _call(request) == "sign_in"
        reason = f"{problems(_explain(error, is_secret=is_secret))}; see /docs for the expected format"
    return await _refuse(request, InvalidArgumentError(reason))


def _explain(error: RequestValidationError, *, is_secret: bool) -> Iterator[str]:
    for item in error.errors():
        if item["type"] == "json_invalid":
            yield f"the body is not valid JSON at character {item['loc'][-1]}; send JSON"
            continue
        has_none = is_secret or item["type"] == "missing"
        value = "" if has_none else f", got {shown(item['input'])}"
        yield complaint(item) + value


async def _refuse_status(request: Request, error: Exception) -> JSONResponse:
    """Answers a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        # FastAPI answers 400 to a body that it cannot parse.
        return await _refuse(
            request, InvalidArgumentError("the body is not JSON in UTF-8, or nested too deeply; send JSON")
        )
    code = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}.get(error.status_code, "INVALID_ARGUMENT")
    message = f"{request.method} {request.url.path}: {error.detail}; see /docs for all calls"
    return JSONResponse(error_body(code, "GristmillError", message), error.status_code, error.headers)


def _call(request: Request) -> str:
    """Returns the name of the handler; empty for an unknown path."""
    return getattr(request.scope.get("route"), "name", "")
