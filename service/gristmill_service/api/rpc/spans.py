"""Spans around gRPC calls. The interceptor uses them only while tracing is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from gristmill_service import tracing
from gristmill_service.api import request_ids

_ATTRIBUTES = ("run", "batch", "mini_batch", "rank")


def spanned(path: str, answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Puts a span around a handler that returns one answer."""

    def within_span(request: Any, context: grpc.ServicerContext) -> Any:
        call = _begin(path, request, context)
        with tracing.within(call):
            try:
                return answer(request, context)
            finally:
                _end(call, context)

    return within_span


def spanned_stream(path: str, answer: Callable[[Any, Any], Iterator[Any]]) -> Callable[[Any, Any], Iterator[Any]]:
    """Puts a span around a handler that returns a stream.

    The span is never the current one: a stream may be closed by another thread than the one that read it.
    """

    def within_span(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        call, size = _begin(path, request, context), 0
        try:
            for message in answer(request, context):
                size += len(message) if isinstance(message, bytes) else message.ByteSize()
                yield message
        finally:
            call.set_attribute("gristmill.bytes", size)
            _end(call, context)
            call.end()

    return within_span


def _begin(path: str, request: Any, context: grpc.ServicerContext) -> Any:
    told = {name: value for name in _ATTRIBUTES if isinstance(value := getattr(request, name, None), str | int)}
    call = tracing.call_span(path.removeprefix("/"), context.invocation_metadata(), **told)
    service, _, method = path.removeprefix("/").partition("/")
    call.set_attributes({"rpc.system": "grpc", "rpc.service": service, "rpc.method": method})
    return call


def _end(call: Any, context: Any) -> None:
    # The code of a call that went well is None.
    code = context.code() or grpc.StatusCode.OK
    call.set_attributes({"rpc.grpc.status_code": code.value[0], "gristmill.request_id": request_ids.current()})
    if code is not grpc.StatusCode.OK:
        tracing.fail(call, code.name)
