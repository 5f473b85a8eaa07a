"""Handles gRPC calls: admission, identity, request, permission, answer; converts errors to statuses.

Methods are registered with request streams, so that the handler runs before gRPC reads a message: a request is read
only after its call has a slot and its caller is identified.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn

import grpc
import numpy as np
import structlog
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc.aio import EOF, AbortError, AioRpcError, InternalError, UsageError

from gristmill._wire.codecs.columns_codec import ColumnsRequest, part_of
from gristmill.errors import (
    GristmillError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from gristmill_service import tracing
from gristmill_service.access import caller, passed_on
from gristmill_service.access.caller import ANYONE, EVERYONE_IS_ADMIN, Caller
from gristmill_service.access.gate import AUTHORIZATION, check_alone
from gristmill_service.api import calls
from gristmill_service.api.admission import REQUEST_S, SMALL_BYTES, Kind, Slot
from gristmill_service.api.bounds import check_message
from gristmill_service.api.context import ApiContext
from gristmill_service.api.errors import ErrorResponse, refusal
from gristmill_service.api.meter import metered, spent_s
from gristmill_service.api.rpc.forwarding import Forwarding
from gristmill_service.api.rpc.methods import Method, Parse
from gristmill_service.off_loop import OneByOne
from gristmill_service.storage.run_store import OwnedElsewhereError

_log = structlog.get_logger(__name__)
# Checked for each refused call, because structlog would format even lines that are not written.
_logs = logging.getLogger(__name__).isEnabledFor

_ZSTD = b"\x28\xb5\x2f\xfd"
"""The first bytes of a zstd frame. A request that contains them may expand to a much larger size."""
_SEARCHED_BYTES = 1 << 20
"""How many bytes of a request are searched for a frame. The rest of a larger request cannot expand much."""

_PART_BYTES = 1 << 20
"""The usual size of a part of a stream."""
_LEAST_PART_BYTES = 64 << 10
"""The smallest part of a request but the last, because each costs a turn of the event loop."""

_MESSAGES_IN_PARTS, _MOST_IN_PARTS = 8, 900_000_000
"""A request in parts may have this many times `max_message_bytes`, and this many bytes: SQLite's values have less than
10^9."""

_ATTRIBUTES = ("run", "batch", "mini_batch", "rank")
_Answer = Callable[[Any, Any], Awaitable[Any]]

_core_task: ContextVar[asyncio.Task[Any] | None] = ContextVar("gristmill_core_task", default=None)


def follow_calls(loop: asyncio.AbstractEventLoop) -> None:
    """Lets handlers find the task that owns their call in gRPC's core.

    Cancelling a handler does not end its call, and `grpc.aio` has no function that does. An unread answer stays in the
    core until the task that waits for the end of the call is cancelled.
    """

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        if getattr(coroutine, "__name__", "") == "_handle_exceptions":
            options["context"] = context = copy_context()
            context.run(_core_task.set, asyncio.current_task(loop))
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(make_task)


def leave_out_gone_callers() -> None:
    """Suppresses gRPC's error logs for answers to callers that have disconnected."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], InternalError)


class Call:
    """One call.

    connection: the address of its peer. throttled: the name for which a refusal is counted: the peer's address, because
        several workers may use one token; for an unknown caller, its machine. nbytes: the size of the request; 0 until
        it has arrived.
    """

    __slots__ = ("_core", "_is_read", "_task", "connection", "context", "machine", "nbytes", "slot", "throttled")

    def __init__(self, context: Any) -> None:
        self.context, self._task, self._core = context, asyncio.current_task(), _core_task.get()
        self.connection = context.peer()
        self.machine = self.throttled = machine_of(self.connection)
        self.nbytes, self._is_read = 0, False
        self.slot: Slot | None = None

    def came_from(self, connection: str) -> None:
        """Sets the original address of a call that a peer forwarded. An empty address changes nothing."""
        if connection:
            passed_on.begin(connection)
            self.connection, self.machine = connection, machine_of(connection)

    def identified(self, identity: Caller) -> str:
        """Assigns the call to this caller. Returns the name for which its slots are counted."""
        if identity is EVERYONE_IS_ADMIN:
            return self.machine
        caller.begin(identity)
        if identity is ANYONE:
            self.throttled = self.machine
            return self.machine
        self.throttled = f"{identity.name} {self.connection}"
        return identity.name

    def take(self, slot: Slot) -> Slot:
        """Occupies the slot until the answer is sent or the call ends."""
        assert self._task is not None
        self.slot, slot.end = slot, self._end
        self._task.add_done_callback(slot.close)
        return slot

    async def read(self) -> bytes | None:
        """Returns the request; None if the caller ended the call without one."""
        self._is_read = True
        data = await self.context.read()
        self._is_read = False
        if data is EOF:
            return None
        self.nbytes += len(data)
        return data  # type: ignore[no-any-return]

    def _end(self) -> None:
        if self._is_read:
            # Cancelling a read would leak a message that arrives at the same time.
            refusing = asyncio.ensure_future(_refuse_late(self.context))
            _end_reading.add(refusing)
            refusing.add_done_callback(_end_reading.discard)
            return
        for task in (self._task, self._core):
            if task is not None:
                task.cancel()


_end_reading: set[asyncio.Future[None]] = set()


async def _refuse_late(context: Any) -> None:
    try:
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the request did not arrive within {REQUEST_S:g} s, or others needed its capacity; send faster, or retry",
            (("gristmill-error", "DeadlineExceededError"), *context.trailing_metadata()),
        )
    except (AbortError, UsageError, InternalError):
        pass


class Handling:
    """Creates gRPC handlers of methods."""

    def __init__(self, api: ApiContext, forwarding: Forwarding) -> None:
        self._api, self._forwarding = api, forwarding
        # A few bytes may expand to a whole message, so only one message is decompressed at a time.
        self._expand = OneByOne()

    def handler(self, method: Method) -> grpc.RpcMethodHandler:
        """Returns the handler of a method."""

        async def answer(requests: object, context: Any) -> bytes:
            try:
                return await metered(self._answer(method, context))
            except AbortError as error:
                # The context refers to this error, whose frames refer to the context and the request. This reference
                # cycle would keep the request's bytes in memory until garbage collection.
                del requests, context
                error.__context__ = None
                raise error.with_traceback(None) from None

        make = grpc.stream_stream_rpc_method_handler if method.is_stream else grpc.stream_unary_rpc_method_handler
        return make(_spanned(method.path, answer) if tracing.is_on() else answer)

    async def _answer(self, method: Method, context: Any) -> bytes:
        start, status, api = time.monotonic(), "CANCELLED", self._api
        metadata = context.invocation_metadata()
        context.set_trailing_metadata(((tracing.REQUEST_ID, tracing.begin_request(metadata)),))
        call = Call(context)
        try:
            slot = await self._enter(method, call, metadata)
            await slot.place(is_large=method.most_bytes is None)
            data = await call.read()
            if data is None:
                raise InvalidArgumentError("the call ended without a request message; send one message")
            nbytes, is_zstd = len(data), data.find(_ZSTD, 0, _SEARCHED_BYTES) >= 0
            if nbytes > (method.most_bytes or nbytes):
                api.admission.note(nbytes)
                raise InvalidArgumentError(
                    f"the request has {nbytes} bytes, and the limit of {method.name} is {method.most_bytes}; send less "
                    "per request"
                )
            if method.is_large or is_zstd:
                nbytes = max(nbytes, SMALL_BYTES + 1)
            await slot.came(nbytes)
            if is_zstd:
                request = await self._expand(parsed, data, method.message, method.parse)
            else:
                request = await calls.of_size(nbytes, parsed, data, method.message, method.parse)
            if tracing.is_on():
                _describe(request)
            if method.call and api.gate.counts_calls:
                self._check(method, slot, request)
            if isinstance(request, ColumnsRequest) and request.size_bytes:
                await self._read_parts(method, call, request)
            try:
                if method.is_stream:
                    answer = await self._send(slot, method.answer(api, slot, request), context)
                else:
                    answer = await method.answer(api, slot, request)
            except OwnedElsewhereError as elsewhere:
                answer = await self._pass_on(method, call, request, data, elsewhere)
            if not isinstance(answer, bytes):
                answer = answer.SerializeToString()
            if slot.is_wrong:
                await self._delay(call, InvalidArgumentError.code)
            await slot.hold(len(answer))
            status = "OK"
            return answer
        except (AbortError, UsageError):
            # `_end` has refused the call, because its request did not arrive in time.
            status = "DEADLINE_EXCEEDED"
            raise
        except InternalError:
            # The caller has disconnected, so nothing can be sent.
            raise asyncio.CancelledError from None
        except Exception as error:  # noqa: BLE001  the edge: what is not ours is logged
            refused = refusal(error)
            status = error.code().name if isinstance(error, AioRpcError) else refused.code
            await self._refuse(method, call, error, refused)
        finally:
            api.metrics.observe_call("grpc", method.name, status, time.monotonic() - start)

    async def _read_parts(self, method: Method, call: Call, request: ColumnsRequest) -> None:
        """Reads the messages after the first one, which contain the request's tensors. Raises InvalidArgumentError."""
        size, slot = request.size_bytes, call.slot
        assert slot is not None
        most = min(_MESSAGES_IN_PARTS * self._api.max_message_bytes, _MOST_IN_PARTS)
        if not 0 < size <= most:
            raise InvalidArgumentError(
                f"run {request.run!r}: batch {request.batch} mini-batch {request.mini_batch} rank {request.rank}: "
                f"size_bytes is {size}, and a column has at most {most} bytes, eight times max_message_bytes or 900 "
                "MB; create the run with more mini-batches or ranks, which makes shards smaller, or raise "
                "max_message_bytes"
            )
        if request.tensors or call.nbytes > SMALL_BYTES:
            raise InvalidArgumentError(
                f"the message with size_bytes has {call.nbytes} bytes; send the tensors in the messages after it"
            )
        await slot.place_parts(size)
        # Uninitialized memory: what does not arrive is not used.
        file, arrived = np.empty(size, np.uint8).data, 0
        while arrived < size:
            if (data := await call.read()) is None:
                raise InvalidArgumentError(f"the call ended after {arrived} of {size} bytes; send all of them")
            part = parsed(data, method.message, part_of)
            if not min(_LEAST_PART_BYTES, left := size - arrived) <= len(part) <= left:
                raise InvalidArgumentError(
                    f"a part has {len(part)} bytes after {arrived} of {size} bytes; send parts of at least "
                    f"{_LEAST_PART_BYTES} bytes, and in all size_bytes"
                )
            file[arrived : arrived + len(part)] = part
            arrived += len(part)
            slot.came_part(len(part))
        await slot.came(size)
        request.tensors = file

    async def _enter(self, method: Method, call: Call, metadata: Any) -> Slot:
        """Takes a slot and identifies the caller. Raises ResourceExhaustedError if the caller has too many slots, or is
        known and made too many invalid calls; UnauthenticatedError if it is unknown and the call requires a token; and
        UnavailableError if it claims to forward the call and is not a peer."""
        gate, admission, shown = self._api.gate, self._api.admission, dict(metadata)
        if not method.call or (gate.is_open and passed_on.MARK not in shown):
            if method.kind == "probe":
                await admission.pace_probe(call.connection)
            return call.take(await admission.enter(call.machine, method.kind))
        identity: Caller | None = ANYONE
        refused: GristmillError | None = None
        try:
            if passed_on.MARK in shown:
                call.came_from(gate.came_from(shown))
            check_alone(sum(key == AUTHORIZATION for key, _ in metadata))
            identity = gate.known(shown.get(AUTHORIZATION))
        except UnauthenticatedError as error:
            refused = error
        except UnavailableError as error:
            refused = error
            admission.refused(call.machine, call.machine, UnauthenticatedError.code, 0, 0.0)
        kind: Kind = "stranger" if identity in (ANYONE, None) else method.kind
        slot = call.take(await admission.enter(call.identified(identity or ANYONE), kind))
        if refused is not None:
            try:
                raise refused
            finally:
                # Breaks the reference cycle of the error and this frame.
                del refused
        if identity is None:
            identity = await gate.identify(shown[AUTHORIZATION], partial(admission.pace, call.throttled))
            await slot.move(call.identified(identity), method.kind)
        if identity is ANYONE:
            gate.check(identity, method.call, None, None)
        else:
            admission.check(call.throttled)
        return slot

    def _check(self, method: Method, slot: Slot, request: Any) -> None:
        """Checks permission and limits. Raises like `Gate.check` and `Slot.count`."""
        gate, identity, run = self._api.gate, caller.current(), getattr(request, "run", None)
        gate.check(identity, method.call, run, getattr(request, "rank", None))
        try:
            slot.count(identity, run)
        except ResourceExhaustedError as error:
            gate.note_refusal(method.call, error, run)
            raise

    async def _pass_on(
        self, method: Method, call: Call, request: Any, data: bytes, owner: OwnedElsewhereError
    ) -> bytes:
        """Returns the answer of the run's owner. A stream that has begun is not forwarded to another owner."""
        assert call.slot is not None
        if getattr(request, "wait_s", 0.0) and not call.slot.wait():
            request.wait_s = 0.0
            data = request.SerializeToString()
        if method.is_stream:
            return await self._send(
                call.slot, self._forwarding.stream(method.path, data, owner, call.context), call.context
            )
        messages = request.messages() if isinstance(request, ColumnsRequest) else data
        return await self._forwarding.unary(method.path, messages, owner, call.context)

    async def _send(self, slot: Slot, answers: AsyncIterator[bytes], context: Any) -> bytes:
        nbytes = 0
        async with aclosing(answers):  # type: ignore[type-var]
            while True:
                # Before the next part is read, because it needs memory from then on.
                await slot.hold(_PART_BYTES)
                slot.due = None
                if (answer := await anext(answers, None)) is None:
                    break
                nbytes += len(answer)
                await slot.hold(len(answer))
                await context.write(answer)
                slot.due = None
        if tracing.is_on():
            tracing.describe(bytes=nbytes)
        return b""

    async def _delay(self, call: Call, code: str) -> None:
        """Delays the refusal of a caller that made too many invalid calls."""
        if self._api.gate.is_open:
            return
        slot = call.slot
        caller = call.machine if slot is None else slot.caller
        if delay_s := self._api.admission.refused(caller, call.throttled, code, call.nbytes, spent_s()):
            if slot is not None:
                slot.due = None
            await asyncio.sleep(delay_s)

    async def _refuse(self, method: Method, call: Call, error: Exception, refused: ErrorResponse) -> NoReturn:
        """Answers with an error, delayed for a caller that made too many invalid calls."""
        context = call.context
        if isinstance(error, AioRpcError):
            status, details, trailers = _of_owner(error)
        else:
            status, details, trailers = refused.grpc_status, refused.grpc_message, refused.trailers
            if refused.code == "INTERNAL":
                _log.error("call failed", call=method.name, exc_info=error)
            if _logs(logging.DEBUG):
                _log.debug("call refused", call=method.name, code=refused.code, reason=refused.message)
        # The error's frames would keep the request, also decompressed, in memory while the refusal is delayed.
        error.__context__ = error.__cause__ = error.__traceback__ = None
        if method.call:
            await self._delay(call, status.name)
        if call.slot is not None:
            await call.slot.hold(0)
        try:
            await context.abort(status, details, (*trailers, *context.trailing_metadata()))
        except (UsageError, InternalError):
            raise asyncio.CancelledError from None
        raise AssertionError("abort always raises")


def parsed(data: bytes, message: Descriptor, parse: Parse) -> Any:
    """Parses the request. Raises InvalidArgumentError if it is malformed, where gRPC itself would answer INTERNAL, and
    like `check_message`."""
    check_message(data, message)
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"the request is not a message of gristmill.v1: {error}; send the message defined in the .proto files"
        ) from None


def _of_owner(error: Any) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns the error answer of the process to which the call was forwarded."""
    code, details = error.code(), error.details()
    trailers = tuple((key, value) for key, value in error.trailing_metadata() or () if key != tracing.REQUEST_ID)
    if any(key == "gristmill-error" for key, _ in trailers) or code is grpc.StatusCode.CANCELLED:
        return code, details, trailers
    # The status is from gRPC itself, because the owner is unreachable or hangs.
    refused = refusal(UnavailableError(f"the process that owns this run does not answer: {details}; retry"))
    return refused.grpc_status, refused.grpc_message, refused.trailers


def machine_of(connection: str) -> str:
    """Returns the machine of a connection's address in gRPC's or HTTP's format: `ipv4:10.0.0.7:51234`,
    `ipv6:%5B::1%5D:51234`, `unix:` or `10.0.0.7`."""
    kind, _, address = connection.partition(":")
    if kind == "ipv4":
        return address.rpartition(":")[0]
    if kind == "ipv6":
        return address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D")
    return connection


def _spanned(path: str, answer: _Answer) -> _Answer:
    """Wraps a handler in a span."""
    service, _, method = path.removeprefix("/").partition("/")

    async def within_span(requests: object, context: Any) -> Any:
        span = tracing.call_span(path.removeprefix("/"), context.invocation_metadata())
        span.set_attributes({"rpc.system": "grpc", "rpc.service": service, "rpc.method": method})
        with tracing.within(span):
            try:
                return await answer(requests, context)
            finally:
                # A successful call has no code.
                code = context.code() or grpc.StatusCode.OK
                status = {"rpc.grpc.status_code": code.value[0], "gristmill.request_id": tracing.request_id()}
                span.set_attributes(status)
                if code is not grpc.StatusCode.OK:
                    tracing.fail(span, code.name)

    return within_span


def _describe(request: object) -> None:
    """Adds attributes of the request to the current span."""
    for name in _ATTRIBUTES:
        if isinstance(value := getattr(request, name, None), str | int):
            tracing.describe(**{name: value})
