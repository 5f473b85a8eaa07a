"""The recorder's HTTP application: routes calls by path."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from urllib.parse import unquote

import numpy as np
import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gristmill.errors import FailedPreconditionError, GristmillError, InvalidArgumentError
from gristmill_recorder.buffers import Buffer, Buffers
from gristmill_recorder.calls import Calls, read_body, read_document
from gristmill_recorder.engines.connection import Engine, query_of, request_headers
from gristmill_recorder.exchange import unchanged
from gristmill_recorder.languages.paths import RECORDED, form_at
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import TrajectoryName, split
from gristmill_recorder.pages import Pages
from gristmill_recorder.refusals import Busy, NotRecorded, RefusalError, UnknownPath, WrongCall, WrongToken
from gristmill_recorder.runs import Runs
from gristmill_recorder.settings import RecorderSettings

_log = logging.getLogger("gristmill.recorder")

_PASSED_ON = frozenset(("v1/embeddings", "v1/messages/count_tokens", "v1/rerank", "v1/score", "tokenize", "detokenize"))
"""Calls that sample no tokens. They are forwarded and not recorded, like every GET of `v1/models` and below."""
_MODELS = "v1/models"
_REASON_LENGTH = 200
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
End = Callable[[web.Request, Buffer, TrajectoryName], Awaitable[web.StreamResponse]]


class RecorderApp:
    """Routes calls by path. is_ready: False once the recorder is stopping."""

    def __init__(self, settings: RecorderSettings, runs: Runs, engine: Engine, metrics: Metrics) -> None:
        self._settings, self._runs, self._engine, self._metrics = settings, runs, engine, metrics
        self._calls = Calls(settings, runs, engine, metrics)
        self._buffers = Buffers(settings.max_body_bytes, settings.max_in_flight_bytes)
        metrics.in_flight.set_function(lambda: self._buffers.size)
        self._own: dict[str, Handler] = {"healthz": self._alive, "readyz": self._ready, "metrics": self._scraped}
        self._ends: dict[str, End] = {"finish": self._finish, "abort": self._abort}
        self._pages, self._end_token = Pages(settings), settings.end_token()
        self.is_ready = True

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_route("*", "/{path:(?s:.*)}", self._answer)
        application.on_response_prepare.append(self._pages.share)
        return application

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            self._pages.check(request)
            if (answer := self._pages.preflight(request)) is not None:
                return answer
            with self._buffers.buffer() as buffer:
                return await self._route(request, buffer)
        except (RefusalError, FailedPreconditionError, InvalidArgumentError) as error:
            refusal = _refusal(error)
            self._metrics.refused.labels(type(refusal).__name__).inc()
            # Text from callers may contain line breaks and terminal control codes.
            _log.info("call refused: %r: %s", request.path[:500], ascii(str(refusal))[1:-1])
            return web.Response(status=refusal.status, body=orjson.dumps(refusal.body), headers=refusal.headers)

    async def _route(self, request: web.Request, buffer: Buffer) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if handler := self._own.get(path.lstrip("/")):
            return await handler(request)
        name, rest = split(path, request.headers)
        if request.method == "POST" and (make_form := form_at(rest)) is not None:
            return await self._calls.answer(request, buffer, _named(name), rest, make_form)
        # Agents may build this path from their base URL, which ends with /v1.
        end = rest.removeprefix("v1/")
        if request.method == "POST" and end in self._ends:
            self._check_token(request)
            try:
                return await self._ends[end](request, buffer, _named(name))
            except GristmillError as error:
                raise Busy(str(error)) from None
        is_of_models = request.method == "GET" and (rest == _MODELS or _is_below(_MODELS, rest))
        if is_of_models or (request.method == "POST" and rest in _PASSED_ON):
            return await self._pass_on(request, buffer, rest)
        raise UnknownPath(
            f"{request.method} {path}: unknown path; the recorder records POST {', '.join(RECORDED)}, forwards POST "
            f"{', '.join(sorted(_PASSED_ON))} and GET {_MODELS}, and ends a trajectory at POST .../finish or .../abort"
        )

    def _check_token(self, request: web.Request) -> None:
        """Raises WrongToken if the call has not the token that ends trajectories."""
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if self._end_token is not None and not compare_digest(sent, self._end_token):
            raise WrongToken(
                "only the program that computes rewards ends a trajectory; send the token of --end-token-file as "
                "'authorization: Bearer TOKEN'"
            )

    async def _finish(self, request: web.Request, buffer: Buffer, name: TrajectoryName) -> web.Response:
        reward = _reward(await _only_field(request, buffer, "reward"))
        entry = await self._runs.finish(name, reward, self._settings.finish_wait_s)
        answer = {"steps": entry.next_step, "outcome": entry.outcome or "waiting for the service"}
        return _json(answer, 200 if entry.outcome else 202)

    async def _abort(self, request: web.Request, buffer: Buffer, name: TrajectoryName) -> web.Response:
        reason = await _only_field(request, buffer, "reason") or "aborted by the agent"
        if not isinstance(reason, str):
            raise WrongCall(f"reason is a {type(reason).__name__}; send a text")
        await self._runs.abort(name, reason[:_REASON_LENGTH])
        return _json({"outcome": "aborted"})

    async def _pass_on(self, request: web.Request, buffer: Buffer, path: str) -> web.Response:
        body = await read_body(request, buffer) if request.can_read_body else None
        query, headers = query_of(request), request_headers(request)
        async with self._engine.call(request.method, path, query, headers, body) as answer:
            return await unchanged(answer, buffer)

    async def _alive(self, request: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        if not self.is_ready:
            raise Busy("the recorder is stopping; retry later, or call another recorder")
        return _json({"status": "ready"})

    async def _scraped(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


def _json(document: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json")


def _refusal(error: Exception) -> RefusalError:
    if isinstance(error, RefusalError):
        return error
    return (WrongCall if isinstance(error, InvalidArgumentError) else NotRecorded)(str(error))


def _is_below(parent: str, path: str) -> bool:
    """Returns whether every server resolves the raw path to one below `parent`: some servers resolve `..`, even if it
    is escaped."""
    steps = unquote(path).replace("\\", "/").split("/")
    return path.startswith(f"{parent}/") and not {".", ".."}.intersection(steps)


def _named(name: TrajectoryName | None) -> TrajectoryName:
    if name is None:
        raise WrongCall(
            "the call names no trajectory; use a base URL that ends with /runs/RUN/uid/UID/sample/N/v1, or set the "
            "headers x-gristmill-run, x-gristmill-uid and x-gristmill-sample"
        )
    return name


async def _only_field(request: web.Request, buffer: Buffer, name: str) -> object:
    """Returns the value of the only field that the body may contain. Raises WrongCall for other fields, and for a body
    of another content type than JSON, which the pages of other sites may send without asking first."""
    if request.can_read_body and request.content_type != "application/json":
        raise WrongCall(
            f"the body was sent as content-type {request.content_type[:100]!r}; send JSON with the header "
            "content-type: application/json"
        )
    document = await read_document(request, buffer) if request.can_read_body else {}
    if unknown := sorted(document.keys() - {name}):
        raise WrongCall(f"unknown field {unknown[0]}; the only allowed field is {name}")
    return document.get(name)


def _reward(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _FLOAT32_MAX:
        raise WrongCall(f"reward is {value!r}; send a number in the float32 range, or omit reward and set it later")
    return float(value)
