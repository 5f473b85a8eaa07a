"""Answers the calls that are recorded: calls the engine, records the sampled tokens, then answers the agent.

The last byte of an answer is sent only after its tokens are in the journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import orjson
from aiohttp import web

from gristmill.completions import Sampled
from gristmill_recorder.buffers import Buffer
from gristmill_recorder.columns import Source, columns_of, names_of
from gristmill_recorder.engines.connection import Engine, query_of, request_headers
from gristmill_recorder.engines.names import ENGINES
from gristmill_recorder.exchange import AgentGoneError, Exchange, Sent
from gristmill_recorder.languages.images import urls_of_images
from gristmill_recorder.languages.integers import loads
from gristmill_recorder.languages.language import Asking, Document
from gristmill_recorder.languages.paths import FormMaker
from gristmill_recorder.languages.sampling import Sampling
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import HEADER, INT32_MAX, TrajectoryName, int32_of
from gristmill_recorder.refusals import Busy, EngineAway, EngineSlow, WrongCall
from gristmill_recorder.rows import Row
from gristmill_recorder.runs import Runs
from gristmill_recorder.settings import RecorderSettings
from gristmill_recorder.splicing.splicer import Splicer

VERSION = f"{HEADER}policy-version"
# Anthropic's and Google's clients send the key in these headers; engines read it from `authorization`.
_KEYS = ("x-api-key", "x-goog-api-key")
# A request that pauses for longer is refused: its bytes would keep others from being read.
_LONGEST_PAUSE_S = 20.0


class Calls:
    def __init__(self, settings: RecorderSettings, runs: Runs, engine: Engine, metrics: Metrics) -> None:
        self._settings, self._runs, self._engine, self._metrics = settings, runs, engine, metrics
        api = ENGINES[settings.engine]
        self._columns = names_of(settings.columns)
        of_prompt, images = "prompt_logprobs" in self._columns, "images" in self._columns
        self._asking = Asking(api, settings.logprobs, of_prompt, images, settings.whole_answers)
        reads = "conversation" in self._columns
        self._splicer = Splicer(settings.splice, api, engine, metrics, reads=reads)
        self._under_way = 0
        metrics.under_way.set_function(lambda: self._under_way)

    async def answer(
        self, request: web.BaseRequest, buffer: Buffer, name: TrajectoryName, path: str, make_form: FormMaker
    ) -> web.StreamResponse:
        """Answers a call, and records it. If it raises RefusalError, nothing was recorded."""
        began = time.perf_counter()
        with self._counted(), self._runs.recording(name).calling() as recording:
            document = await read_document(request, buffer)
            run = self._runs.run(name.run)
            await run.check(name.sample)
            try:
                form = make_form(document, self._asking)
            except RecursionError:
                raise WrongCall("the request cannot be read; nest it less deeply") from None
            version, asked = _version(request, run.policy_version), form.request
            # Without the column, calls with images were refused.
            images = urls_of_images(asked) if self._asking.images else ()
            sampling = Sampling.of(asked, self._settings.trainer_temperature)
            headers = _engine_headers(request)
            plan = await self._splicer.plan(form.path, asked, recording, headers)

            def record(samples: Sequence[Sampled], choices: Sequence[Document]) -> None:
                rows, turn, said = [], plan.turn, _of_samples(choices, samples)
                flags = {"has_logprobs": self._settings.logprobs, "is_masked": sampling.is_masked}
                for step, (choice, sample) in enumerate(zip(said, samples, strict=True), recording.entry.next_step):
                    columns = columns_of(self._columns, Source(choice, sample, sampling, turn, images))
                    rows.append(Row.of(sample, step, version, columns, **flags))
                plan.mark(rows, said)
                recording.record(rows, plan.base)
                self._metrics.recorded(rows, sampling.odd)
                self._splicer.recorded(plan, rows)

            # Of a translated call the query belongs to another path.
            query = query_of(request) if form.path == path else ""
            sent = Sent(form.path, query, headers, plan.request)
            exchange = Exchange(request, buffer, form, sent, record)
            await self._run(exchange, request)
            took = time.perf_counter() - began
            self._metrics.answered(form.api, exchange.response.status, took, exchange.engine_s)
            return exchange.response

    async def _run(self, exchange: Exchange, request: web.BaseRequest) -> None:
        try:
            await exchange.run(self._engine)
        except (asyncio.CancelledError, AgentGoneError) as error:
            # Clients close the connection after the event that ends a stream, before its last byte.
            if not exchange.is_recorded:
                self._metrics.cut.labels("agent").inc()
                if isinstance(error, asyncio.CancelledError):
                    raise
        except (EngineAway, EngineSlow):
            self._metrics.cut.labels("engine").inc()
            if not exchange.response.prepared:
                raise
            # As without a recorder, the agent sees an incomplete answer.
            if request.transport is not None:
                request.transport.abort()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a call as in progress within the block. Raises Busy if a limit is reached."""
        settings, metrics = self._settings, self._metrics
        if self._under_way >= settings.max_calls:
            raise Busy(
                f"{self._under_way} calls are in progress, which is the limit --max-calls; retry, or raise --max-calls"
            )
        if metrics.row_bytes >= settings.max_row_bytes:
            raise Busy(
                f"{metrics.row_bytes} bytes of steps wait for the service, where --max-row-bytes is "
                f"{settings.max_row_bytes:d}; check that the service runs and has capacity, or raise --max-row-bytes"
            )
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


async def read_document(request: web.BaseRequest, buffer: Buffer) -> Document:
    """Reads the request body as a JSON object. Raises WrongCall, and like `read_body`."""
    body = await read_body(request, buffer)
    try:
        document = loads(body)
    except orjson.JSONDecodeError as error:
        raise WrongCall(f"the request is not JSON: {error}; send a JSON object") from None
    except RecursionError:
        raise WrongCall("the request cannot be read; nest it less deeply") from None
    if not isinstance(document, dict):
        raise WrongCall(f"the request is a {type(document).__name__}; send a JSON object")
    return document


async def read_body(request: web.BaseRequest, buffer: Buffer) -> bytes:
    """Reads the request body. Raises WrongCall, also if it pauses for too long, TooLarge and Busy."""
    body = bytearray()
    try:
        async with asyncio.timeout(_LONGEST_PAUSE_S) as limit:
            while part := await request.content.readany():
                buffer.add_request(len(part))
                body += part
                limit.reschedule(asyncio.get_running_loop().time() + _LONGEST_PAUSE_S)
        return bytes(body)
    except TimeoutError:
        raise WrongCall(
            f"the request's body paused for {_LONGEST_PAUSE_S:g} s after {len(body)} bytes; send it without pauses"
        ) from None
    except web.RequestPayloadError as error:
        raise WrongCall(f"the request cannot be read: {error}; correct its content-encoding") from None


def _of_samples(choices: Sequence[Document], samples: Sequence[Sampled]) -> Sequence[Document]:
    """Returns the choice of each sample; empty ones if the answer has no choices."""
    by_index = {choice.get("index", place): choice for place, choice in enumerate(choices)}
    return [by_index.get(sample.choice, {}) for sample in samples]


def _version(request: web.BaseRequest, announced: int) -> int:
    """Returns the policy version of the call: from the agent's header, or the last one that the trainer announced."""
    text = request.headers.get(VERSION)
    if text is None:
        return announced
    if (version := int32_of(text)) is None:
        raise WrongCall(f"{VERSION} is {text[:20]!r}; set it to a number from 0 to {INT32_MAX}")
    return version


def _engine_headers(request: web.BaseRequest) -> MutableMapping[str, str]:
    headers = request_headers(request)
    for name in _KEYS:
        if key := headers.pop(name, None):
            headers.setdefault("authorization", f"Bearer {key}")
    headers["content-type"] = "application/json"
    return headers
