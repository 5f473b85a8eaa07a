"""The replica that a client talks to: one of those that its address names, until that one cannot serve.

Any replica answers any call, so that a client needs only a living one. Owns the connections and which of them is the
current one; `retries` decides when a call is tried again.
"""

from __future__ import annotations

import functools
import itertools
import random
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import grpc

from gristmill._client.connection.credentials import Credentials
from gristmill._wire.codecs.submit_codec import MESSAGE_BYTES
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

REQUEST_ID = "x-request-id"
"""Metadata of every call, and what a failed call's error has as `request_id`."""

_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # gRPC's own pauses between connects grow to two minutes; a service that is back should be found sooner.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Retries are made in `gristmill._client.connection.retries`, where they see the service's own errors.
    ("grpc.enable_retries", 0),
    # Clients of one process do not share a connection, so that a rollout of megabytes does not delay an answer.
    ("grpc.use_local_subchannel_pool", 1),
)
# How long gRPC waits for the answer to a keepalive has two names, of which its newer versions take the second.
_ALONE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
# A replica that hangs is noticed early where another can answer; also late in a wait, during which no data comes. The
# service permits one ping in 2 s.
_AMONG_OTHERS = (
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
)

Bind = Callable[[Any], Callable[..., Any]]
"""A method of the contract, of the channel given."""

Watched = AbstractContextManager[None]


class Begun(NamedTuple):
    """A call under way. `answer` waits for its answer; `is_done` says whether that, or an error, is here, and `on_done`
    takes a function that is called when it is, in any thread."""

    answer: Callable[[], Any]
    is_done: Callable[[], bool]
    on_done: Callable[[Callable[[Any], None]], Any]


_CANNOT_SERVE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_EXPECTED = "expected HOST:PORT or unix:/PATH, or several of them with commas between"


def addresses_of(address: str) -> tuple[str, ...]:
    """The replicas that an address names. Raises InvalidArgumentError naming the part that is none."""
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
    """Whether the replica is away, stopping, or hangs, as another one need not be. A broken connection is UNAVAILABLE
    too."""
    return call.code() in _CANNOT_SERVE


class Replicas:
    """The replicas of one service, which look like one grpc.Channel to the generated stubs.

    Each call goes to the replica that is current when it is made; one that fails because its replica cannot serve makes
    the next replica the current one. Replicas are tried in an order of this client's own, so that a thousand clients
    spread over them, also over those that are left when one dies. Each is connected when it is first called.
    """

    _library: Any

    def __init__(self, address: str, credentials: Credentials) -> None:
        addresses = list(addresses_of(address))
        self.names = ", ".join(addresses)
        self.count = len(addresses)
        # Not in the order of `random`, which many workers seed alike.
        random.SystemRandom().shuffle(addresses)
        self._addresses, self._credentials = addresses, credentials
        self._options = _OPTIONS + (_ALONE if self.count == 1 else _AMONG_OTHERS)
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}
        self._version = credentials.version()
        # Made before certificates were renewed: calls that are under way there may end well.
        self._before: list[Any] = []
        self._turn = 0
        self._id, self._calls = secrets.token_hex(4), itertools.count(1)
        self._is_closed = False

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._streaming(_binder("unary_stream", method, options))

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._streaming(_binder("stream_stream", method, options))

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        """A method that is called with a request and a timeout."""
        raise NotImplementedError

    def begin(self, *method: Any, **options: Any) -> Callable[..., Begun]:
        """Like `unary_unary`, but the call returns at once."""
        bind = _binder("unary_unary", method, options)

        def call(request: Any, timeout: float) -> Begun:
            turn, channel = self._current()
            named = self._named()
            return self._begin(bind(channel), self._watched(turn, named), request, timeout=timeout, metadata=named)

        return call

    def _begin(self, bound: Any, watched: Watched, request: Any, **options: Any) -> Begun:
        raise NotImplementedError

    def _streaming(self, bind: Bind) -> Callable[..., Any]:
        raise NotImplementedError

    @contextmanager
    def _attempt(self, bind: Bind) -> Iterator[Callable[..., Any]]:
        """The method of the current replica."""
        turn, channel = self._current()
        named = self._named()
        with self._watched(turn, named):
            yield functools.partial(bind(channel), metadata=named)

    @contextmanager
    def _watched(self, turn: int, named: tuple[tuple[str, str], ...]) -> Iterator[None]:
        """Goes on to the next replica where a call of this turn fails because its replica cannot serve."""
        try:
            yield
        except grpc.RpcError as call:
            call.request_id = named[0][1]
            if cannot_serve(call):
                self._fail_over(turn)
            raise

    def _named(self) -> tuple[tuple[str, str], ...]:
        """Metadata with an id of the next call's own, which the service's log names, and the caller's token."""
        return (REQUEST_ID, f"{self._id}-{next(self._calls):x}"), *self._credentials.metadata()

    def _current(self) -> tuple[int, Any]:
        """The channel to call on, and the turn to give to `_fail_over` if that fails."""
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("this client is closed; make another")
            if self._version != (version := self._credentials.version()):
                self._before += self._made.values()
                self._made, self._version = {}, version
            address = self._addresses[self._turn % self.count]
            if address not in self._made:
                self._made[address] = self._credentials.channel(self._library, address, self._options)
            return self._turn, self._made[address]

    def _fail_over(self, turn: int) -> None:
        """Goes on to the next replica, once for all calls that failed in this turn. The earlier one stays connected:
        calls that are under way there may end well."""
        with self._lock:
            if turn == self._turn:
                self._turn += 1

    def take_all(self) -> list[Any]:
        """The channels that there are to close; no more are made."""
        with self._lock:
            self._is_closed = True
            made = [*self._before, *self._made.values()]
            self._before, self._made = [], {}
            return made


class Channels(Replicas):
    """Blocking and thread-safe."""

    _library = grpc

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        bind = _binder("unary_unary", method, options)

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
                yield from bound(request, timeout=timeout)

        return call


class AsyncChannels(Replicas):
    """For one event loop, that of the calls."""

    _library = grpc.aio

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        begin = self.begin(*method, **options)

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
                async for message in bound(request, timeout=timeout):
                    yield message

        return call


def _binder(kind: str, method: tuple[Any, ...], options: dict[str, Any]) -> Bind:
    """Makes the method of a channel, once for each."""
    return functools.cache(lambda channel: getattr(channel, kind)(*method, **options))
