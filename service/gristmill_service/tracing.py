"""Request ids and traces, with which a call can be followed through logs and services.

Traces are sent over OTLP if OpenTelemetry's variables name an endpoint. Otherwise its SDK is not imported.

Each call is a span in the trace of the caller's W3C `traceparent`. Building a batch is a separate trace, with the
stages as spans, linked to the call that completed the batch. docs/decisions/0009 explains why OpenTelemetry's
instrumentation of gRPC and ASGI is not used.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import gristmill
from gristmill.errors import InvalidArgumentError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"
# The timeout of the last export, because an unreachable collector must not delay a shutdown.
_FLUSH_MS = 2_000

REQUEST_ID = "x-request-id"
"""The gRPC metadata key and HTTP header of a request id."""

# A valid id is a single word in a log, a header and a shell.
_VALID_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_PREFIX, _numbers = secrets.token_hex(4), itertools.count(1)
_request_id: ContextVar[str] = ContextVar("gristmill_request_id", default="")

_tracer: Any = None
# The span of the call that sealed a batch, by run and batch, until the batch is built.
_sealed_in: dict[tuple[str, int], Any] = {}


def begin_request(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Sets and returns the id of this task's call: the caller's id if its metadata contains a valid one, else a new id.
    It is returned to the caller, forwarded to the run's owner, and added to every log line."""
    request_id = ""
    for key, value in metadata:
        if key == REQUEST_ID:
            request_id = value if isinstance(value, str) else value.decode("latin-1")
    if not request_id or _VALID_ID.fullmatch(request_id) is None:
        request_id = f"{_PREFIX}-{next(_numbers):x}"
    _request_id.set(request_id)
    return request_id


def request_id() -> str:
    """Returns the id of the current call; empty outside of calls."""
    return _request_id.get()


def configure_tracing(environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Starts tracing if it is configured. Returns a function that stops it.

    Raises InvalidArgumentError if the configuration cannot work.
    """
    global _tracer
    name = next((name for name in _ENDPOINTS if environment.get(name)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or _exports_none(environment)
    if name is None or is_off:
        return lambda: None
    _check(name, environment)
    provider = _provider(environment)
    _tracer = provider.get_tracer("gristmill", gristmill.__version__)

    def end() -> None:
        global _tracer
        _tracer = None
        _sealed_in.clear()
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()

    return end


def is_on() -> bool:
    return _tracer is not None


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """Returns a context with a span within the current one; without tracing, it does nothing."""
    if _tracer is None:
        return nullcontext()
    stage: AbstractContextManager[Any] = _tracer.start_as_current_span(name, attributes=_named(attributes))
    return stage


def call_span(name: str, metadata: Iterable[tuple[str, str | bytes]], **attributes: str | int) -> Any:
    """Starts the span of a call with this metadata, in its caller's trace. The span does not become the current one.

    Call it only while tracing is enabled.
    """
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    caller = TraceContextTextMapPropagator().extract(carrier)
    return _tracer.start_span(name, caller, SpanKind.SERVER, _named(attributes))


def within(call: Any) -> AbstractContextManager[Any]:
    """Makes a call's span the current span within the `with` block, and ends it afterwards."""
    from opentelemetry.trace import use_span

    return use_span(call, end_on_exit=True, record_exception=False, set_status_on_exception=False)


def describe(**attributes: str | int) -> None:
    """Adds attributes to the current span. Call it only while tracing is enabled."""
    from opentelemetry.trace import get_current_span

    get_current_span().set_attributes(_named(attributes))


def fail(call: Any, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    call.set_status(Status(StatusCode.ERROR, reason))


def sealed(run: str, batch: int) -> None:
    """Records that the current call sealed the batch."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        _sealed_in[run, batch] = get_current_span().get_span_context()


def making_span(run: str, batch: int) -> AbstractContextManager[Any]:
    """Returns a context with the span of building a batch. It has a separate trace, as it has rows of many calls."""
    if _tracer is None:
        return nullcontext()
    from opentelemetry.trace import Link

    call = _sealed_in.pop((run, batch), None)
    links = [Link(call)] if call is not None and call.is_valid else []
    attributes = _named({"run": run, "batch": batch})
    batch_span: AbstractContextManager[Any]
    batch_span = _tracer.start_as_current_span("make batch", attributes=attributes, links=links)
    return batch_span


def carried() -> dict[str, str]:
    """Returns the metadata that keeps a forwarded call in the current trace."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def trace_id() -> str:
    """Returns the id of the current trace; empty if there is none."""
    if _tracer is None:
        return ""
    from opentelemetry.trace import format_trace_id, get_current_span

    context = get_current_span().get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"gristmill.{name}": value for name, value in attributes.items()}


def _exports_none(environment: Mapping[str, str]) -> bool:
    return environment.get("OTEL_TRACES_EXPORTER", "") == "none"


def _check(name: str, environment: Mapping[str, str]) -> None:
    """Raises InvalidArgumentError if traces cannot be exported to the endpoint in this variable."""
    for protocol in _PROTOCOLS:
        if environment.get(protocol, "grpc") not in ("", "grpc"):
            raise InvalidArgumentError(
                f"{protocol} {environment[protocol]!r} is not supported, because traces are exported only over grpc; "
                f"set it to grpc, and {name} to the collector's gRPC port"
            )
    try:
        is_there = find_spec(_EXPORTER) is not None and find_spec("opentelemetry.sdk.trace") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise InvalidArgumentError(
            f"{name} {environment[name]!r} needs packages that export traces, which are not installed; "
            "pip install '.[otel]' in gristmill's checkout, or unset it"
        )


def _provider(environment: Mapping[str, str]) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.version": gristmill.__version__}
    if "service.name=" not in environment.get("OTEL_RESOURCE_ATTRIBUTES", "") and not environment.get(
        "OTEL_SERVICE_NAME"
    ):
        attributes["service.name"] = "gristmill"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
