"""An OpenTelemetry collector in the test's process: takes ExportTraceServiceRequest over gRPC, and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """Ids in hexadecimal; parent: empty of a span that has none."""

    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    attributes: dict[str, Any]
    is_error: bool
    service: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes).get("service.name", "")
                self._spans += [_span(one, service) for scope in resource.scope_spans for one in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def named(self, name: str, is_meant: Callable[[Span], bool] = lambda span: True) -> Span:
        """The first of this name that is meant, once it has come."""
        deadline = time.monotonic() + 60.0
        while True:
            for span in self.spans:
                if span.name == name and is_meant(span):
                    return span
            assert time.monotonic() < deadline, f"no span {name!r} among {sorted({span.name for span in self.spans})}"
            time.sleep(0.05)

    def close(self) -> None:
        self._server.stop(None).wait()


def _span(one: Any, service: str) -> Span:
    links = tuple(link.span_id.hex() for link in one.links)
    ids = (one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex())
    return Span(one.name, *ids, links, _values(one.attributes), one.status.code == 2, service)


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
