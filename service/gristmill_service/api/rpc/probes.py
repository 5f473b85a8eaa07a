"""gRPC's health and reflection services. They need no token and have separate slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import AbortError, InternalError, UsageError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from gristmill.errors import GristmillError, NotFoundError
from gristmill_service.api.admission import REQUEST_S, Admission, Slot
from gristmill_service.api.context import ApiContext
from gristmill_service.api.errors import refusal
from gristmill_service.api.rpc.handling import Call
from gristmill_service.api.rpc.methods import Method

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION: str = reflection.SERVICE_NAME
_SERVING = health_pb2.HealthCheckResponse.SERVING
_WATCH_S = 3600.0


class Health:
    """The health of the service and of each of its gRPC services: serving until shutdown."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(["", *services])
        self._ends = asyncio.Event()

    def end(self) -> None:
        """Notifies watchers of the shutdown; their streams end."""
        self._ends.set()

    def methods(self) -> Iterator[Method]:
        message, parse = health_pb2.HealthCheckRequest.DESCRIPTOR, health_pb2.HealthCheckRequest.FromString
        yield Method(f"/{HEALTH}/Check", "Check", "", "probe", message, parse, self._check, is_stream=False)
        yield Method(f"/{HEALTH}/Watch", "Watch", "", "probe", message, parse, self._watch, is_stream=True)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        status = _SERVING
        if service not in self._services:
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        elif self._ends.is_set():
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    async def _check(
        self, api: ApiContext, slot: Slot, request: health_pb2.HealthCheckRequest
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            raise NotFoundError(f"service {request.service[:100]!r} does not exist; leave it out, or name another")
        return self._status(request.service)

    async def _watch(self, api: ApiContext, slot: Slot, request: health_pb2.HealthCheckRequest) -> AsyncIterator[bytes]:
        """Watches the health for at most an hour; the client then repeats the call."""
        yield self._status(request.service).SerializeToString()
        try:
            async with asyncio.timeout(_WATCH_S):
                await self._ends.wait()
        except TimeoutError:
            return
        yield self._status(request.service).SerializeToString()


def reflection_handler(admission: Admission, services: Sequence[str]) -> grpc.RpcMethodHandler:
    """Returns the handler of ServerReflectionInfo, a stream of requests. Each must arrive within 20 s."""
    answers: Any = reflection.aio.ReflectionServicer([*services, HEALTH, REFLECTION])

    async def questions(call: Call) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        assert call.slot is not None
        while True:
            call.slot.due = admission.clock() + REQUEST_S
            if (data := await call.read()) is None:
                return
            call.slot.due = None
            yield reflection_pb2.ServerReflectionRequest.FromString(data)

    async def reflect(_: object, context: Any) -> None:
        call = Call(context)
        try:
            await admission.pace_probe(call.connection)
            slot = call.take(await admission.enter(call.machine, "probe"))
            async for answer in answers.ServerReflectionInfo(questions(call), context):
                data = answer.SerializeToString()
                await slot.hold(len(data))
                await context.write(data)
        except (GristmillError, DecodeError) as error:
            refused = refusal(error)
            try:
                await context.abort(refused.grpc_status, refused.grpc_message, refused.trailers)
            except (UsageError, InternalError):
                raise asyncio.CancelledError from None
        except (UsageError, InternalError):
            raise asyncio.CancelledError from None
        except AbortError:
            raise

    return grpc.stream_stream_rpc_method_handler(reflect)
