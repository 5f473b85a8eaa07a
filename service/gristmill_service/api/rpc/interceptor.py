"""Stands around every call of the contract: turns errors into statuses, and measures. Health and reflection pass by."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from gristmill.errors import GristmillError, InvalidArgumentError, UnavailableError
from gristmill_service import tracing
from gristmill_service.access import caller
from gristmill_service.access.caller import Caller
from gristmill_service.access.gate import AUTHORIZATION, Gate
from gristmill_service.api import request_ids
from gristmill_service.api.errors import refusal
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.api.rpc.spans import spanned, spanned_stream
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.storage.run_store import OwnedElsewhereError

_log = structlog.get_logger(__name__)

_ID = request_ids.HEADER


class Interceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """parsers: of requests that protobuf's own classes would copy too often, by their methods."""

    def __init__(
        self, metrics: Metrics, gate: Gate, forwarding: Forwarding, parsers: Mapping[str, Callable[[bytes], Any]]
    ) -> None:
        self._metrics, self._gate, self._forwarding, self._parsers = metrics, gate, forwarding, parsers
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
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            answer = self._stream(call.method, handler.stream_stream or handler.unary_stream, handler.request_streaming)
        else:
            make, answer = grpc.unary_unary_rpc_method_handler, self._unary(call.method, handler.unary_unary)
        if tracing.is_on():
            answer = (spanned_stream if handler.response_streaming else spanned)(call.method, answer)
        parse = self._parsers.get(call.method, handler.request_deserializer)
        return make(answer, _told_later(parse), _or_bytes(handler.response_serializer))

    def _unary(self, path: str, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        name = path.rpartition("/")[2]
        allowed = self._allowing(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            start = time.monotonic()
            context.set_trailing_metadata(((_ID, request_ids.begin(context.invocation_metadata())),))
            try:
                found = self._identify(context)
                try:
                    response = method(allowed(found, _checked(request)), context)
                except OwnedElsewhereError as elsewhere:
                    response = self._forwarding.unary(path, request, elsewhere, context)
            except Exception as error:  # noqa: BLE001  the edge: _refuse logs what is not ours
                self._refuse(name, start, error, context)
            self._observe(name, "OK", start)
            return response

        return answer

    def _stream(
        self, path: str, method: Callable[[Any, Any], Iterator[Any]], takes_stream: bool
    ) -> Callable[[Any, Any], Iterator[Any]]:
        name = path.rpartition("/")[2]
        allowed = self._allowing(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            start = time.monotonic()
            context.set_trailing_metadata(((_ID, request_ids.begin(context.invocation_metadata())),))
            try:
                found = self._identify(context)
                if takes_stream:
                    # Anew for each: a stream may be open for days, and its caller's token be withdrawn.
                    asked = (allowed(self._identify(context), _checked(one)) for one in request)
                else:
                    asked = allowed(found, _checked(request))
                try:
                    yield from method(asked, context)
                except OwnedElsewhereError as elsewhere:
                    # Raised before the first answer: no run changes its owner for a call that has begun.
                    yield from self._forwarding.stream(path, request, elsewhere, context)
            except Exception as error:  # noqa: BLE001  the edge: _refuse logs what is not ours
                self._refuse(name, start, error, context)
            self._observe(name, "OK", start)

        return answer

    def _identify(self, context: grpc.ServicerContext) -> Caller:
        """Who calls, which is told to whoever asks during the call. Raises UnauthenticatedError."""
        if self._gate.is_open:
            return caller.EVERYONE_IS_ADMIN
        found = self._gate.identify(dict(context.invocation_metadata()).get(AUTHORIZATION))
        caller.begin(found)
        return found

    def _allowing(self, name: str) -> Callable[[Caller, Any], Any]:
        """Gives the request, where its caller may make it. Raises PermissionDeniedError."""
        if self._gate.is_open:
            return lambda _, request: request
        call = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()

        def allowed(found: Caller, request: Any) -> Any:
            self._gate.check(found, call, getattr(request, "run", None), getattr(request, "rank", None))
            return request

        return allowed

    def _refuse(self, name: str, start: float, error: Exception, context: grpc.ServicerContext) -> NoReturn:
        if isinstance(error, grpc.RpcError):
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
        named = any(key == _ID for key, _ in trailers)
        context.set_trailing_metadata(trailers if named else (*trailers, (_ID, request_ids.current())))
        context.abort(code, details)
        raise AssertionError("abort always raises")

    def _observe(self, name: str, status: str, start: float) -> None:
        self._metrics.observe_call("grpc", name, status, time.monotonic() - start)


def _told_later(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Gives the error in place of the request: gRPC itself would answer INTERNAL, as if it were our fault."""

    def deserialize(data: bytes) -> Any:
        try:
            return parse(data)
        except (DecodeError, GristmillError) as error:
            return error

    return deserialize


def _or_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Another process' answer is bytes already."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)


def _checked(request: Any) -> Any:
    if isinstance(request, GristmillError):
        raise request
    if isinstance(request, DecodeError):
        raise InvalidArgumentError(
            f"the request is no message of gristmill.v1: {request}; send what the protos describe"
        )
    return request
