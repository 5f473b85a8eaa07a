"""Captures the calls of aiohttp's client: it replaces the content of an answer by a reader that records it."""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

from aiohttp import ClientResponse, ClientSession, StreamReader
from aiohttp.base_protocol import BaseProtocol
from multidict import CIMultiDict

from gristmill._capture.answers import Answer
from gristmill._capture.capture import Capture, activated, active
from gristmill.errors import InvalidArgumentError

# The engine's own reader limits what is buffered.
_UNLIMITED = 1 << 60


def install() -> None:
    """Wraps the method by which a session makes each call."""
    inner_request = ClientSession._request

    @wraps(inner_request)
    async def request(self: ClientSession, method: str, str_or_url: Any, **options: Any) -> ClientResponse:
        capture = active.get()
        url = str(self._build_url(str_or_url)) if capture is not None else ""
        if capture is None or not capture.takes(method, url):
            return await inner_request(self, method, str_or_url, **options)
        call = capture.call(url, _body(options, url), blocks=False)
        headers = CIMultiDict(options.get("headers") or ())
        headers["accept-encoding"] = "identity"
        headers.setdefault("content-type", "application/json")
        options |= {"json": None, "data": call.body, "headers": headers}
        with activated(None):
            response = await inner_request(self, method, str_or_url, **options)
        if response.status == 200:
            response.content = _Content(response.content, call.answer(response.content_type), capture)
        return response

    ClientSession._request = request  # type: ignore[method-assign]


def _body(options: dict[str, Any], url: str) -> Any:
    """Returns the body of a call."""
    body = options.get("json") if options.get("data") is None else options["data"]
    body = body.encode() if isinstance(body, str) else body
    if not isinstance(body, (bytes, dict)):
        raise InvalidArgumentError(
            f"{url}: the body is a {type(body).__name__}, which gristmill.capture does not read; pass json=, or data= "
            "as bytes"
        )
    return body


class _Content(StreamReader):
    """What the agent reads of an answer. Reads from the engine when it has no more."""

    def __init__(self, source: StreamReader, answer: Answer, capture: Capture) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(BaseProtocol(loop), _UNLIMITED, loop=loop)
        self._source, self._answer, self._capture = source, answer, capture
        self._recording: asyncio.Future[None] | None = None

    async def _wait(self, func_name: str) -> None:
        if part := await self._source.readany():
            self.feed_data(self._answer.feed(part))
            return
        samples, rest = self._answer.end()
        # A caller that was cancelled, as by a time-out, may read again.
        self._recording = self._recording or asyncio.ensure_future(self._capture.record_async(samples))
        await asyncio.shield(self._recording)
        self.feed_data(rest)
        self.feed_eof()
