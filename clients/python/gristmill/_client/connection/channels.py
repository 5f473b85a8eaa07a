"""Call one replica of a service, and fail over to the next one if that replica cannot serve.

A client's address may name several replicas. Each replica answers all calls, so one reachable replica is enough. This
module owns the connections and chooses the current replica; `retries` decides when a call is repeated.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import grpc

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.streams import awaited_messages, messages
from gristmill._wire.codecs.submit_codec import MESSAGE_BYTES
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

REQUEST_ID = "x-request-id"
"""The metadata key of a call's id. The error of a failed call has the id as its attribute `request_id`."""

_OPTIONS = (
    # The service's limit is a setting of its own.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # The address of a name changes when a pod is replaced. By default gRPC resolves a name at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # By default gRPC waits up to two minutes before it reconnects, which is too long after a restart of the service.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # `gristmill._client.connection.retries` retries instead, because it also knows the service's errors.
    ("grpc.enable_retries", 0),
    # Each client has its own connection, so that one client's large rollout does not delay another client's answer.
    ("grpc.use_local_subchannel_pool", 1),
)
# The timeout of a keepalive ping has two names: newer versions of gRPC read the second.
_ALONE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
# With several replicas, detect a hanging replica early, also during a long poll without data. The service permits one
# ping every 2 s.
_AMONG_OTHERS = (
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Channel:
    """A channel of gRPC to one replica. calls: the number of its active calls."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.calls = channel, 0


Bind = Callable[[Channel], Callable[..., Any]]
"""Returns the callable of one gRPC method on a channel."""

Watched = AbstractContextManager[None]


class Begun(NamedTuple):
    """An active call.

    answer: waits for the answer and returns it. is_done: returns whether the call has ended. on_done: registers a
    function to be called, in any thread, when the call ends.
    """

    answer: Callable[[], Any]
    is_done: Callable[[], bool]
    on_done: Callable[[Callable[[Any], None]], Any]


_CANNOT_SERVE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_EXPECTED = "expected HOST:PORT or unix:/PATH, or a comma-separated list of these"


def addresses_of(address: str) -> tuple[str, ...]:
    """Returns the replicas that an address names. Raises InvalidArgumentError naming the invalid part."""
    if not isinstance(address, str):
        raise InvalidArgumentError(f"address is {address!r}; {_EXPECTED}")
    parts = tuple(part.strip() for part in address.split(","))
    for part in parts:
        if not _is_address(part):
            where = "" if len(parts) == 1 else f"{part!r} in "
            raise InvalidArgumentError(f"address is {where}{address!r}; {_EXPECTED}")
    return parts


def _is_address(part: str) -> bool:
    if "://" in part:
        return False
    if part.startswith("unix:"):
        return part != "unix:"
    host, _, port = part.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535


def cannot_serve(call: grpc.RpcError) -> bool:
    """Returns whether the call failed because its replica is unreachable, stopping or hanging. Another replica may
    answer then."""
    return call.code() in _CANNOT_SERVE


class Replicas:
    """The replicas of one service, with the interface of one grpc.Channel for the generated stubs.

    Calls are sent to the current replica. If a call fails because that replica cannot serve, the next replica becomes
    current. Each client tries replicas in its own random order, so that many clients spread over them, also after a
    replica fails. The connection to a replica is opened by its first call.
    """

    _library: Any

    def __init__(self, address: str, credentials: Credentials) -> None:
        addresses = list(addresses_of(address))
        for each in addresses:
            credentials.check_reach(each)
        self.names = ", ".join(addresses)
        self.count = len(addresses)
        # Do not use the global generator: many workers seed it with the same value.
        random.SystemRandom().shuffle(addresses)
        self._addresses, self._credentials = addresses, credentials
        self._options = _OPTIONS + (_ALONE if self.count == 1 else _AMONG_OTHERS)
        self._lock = threading.Lock()
        self._made: dict[str, Channel] = {}
        self._version = credentials.version()
        # Channels from before a renewal of certificates stay open for their active calls.
        self._before: list[Channel] = []
        self._current_number = 0
        self._id, self._calls = secrets.token_hex(4), itertools.count(1)
        self._is_closed = False

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """Returns a callable with the arguments `request` and `timeout`, which limits the wait for each message."""
        return self._streaming(_binder("unary_stream", method, options))

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._streaming(_binder("stream_stream", method, options))

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """Returns a callable with the arguments `request` and `timeout`."""
        return self._answering(_binder("unary_unary", method, options))

    def stream_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """Returns a callable with the arguments `requests`, an iterator, and `timeout`."""
        return self._answering(_binder("stream_unary", method, options))

    def begin(self, *method: Any, **options: Any) -> Callable[..., Begun]:
        """Returns a callable like that of `unary_unary`, except that it returns before the answer arrives."""
        return self._beginning(_binder("unary_unary", method, options))

    def _beginning(self, bind: Bind) -> Callable[..., Begun]:
        def call(request: Any, timeout: float) -> Begun:
            number, channel = self._current()
            named = self._named()
            begun = self._begin(bind(channel), self._watched(number, named), request, timeout=timeout, metadata=named)
            begun.on_done(lambda _: self._end(channel))
            return begun

        return call

    def _begin(self, bound: Any, watched: Watched, request: Any, **options: Any) -> Begun:
        raise NotImplementedError

    def _answering(self, bind: Bind) -> Callable[..., Any]:
        raise NotImplementedError

    def _streaming(self, bind: Bind) -> Callable[..., Any]:
        raise NotImplementedError

    @contextmanager
    def _attempt(self, bind: Bind) -> Iterator[Callable[..., Any]]:
        """Yields the callable of the current replica."""
        number, channel = self._current()
        try:
            named = self._named()
            with self._watched(number, named):
                yield functools.partial(bind(channel), metadata=named)
        finally:
            self._end(channel)

    @contextmanager
    def _watched(self, number: int, named: tuple[tuple[str, str], ...]) -> Iterator[None]:
        """Makes the next replica current if the call within the block fails because its replica cannot serve."""
        try:
            yield
        except grpc.RpcError as call:
            call.request_id, call.replica = named[0][1], self._addresses[number % self.count]
            if cannot_serve(call):
                self._fail_over(number)
            raise

    def _named(self) -> tuple[tuple[str, str], ...]:
        """Returns the next call's metadata: a new id, which the service logs, and the caller's token."""
        return (REQUEST_ID, f"{self._id}-{next(self._calls):x}"), *self._credentials.metadata()

    def _current(self) -> tuple[int, Channel]:
        """Returns the number of the current replica, for `_fail_over`, and its channel, in which a call begins: report
        its end to `_end`."""
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("this client is closed; create another")
            if self._version != (version := self._credentials.version()):
                self._before += self._made.values()
                self._made, self._version = {}, version
            unused = [channel for channel in self._before if not channel.calls]
            self._before = [channel for channel in self._before if channel.calls]
            address = self._addresses[self._current_number % self.count]
            if (channel := self._made.get(address)) is None:
                made = self._credentials.channel(self._library, address, self._options)
                channel = self._made[address] = Channel(made)
            channel.calls += 1
            number = self._current_number
        for each in unused:
            self._close(each.channel)
        return number, channel

    def _end(self, channel: Channel) -> None:
        """Reports the end of a call. Its channel may be closed by a later call: gRPC reports the end in a thread of the
        channel."""
        with self._lock:
            channel.calls -= 1

    def _close(self, channel: Any) -> None:
        """Closes a channel without active calls."""
        raise NotImplementedError

    def _fail_over(self, number: int) -> None:
        """Makes the next replica current, once for all calls that failed on this one. The old channel stays open for
        its active calls."""
        with self._lock:
            if number == self._current_number:
                self._current_number += 1

    def take_all(self) -> list[Any]:
        """Returns all channels for closing. No channel is created after that."""
        with self._lock:
            self._is_closed = True
            made = [channel.channel for channel in (*self._before, *self._made.values())]
            self._before, self._made = [], {}
            return made


class Channels(Replicas):
    """The replicas for blocking calls. Thread-safe."""

    _library = grpc

    def _close(self, channel: Any) -> None:
        channel.close()

    def _answering(self, bind: Bind) -> Callable[..., Any]:
        def call(request: Any, timeout: float) -> Any:
            with self._attempt(bind) as bound:
                return bound(request, timeout=timeout)

        return call

    def _begin(self, bound: Any, watched: Watched, request: Any, **options: Any) -> Begun:
        future = bound.future(request, **options)

        def answer() -> Any:
            with watched:
                try:
                    return future.result()
                except grpc.FutureCancelledError:
                    raise future from None

        return Begun(answer, future.done, future.add_done_callback)

    def _streaming(self, bind: Bind) -> Callable[..., Iterator[Any]]:
        def call(request: Any, timeout: float) -> Iterator[Any]:
            with self._attempt(bind) as bound:
                yield from messages(functools.partial(bound, request), timeout)

        return call


class AsyncChannels(Replicas):
    """The replicas for calls in one event loop."""

    _library = grpc.aio

    def __init__(self, address: str, credentials: Credentials) -> None:
        super().__init__(address, credentials)
        self._closing: set[asyncio.Future[None]] = set()

    def _close(self, channel: Any) -> None:
        closing = asyncio.ensure_future(channel.close())
        # The event loop refers to its tasks weakly.
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _answering(self, bind: Bind) -> Callable[..., Awaitable[Any]]:
        begin = self._beginning(bind)

        async def call(request: Any, timeout: float) -> Any:
            return await begin(request, timeout).answer()

        return call

    def _begin(self, bound: Any, watched: Watched, request: Any, **options: Any) -> Begun:
        begun = bound(request, **options)

        async def answer() -> Any:
            with watched:
                return await begun

        return Begun(answer, begun.done, begun.add_done_callback)

    def _streaming(self, bind: Bind) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, timeout: float) -> AsyncIterator[Any]:
            with self._attempt(bind) as bound:
                async for message in awaited_messages(functools.partial(bound, request), timeout):
                    yield message

        return call


def _binder(kind: str, method: tuple[Any, ...], options: dict[str, Any]) -> Bind:
    """Returns a function that creates the method's callable on a channel, once per channel."""
    bound: WeakKeyDictionary[Channel, Callable[..., Any]] = WeakKeyDictionary()

    def bind(channel: Channel) -> Callable[..., Any]:
        if (method_on_channel := bound.get(channel)) is None:
            method_on_channel = bound[channel] = getattr(channel.channel, kind)(*method, **options)
        return method_on_channel

    return bind
