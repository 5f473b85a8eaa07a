"""Stands around every call of the contract: turns errors into statuses, and measures. Health and reflection pass by."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import grpc
import structlog

from gristmill.errors import GristmillError, UnavailableError
from gristmill_service import tracing
from gristmill_service.access import caller
from gristmill_service.access.gate import Gate
from gristmill_service.api import request_ids
from gristmill_service.api.errors import refusal
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.api.rpc.intake import Intake
from gristmill_service.api.rpc.spans import spanned, spanned_stream
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.storage.run_store import OwnedElsewhereError

_log = structlog.get_logger(__name__)

_ID = request_ids.HEADER


class Interceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """intake: of the request of each call. parsers: of requests that protobuf's own classes would copy too
    often, by their methods."""

    def __init__(
        self,
        metrics: Metrics,
        gate: Gate,
        forwarding: Forwarding,
        intake: Intake,
        parsers: Mapping[str, Callable[[bytes], Any]],
    ) -> None:
        self._metrics, self._gate, self._forwarding, self._parsers = metrics, gate, forwarding, parsers
        self._intake = intake
        self._handlers: dict[str, Any] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        found = self._handlers.get(call.method)
        if found is None:
            handler = continuation(call)
            if handler is None or not call.method.startswith("/gristmill."):
                return handler
            found = self._handlers[call.method] = self._guarded(handler, call)
        return found

    def _guarded(self, handler: Any, call: Any) -> Any:
        streams = handler.response_streaming
        parse = self._parsers.get(call.method, handler.request_deserializer)
        if streams:
            answer = self._stream(call.method, self._counted_stream(call.method, handler.unary_stream))
        else:
            answer = self._unary(call.method, self._counted(call.method, handler.unary_unary))
        if tracing.is_on():
            answer = (spanned_stream if streams else spanned)(call.method, answer)
        answer = (self._received_stream if streams else self._received)(answer, parse)
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return make(answer, None, _or_bytes(handler.response_serializer))

    def _received(self, answer: Callable[[Any, Any], Any], parse: Callable[[bytes], Any]) -> Callable[[Any, Any], Any]:
        """Reads the one request when there is room for it: gRPC itself would read as many at once as there are
        threads, for as long as their callers take to send them."""

        def received(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with ExitStack() as held:
                return answer(self._intake.read(requests, parse, context, held), context)

        return received

    def _received_stream(
        self, answer: Callable[[Any, Any], Iterator[Any]], parse: Callable[[bytes], Any]
    ) -> Callable[[Any, Any], Iterator[Any]]:
        def received(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with ExitStack() as held:
                request = self._intake.read(requests, parse, context, held)
            yield from answer(request, context)

        return received

    def _unary(self, path: str, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        name = path.rpartition("/")[2]
        allowed = self._allowing(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            start = time.monotonic()
            context.set_trailing_metadata(((_ID, request_ids.begin(context.invocation_metadata())),))
            try:
                try:
                    response = method(allowed(_checked(request)), context)
                except OwnedElsewhereError as elsewhere:
                    response = self._forwarding.unary(path, request, elsewhere, context)
            except Exception as error:  # noqa: BLE001  the edge: _refuse logs what is not ours
                self._refuse(name, start, error, context)
            self._observe(name, "OK", start)
            return response

        return answer

    def _stream(self, path: str, method: Callable[[Any, Any], Iterator[Any]]) -> Callable[[Any, Any], Iterator[Any]]:
        name = path.rpartition("/")[2]
        allowed = self._allowing(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            start = time.monotonic()
            context.set_trailing_metadata(((_ID, request_ids.begin(context.invocation_metadata())),))
            try:
                asked = allowed(_checked(request))
                try:
                    yield from method(asked, context)
                except OwnedElsewhereError as elsewhere:
                    # Raised before the first answer: no run changes its owner for a call that has begun.
                    yield from self._forwarding.stream(path, request, elsewhere, context)
            except Exception as error:  # noqa: BLE001  the edge: _refuse logs what is not ours
                self._refuse(name, start, error, context)
            self._observe(name, "OK", start)

        return answer

    def _counted(self, path: str, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The method, among the calls that are being answered where these are counted."""
        if not self._gate.counts_calls:
            return method
        call = _call_of(path)

        def counted(request: Any, context: grpc.ServicerContext) -> Any:
            with self._gate.call(call, getattr(request, "run", None)):
                return method(request, context)

        return counted

    def _counted_stream(
        self, path: str, method: Callable[[Any, Any], Iterator[Any]]
    ) -> Callable[[Any, Any], Iterator[Any]]:
        """Likewise."""
        if not self._gate.counts_calls:
            return method
        call = _call_of(path)

        def counted(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._gate.call(call, getattr(request, "run", None)):
                yield from method(request, context)

        return counted

    def _allowing(self, name: str) -> Callable[[Any], Any]:
        """Gives the request, where the current caller may make it. Raises PermissionDeniedError."""
        if self._gate.is_open:
            return lambda request: request
        call = _call_of(name)

        def allowed(request: Any) -> Any:
            self._gate.check(caller.current(), call, getattr(request, "run", None), getattr(request, "rank", None))
            return request

        return allowed

    def _refuse(self, name: str, start: float, error: Exception, context: grpc.ServicerContext) -> NoReturn:
        if isinstance(error, grpc.Call):
            self._pass_on(name, start, error, context)
        told = refusal(error)
        code = told.code
        if code == "INTERNAL":
            if context.is_active():
                _log.error("call failed", call=name, exc_info=error)
            else:
                # So ends reading the requests of a stream whose caller has gone away.
                code = "CANCELLED"
        _log.debug("call refused", call=name, code=code, reason=told.message)
        self._observe(name, code, start)
        self._intake.charge(context, code)
        context.set_trailing_metadata((*told.trailers, (_ID, request_ids.current())))
        context.abort(told.grpc_status, told.grpc_message)
        raise AssertionError("abort always raises")

    def _pass_on(self, name: str, start: float, error: Any, context: grpc.ServicerContext) -> NoReturn:
        """The refusal of the process that the call was passed on to."""
        code, details = error.code(), error.details()
        trailers = tuple(error.trailing_metadata() or ())
        if not any(key == "gristmill-error" for key, _ in trailers) and code is not grpc.StatusCode.CANCELLED:
            # Not its own word: it went away, or hangs.
            told = refusal(UnavailableError(f"the process that decides for this run does not answer: {details}; retry"))
            code, details, trailers = told.grpc_status, told.grpc_message, told.trailers
        self._observe(name, code.name, start)
        self._intake.charge(context, code.name)
        named = any(key == _ID for key, _ in trailers)
        context.set_trailing_metadata(trailers if named else (*trailers, (_ID, request_ids.current())))
        context.abort(code, details)
        raise AssertionError("abort always raises")

    def _observe(self, name: str, status: str, start: float) -> None:
        self._metrics.observe_call("grpc", name, status, time.monotonic() - start)


def _call_of(path: str) -> str:
    """The name under which roles have a method: of `/gristmill.v1.RunService/GetRun` it is get_run."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.rpartition("/")[2]).lower()


def _or_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Another process' answer is bytes already."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)


def _checked(request: Any) -> Any:
    if isinstance(request, GristmillError):
        raise request
    return request
