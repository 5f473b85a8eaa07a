"""The calls that are recorded: their limits, their trajectories, and what is counted of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import orjson
from aiohttp import web

from gristmill_recorder.engine import Engine
from gristmill_recorder.exchange import AgentGoneError, Exchange
from gristmill_recorder.forms.forms import Asking, ChatForm, Document, Form, ResponsesForm
from gristmill_recorder.forms.messages import MessagesForm
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import HEADER, TrajectoryName
from gristmill_recorder.refusals import Busy, EngineAway, EngineSlow, TooLarge, WrongCall
from gristmill_recorder.runs import Runs
from gristmill_recorder.settings import RecorderSettings

VERSION = f"{HEADER}policy-version"

FORMS: dict[str, Callable[[Document, Asking], Form]] = {
    "v1/chat/completions": partial(ChatForm, "chat/completions"),
    "v1/completions": partial(ChatForm, "completions"),
    "v1/responses": ResponsesForm,
    "v1/messages": MessagesForm,
}
"""By their paths."""


class Calls:
    def __init__(self, settings: RecorderSettings, runs: Runs, engine: Engine, metrics: Metrics) -> None:
        self._settings, self._runs, self._engine, self._metrics = settings, runs, engine, metrics
        self._asking = Asking(settings.engine, settings.logprobs)
        self._under_way = 0

    async def answer(self, request: web.BaseRequest, name: TrajectoryName, path: str) -> web.StreamResponse:
        """Raises RefusalError where it is not answered; then nothing was recorded."""
        began = time.perf_counter()
        with self._counted(), self._runs.recording(name).calling() as recording:
            document = await read_document(request)
            run = self._runs.run(name.run)
            await run.check()
            form = FORMS[path](document, self._asking)
            version = _version(request, run.policy_version)
            record = partial(recording.record, policy_version=version, has_logprobs=self._settings.logprobs)
            exchange = Exchange(request, form, record, self._settings.max_body_bytes)
            await self._run(exchange, request)
            took = time.perf_counter() - began
            self._metrics.answered(form.api, exchange.response.status, took, exchange.engine_s)
            return exchange.response

    async def _run(self, exchange: Exchange, request: web.BaseRequest) -> None:
        try:
            await exchange.run(self._engine)
        except asyncio.CancelledError:
            self._metrics.cut.labels("agent").inc()
            raise
        except AgentGoneError:
            self._metrics.cut.labels("agent").inc()
        except (EngineAway, EngineSlow):
            self._metrics.cut.labels("engine").inc()
            if not exchange.response.prepared:
                raise
            # As the agent would see it without a recorder: the answer has no end.
            if request.transport is not None:
                request.transport.abort()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Within the limits."""
        settings, metrics = self._settings, self._metrics
        if self._under_way >= settings.max_calls:
            raise Busy(f"{self._under_way} calls are under way; try again later, or raise --max-calls")
        if metrics.row_bytes.total >= settings.max_row_bytes:
            raise Busy(
                "too many steps wait for the service; see whether it runs and has room, or raise --max-row-bytes"
            )
        self._under_way += 1
        metrics.under_way.set(self._under_way)
        try:
            yield
        finally:
            self._under_way -= 1
            metrics.under_way.set(self._under_way)


async def read_document(request: web.BaseRequest) -> Document:
    """The body, which is a JSON object. Raises WrongCall and TooLarge."""
    body = await read_body(request)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WrongCall(f"the request is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise WrongCall(f"the request is a {type(document).__name__}; give a JSON object")
    return document


async def read_body(request: web.BaseRequest) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(f"the request is too large: {error.text}; shorten it, or raise --max-body-bytes") from None


def _version(request: web.BaseRequest, announced: int) -> int:
    """The policy version that samples the call: as the agent says, else as the trainer announced last."""
    text = request.headers.get(VERSION)
    if text is None:
        return announced
    if not (text.isascii() and text.isdigit()):
        raise WrongCall(f"{VERSION} is {text!r}; give a number from 0 on")
    return int(text)
