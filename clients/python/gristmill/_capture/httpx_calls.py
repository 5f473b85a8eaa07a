"""Captures the calls of httpx's clients, and of httpx2's: it wraps the transport that a client chooses for a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

from gristmill._capture.answers import Answer, StreamedAnswer
from gristmill._capture.capture import Capture, activated, active
from gristmill.errors import GristmillError

_REPLACED = ("content-length", "transfer-encoding", "content-encoding")


def install(httpx: ModuleType) -> None:
    """Wraps the transports of both clients."""
    messages = _Messages(httpx)
    for client in (httpx.Client, httpx.AsyncClient):
        _wrap(client, messages)


def _wrap(client: Any, messages: _Messages) -> None:
    inner_transport = client._transport_for_url

    def transport_for_url(self: Any, url: Any) -> Any:
        inner, capture = inner_transport(self, url), active.get()
        return inner if capture is None else _Transport(inner, capture, messages)

    client._transport_for_url = transport_for_url


class _Messages:
    """Makes requests and responses of one of the two packages."""

    def __init__(self, httpx: ModuleType) -> None:
        self._httpx = httpx
        self._relayed: Any = type("Relayed", (_Relayed, httpx.SyncByteStream, httpx.AsyncByteStream), {})

    def request(self, request: Any, body: bytes) -> Any:
        headers = _without_framing(request.headers)
        headers["accept-encoding"] = "identity"
        return self._httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=request.extensions
        )

    def whole(self, response: Any, body: bytes) -> Any:
        return self._response(response, content=body)

    def stream(self, response: Any, parts: Iterator[bytes] | AsyncIterator[bytes]) -> Any:
        return self._response(response, stream=self._relayed(response, parts))

    def _response(self, response: Any, **body: Any) -> Any:
        headers = _without_framing(response.headers)
        return self._httpx.Response(response.status_code, headers=headers, extensions=response.extensions, **body)

    def refusal(self, status: int, error: GristmillError) -> Any:
        """Returns an error as the recorder answers it, which OpenAI's client raises without retries."""
        kind = "invalid_request_error" if status < 500 else "api_error"
        body = {"message": str(error), "type": kind, "param": None, "code": f"gristmill_{type(error).__name__}"}
        return self._httpx.Response(status, headers={"x-should-retry": "false"}, json={"error": body})


class _Transport:
    """The transport of both kinds of client: each calls its method."""

    def __init__(self, inner: Any, capture: Capture, messages: _Messages) -> None:
        self._inner, self._capture, self._messages = inner, capture, messages

    def handle_request(self, request: Any) -> Any:
        url, status = str(request.url), 400
        try:
            if not self._capture.takes(request.method, url):
                return self._inner.handle_request(request)
            call = self._capture.call(url, request.read(), blocks=True)
            # A transport may call by another client, such as aiohttp: the call is recorded once.
            with activated(None):
                response = self._inner.handle_request(self._messages.request(request, call.body))
            if response.status_code != 200:
                return response
            answer, status = call.answer(response.headers.get("content-type", "")), 502
            parts = _relayed(response, answer, self._capture)
            if isinstance(answer, StreamedAnswer):
                return self._messages.stream(response, parts)
            return self._messages.whole(response, b"".join(parts))
        except GristmillError as error:
            return self._messages.refusal(status, error)

    async def handle_async_request(self, request: Any) -> Any:
        url, status = str(request.url), 400
        try:
            if not self._capture.takes(request.method, url):
                return await self._inner.handle_async_request(request)
            call = self._capture.call(url, await request.aread(), blocks=False)
            with activated(None):
                response = await self._inner.handle_async_request(self._messages.request(request, call.body))
            if response.status_code != 200:
                return response
            answer, status = call.answer(response.headers.get("content-type", "")), 502
            parts = _relayed_async(response, answer, self._capture)
            if isinstance(answer, StreamedAnswer):
                return self._messages.stream(response, parts)
            return self._messages.whole(response, b"".join([part async for part in parts]))
        except GristmillError as error:
            return self._messages.refusal(status, error)


class _Relayed:
    """The body of a streamed answer, for both kinds of client."""

    def __init__(self, response: Any, parts: Any) -> None:
        self._response, self._parts = response, parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._parts)

    def close(self) -> None:
        self._response.close()

    async def aclose(self) -> None:
        await self._response.aclose()


def _relayed(response: Any, answer: Answer, capture: Capture) -> Iterator[bytes]:
    """Yields what the agent gets of an answer. Records it before its last bytes."""
    for part in response.iter_bytes():
        yield answer.feed(part)
    samples, rest = answer.end()
    capture.record(samples)
    yield rest


async def _relayed_async(response: Any, answer: Answer, capture: Capture) -> AsyncIterator[bytes]:
    async for part in response.aiter_bytes():
        yield answer.feed(part)
    samples, rest = answer.end()
    await capture.record_async(samples)
    yield rest


def _without_framing(headers: Any) -> Any:
    headers = headers.copy()
    for name in _REPLACED:
        headers.pop(name, None)
    return headers
