"""One call of an agent: to the engine, into the journal, and back, in this order for the answer's last byte."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

import orjson
from aiohttp import ClientResponse, web

from gristmill.completions import Sampled, sampled
from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill_recorder.engine import Engine, answer_headers, query_of, request_headers
from gristmill_recorder.forms.events import EventSplitter
from gristmill_recorder.forms.forms import Form, Stream
from gristmill_recorder.refusals import EngineAway, EngineSlow, NotRecorded, RefusalError, WrongCall

Record = Callable[[Sequence[Sampled]], None]
"""Takes what was sampled; when it returns, that outlives the process."""

_STREAM = "text/event-stream"
_REMEDY = "the recorder asks for what it needs: check --engine, and that the engine's version gives token ids"


class AgentGoneError(Exception):
    """Nobody reads the answer any more."""


class Exchange:
    """engine_s: of its time, how long the engine was waited for. most_bytes: of an answer, or of a stream's event."""

    def __init__(self, request: web.BaseRequest, form: Form, record: Record, most_bytes: int) -> None:
        self._request, self._form, self._record, self._most_bytes = request, form, record, most_bytes
        self.response = web.StreamResponse()
        self.engine_s = 0.0

    async def run(self, engine: Engine) -> None:
        """Answers the agent: `response` is to be returned, whether it was sent already or not.

        Raises AgentGoneError, and RefusalError; where parts of a stream were sent already, EngineAway and EngineSlow
        alone: other refusals are told within the stream. Nothing was recorded then.
        """
        headers = request_headers(self._request)
        if key := headers.pop("x-api-key", None):
            # Where Anthropic's libraries have the key; engines look for it where OpenAI's have it.
            headers.setdefault("authorization", f"Bearer {key}")
        headers["content-type"] = "application/json"
        try:
            body = orjson.dumps(self._form.request)
        except TypeError as error:
            raise WrongCall(f"the request cannot be written as JSON again: {error}; nest it less deeply") from None
        asked = time.perf_counter()
        async with engine.call("POST", self._form.path, query_of(self._request), headers, body) as answer:
            self.engine_s += time.perf_counter() - asked
            if answer.status != 200:
                self.response = await unchanged(answer)
            elif (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise NotRecorded(f"the engine's answer is encoded as {encoding}, which it was asked not to do")
            elif answer.content_type == _STREAM:
                await self._stream(answer)
            else:
                await self._whole(answer)

    async def _whole(self, answer: ClientResponse) -> None:
        body = bytearray()
        async for part in self._parts(answer):
            body += part
            if len(body) > self._most_bytes:
                raise NotRecorded(f"the engine's answer has more than {self._most_bytes} bytes; raise --max-body-bytes")
        with _recordable():
            document = orjson.loads(body)
            found = sampled(document)
            told = orjson.dumps(self._form.whole(document))
            # Last: what is recorded has to be answered.
            self._record(found)
        self.response = web.Response(body=told, headers=answer_headers(answer))
        # Now, not when the handler returns it: what is counted of the call comes after the answer.
        await self._write_eof()

    async def _stream(self, answer: ClientResponse) -> None:
        self.response = web.StreamResponse(headers=answer_headers(answer))
        try:
            await self._events(answer, self._form.stream())
        except RefusalError as refusal:
            if not self.response.prepared or isinstance(refusal, (EngineAway, EngineSlow)):
                raise
            await self._write(refusal.event())
        await self._write_eof()

    async def _events(self, answer: ClientResponse, stream: Stream) -> None:
        """From the event on that completes the answer, what the agent gets is held back until that is recorded."""
        splitter, held, is_recorded = EventSplitter(self._most_bytes), bytearray(), False
        async for received in self._parts(answer):
            told = bytearray()
            for event in splitter.feed(received):
                with _recordable():
                    part = stream.read(event)
                (held if stream.is_complete else told).extend(part)
            await self._write(told)
            if stream.is_over and stream.is_complete and not is_recorded:
                is_recorded = True
                await self._end(stream, held)
        if not is_recorded:
            await self._end(stream, held)

    async def _end(self, stream: Stream, held: bytearray) -> None:
        if not stream.has_failed:
            if not stream.is_complete:
                raise EngineAway("the engine ended its stream before the answer was complete; make the call again")
            with _recordable():
                self._record(stream.sampled())
        await self._write(held)

    async def _parts(self, answer: ClientResponse) -> AsyncIterator[bytes]:
        asked = time.perf_counter()
        async for part in answer.content.iter_any():
            self.engine_s += time.perf_counter() - asked
            yield part
            asked = time.perf_counter()
        self.engine_s += time.perf_counter() - asked

    async def _write(self, told: bytes | bytearray) -> None:
        if not told:
            return
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(bytes(told))
        except ConnectionError:
            raise AgentGoneError from None

    async def _write_eof(self) -> None:
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write_eof()
        except ConnectionError:
            raise AgentGoneError from None


async def unchanged(answer: ClientResponse) -> web.Response:
    """The engine's answer as it is: its errors, and what is not recorded."""
    return web.Response(status=answer.status, body=await answer.read(), headers=answer_headers(answer))


@contextmanager
def _recordable() -> Iterator[None]:
    """Raises NotRecorded for what the engine answered within the block."""
    try:
        yield
    except InvalidArgumentError as error:
        raise NotRecorded(f"{error}; {_REMEDY}") from None
    except FailedPreconditionError as error:
        raise NotRecorded(str(error)) from None
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotRecorded(
            f"the engine's answer is not as its API has it: {type(error).__name__}: {error}; check --upstream"
        ) from None
