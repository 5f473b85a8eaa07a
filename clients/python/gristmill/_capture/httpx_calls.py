"""Captures the calls of httpx's clients, and of httpx2's: it wraps the transport that a client chooses for a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

from gristmill._capture.answers import Answer
from gristmill._capture.capture import Capture, activated, active
from gristmill.errors import GristmillError

_REPLACED = ("content-length", "transfer-encoding", "content-encoding")


def install(httpx: ModuleType) -> None:
    """Wraps the transports of both clients."""
    for client, transport in ((httpx.Client, _Transport), (httpx.AsyncClient, _AsyncTransport)):
        _wrap(httpx, client, transport)


def _wrap(httpx: ModuleType, client: Any, kind: type[_Transport | _AsyncTransport]) -> None:
    inner_transport = client._transport_for_url
    messages = _Messages(httpx)

    def transport_for_url(self: Any, url: Any) -> Any:
        inner, capture = inner_transport(self, url), active.get()
        return inner if capture is None else kind(inner, capture, messages)

    client._transport_for_url = transport_for_url


class _Messages:
    """Makes requests and responses of one of the two packages."""

    def __init__(self, httpx: ModuleType) -> None:
        self._httpx = httpx
        self._streams = {
            "sync": type("Relayed", (_Relayed, httpx.SyncByteStream), {}),
            "async": type("AsyncRelayed", (_AsyncRelayed, httpx.AsyncByteStream), {}),
        }

    def request(self, request: Any, body: bytes) -> Any:
        headers = _without_framing(request.headers)
        headers["accept-encoding"] = "identity"
        return self._httpx.Request(
            request.method, request.url, headers=headers, content=body, extensions=request.extensions
        )

    def whole(self, response: Any, body: bytes) -> Any:
        headers = _without_framing(response.headers)
        return self._httpx.Response(response.status_code, headers=headers, content=body, extensions=response.extensions)

    def stream(self, response: Any, answer: Answer, capture: Capture, kind: str) -> Any:
        return self._httpx.Response(
            response.status_code,
            headers=_without_framing(response.headers),
            stream=self._streams[kind](response, answer, capture),
            extensions=response.extensions,
        )

    def refusal(self, status: int, error: GristmillError) -> Any:
        """Returns an error as the recorder answers it, which OpenAI's client raises without retries."""
        kind = "invalid_request_error" if status < 500 else "api_error"
        body = {"message": str(error), "type": kind, "param": None, "code": f"gristmill_{type(error).__name__}"}
        return self._httpx.Response(status, headers={"x-should-retry": "false"}, json={"error": body})


class _Transport:
    def __init__(self, inner: Any, capture: Capture, messages: _Messages) -> None:
        self._inner, self._capture, self._messages = inner, capture, messages

    def handle_request(self, request: Any) -> Any:
        url = str(request.url)
        try:
            if not self._capture.takes(request.method, url):
                return self._inner.handle_request(request)
            call = self._capture.call(url, request.read(), blocks=True)
        except GristmillError as error:
            return self._messages.refusal(400, error)
        # A transport may call by another client, such as aiohttp: the call is recorded once.
        with activated(None):
            response = self._inner.handle_request(self._messages.request(request, call.body))
        if response.status_code != 200:
            return response
        content_type = response.headers.get("content-type", "")
        answer = call.answer(content_type)
        if content_type.startswith("text/event-stream"):
            return self._messages.stream(response, answer, self._capture, "sync")
        try:
            body = b"".join(_relayed(response, answer, self._capture))
        except GristmillError as error:
            return self._messages.refusal(502, error)
        return self._messages.whole(response, body)


class _AsyncTransport:
    def __init__(self, inner: Any, capture: Capture, messages: _Messages) -> None:
        self._inner, self._capture, self._messages = inner, capture, messages

    async def handle_async_request(self, request: Any) -> Any:
        url = str(request.url)
        try:
            if not self._capture.takes(request.method, url):
                return await self._inner.handle_async_request(request)
            call = self._capture.call(url, await request.aread(), blocks=False)
        except GristmillError as error:
            return self._messages.refusal(400, error)
        with activated(None):
            response = await self._inner.handle_async_request(self._messages.request(request, call.body))
        if response.status_code != 200:
            return response
        content_type = response.headers.get("content-type", "")
        answer = call.answer(content_type)
        if content_type.startswith("text/event-stream"):
            return self._messages.stream(response, answer, self._capture, "async")
        try:
            body = b"".join([part async for part in _relayed_async(response, answer, self._capture)])
        except GristmillError as error:
            return self._messages.refusal(502, error)
        return self._messages.whole(response, body)


class _Relayed:
    """The body of a streamed answer."""

    def __init__(self, response: Any, answer: Answer, capture: Capture) -> None:
        self._response, self._parts = response, _relayed(response, answer, capture)

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        self._response.close()


class _AsyncRelayed:
    def __init__(self, response: Any, answer: Answer, capture: Capture) -> None:
        self._response, self._parts = response, _relayed_async(response, answer, capture)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts

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
