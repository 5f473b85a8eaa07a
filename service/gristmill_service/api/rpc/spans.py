"""Spans around gRPC calls, which are there only while tracing is on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gristmill_service import tracing
from gristmill_service.api import request_ids

_ATTRIBUTES = ("run", "batch", "mini_batch", "rank")
Answer = Callable[[Any, Any], Awaitable[Any]]


def spanned(path: str, answer: Answer) -> Answer:
    """Puts a span around a handler."""
    service, _, method = path.removeprefix("/").partition("/")

    async def within_span(requests: object, context: Any) -> Any:
        span = tracing.call_span(path.removeprefix("/"), context.invocation_metadata())
        span.set_attributes({"rpc.system": "grpc", "rpc.service": service, "rpc.method": method})
        with tracing.within(span):
            try:
                return await answer(requests, context)
            finally:
                # The code of a call that went well is None.
                code = context.code() or grpc.StatusCode.OK
                status = {"rpc.grpc.status_code": code.value[0], "gristmill.request_id": request_ids.current()}
                span.set_attributes(status)
                if code is not grpc.StatusCode.OK:
                    tracing.fail(span, code.name)

    return within_span


def describe(request: object) -> None:
    """Adds what the request is about to the current span."""
    for name in _ATTRIBUTES:
        if isinstance(value := getattr(request, name, None), str | int):
            tracing.describe(**{name: value})
