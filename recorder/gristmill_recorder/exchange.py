"""One call to the engine and its answer: reads the answer, has it recorded, then sends it to the agent."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import orjson
from aiohttp import ClientResponse, web

from gristmill._engines.events import DONE, Event, EventSplitter
from gristmill.completions import Sampled
from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill_recorder.buffers import Buffer
from gristmill_recorder.engines.connection import Engine, answer_headers
from gristmill_recorder.languages.language import Document, Form, Stream
from gristmill_recorder.languages.whole import streamed
from gristmill_recorder.refusals import EngineAway, EngineSlow, NotRecorded, RefusalError, WrongCall

Record = Callable[[Sequence[Sampled], Sequence[Document]], None]
"""Records samples and their choices. When it returns, the samples survive a crash of the process."""

_STREAM, _ANSWER = "text/event-stream", "the engine's answer"
_REMEDY = "check --engine, and that this version of the engine returns token ids"


class AgentGoneError(Exception):
    """The agent closed its connection."""


class Sent(NamedTuple):
    """A call to the engine. query: still escaped."""

    path: str
    query: str
    headers: MutableMapping[str, str]
    document: Document


class Exchange:
    """One call and its answer.

    engine_s: seconds spent waiting for the engine. is_recorded: whether the sampled tokens are in the journal.
    """

    def __init__(self, request: web.BaseRequest, buffer: Buffer, form: Form, sent: Sent, record: Record) -> None:
        self._request, self._buffer, self._form, self._record = request, buffer, form, record
        self._sent = sent
        self.response = web.StreamResponse()
        self.engine_s = 0.0
        self.is_recorded = False

    async def run(self, engine: Engine) -> None:
        """Calls the engine, records the tokens, and answers the agent. The handler must return `response` afterwards,
        even if it is sent already.

        Raises AgentGoneError or RefusalError; then nothing was recorded. After a part of a stream was sent, the only
        refusals raised are EngineAway and EngineSlow; others are sent as an event of the stream.
        """
        try:
            body = orjson.dumps(self._sent.document)
        except TypeError as error:
            raise WrongCall(
                f"the request cannot be encoded as JSON: {error}; nest it less deeply, and write integers of more than "
                "64 bits as texts"
            ) from None
        asked = time.perf_counter()
        async with engine.call("POST", *self._sent[:3], body) as answer:
            self.engine_s += time.perf_counter() - asked
            if answer.status != 200:
                self.response = await unchanged(answer, self._buffer)
            elif (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise NotRecorded(
                    f"the engine's answer has content-encoding {encoding}, which the recorder does not accept; disable "
                    "compression in the engine and in proxies in front of it"
                )
            elif answer.content_type == _STREAM:
                await self._stream(answer)
            else:
                await self._whole(answer)

    async def _whole(self, answer: ClientResponse) -> None:
        body = bytearray()
        async for part in self._parts(answer):
            body += part
            self._buffer.resize_answer(_ANSWER, len(body))
        with _recordable():
            document = orjson.loads(body)
            samples, choices = self._form.read(document)
            answered, headers = self._answered(document), answer_headers(answer)
            # Recorded last: an answer that cannot be converted must not be recorded.
            self._record(samples, choices)
            self.is_recorded = True
        if self._form.stream_later is not None:
            headers["content-type"] = _STREAM
        self.response = web.StreamResponse(headers=headers)
        self.response.content_length = len(answered)
        # Sent here, not when the handler returns, so that the call is in progress until the agent has read its answer.
        await self._write(answered)
        await self._write(b"", is_end=True)

    def _answered(self, document: Document) -> bytes:
        form = self._form
        if form.stream_later is None:
            return orjson.dumps(form.whole(document))
        return streamed(form.stream(), document, form.stream_later)

    async def _stream(self, answer: ClientResponse) -> None:
        self.response = web.StreamResponse(headers=answer_headers(answer))
        try:
            await self._events(answer, self._form.stream())
        except RefusalError as refusal:
            if not self.response.prepared or isinstance(refusal, (EngineAway, EngineSlow)):
                raise
            await self._write(refusal.event())
        await self._write(b"", is_end=True)

    async def _events(self, answer: ClientResponse, stream: Stream) -> None:
        """Forwards events. Buffers the event that completes the answer, and later ones, until the answer is
        recorded."""
        splitter, buffered, is_ended = EventSplitter(), bytearray(), False
        async for received in self._parts(answer):
            ready = bytearray()
            with _recordable():
                for event in splitter.feed(received):
                    part = stream.read(event)
                    (buffered if stream.is_complete else ready).extend(part)
            self._buffer.resize_answer("an event of the engine's stream", splitter.buffered_bytes + len(buffered))
            await self._write(ready)
            if stream.is_over and stream.is_complete and not is_ended:
                is_ended = True
                await self._end(stream, buffered)
        if not is_ended:
            if stream.is_complete:
                # Some proxies omit this event, which ends an answer in other languages.
                buffered += stream.read(Event(b"", DONE))
            await self._end(stream, buffered)

    async def _end(self, stream: Stream, buffered: bytearray) -> None:
        if not stream.has_failed:
            if not stream.is_complete:
                raise EngineAway("the engine ended its stream before the answer was complete; retry the call")
            with _recordable():
                self._record(stream.sampled(), stream.choices())
                self.is_recorded = True
        await self._write(buffered)

    async def _parts(self, answer: ClientResponse) -> AsyncIterator[bytes]:
        asked = time.perf_counter()
        async for part in answer.content.iter_any():
            self.engine_s += time.perf_counter() - asked
            yield part
            asked = time.perf_counter()
        self.engine_s += time.perf_counter() - asked

    async def _write(self, data: bytes | bytearray, *, is_end: bool = False) -> None:
        """Sends bytes to the agent, or the end of the answer. Raises AgentGoneError if the connection is closed."""
        if not data and not is_end:
            return
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await (self.response.write_eof() if is_end else self.response.write(bytes(data)))
        except ConnectionError:
            raise AgentGoneError from None


async def unchanged(answer: ClientResponse, buffer: Buffer) -> web.Response:
    """Forwards the engine's answer unchanged: errors, and answers that are not recorded."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        buffer.resize_answer(_ANSWER, len(body))
    return web.Response(status=answer.status, body=bytes(body), headers=answer_headers(answer))


@contextmanager
def _recordable() -> Iterator[None]:
    """Raises NotRecorded if the block cannot parse or record the engine's answer."""
    try:
        yield
    except InvalidArgumentError as error:
        raise NotRecorded(f"{error}; {_REMEDY}") from None
    except FailedPreconditionError as error:
        raise NotRecorded(str(error)) from None
    except (orjson.JSONDecodeError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise NotRecorded(
            f"the engine's answer is invalid: {type(error).__name__}: {error}; check that --upstream is its URL"
        ) from None
