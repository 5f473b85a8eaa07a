"""Passes a call on to the process that decides for its run, and that process' answer back, as they are.

A call is passed on once: where it arrives at the wrong process again, its caller is told to retry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from gristmill.errors import UnavailableError
from gristmill_service import tracing
from gristmill_service.access import passed_on
from gristmill_service.access.gate import AUTHORIZATION
from gristmill_service.api import request_ids
from gristmill_service.call_threads import waiting
from gristmill_service.storage.run_store import OwnedElsewhereError

_LONGEST_S = 60.0
_LOOK_S = 0.5

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What newer versions of gRPC heed in place of the one above.
    ("grpc.http2.ping_timeout_ms", 5_000),
)


class Forwarding:
    """Thread-safe. limit: how many calls that wait may be passed on at once; one more is passed on without its wait.

    is_owner(run, address): whether the run is still decided there, as far as is known here. credentials(): of
    connections to other processes, others once they are renewed; None: they are not encrypted.
    """

    def __init__(
        self,
        limit: int,
        is_owner: Callable[[str, str], bool],
        credentials: Callable[[], grpc.ChannelCredentials] | None,
    ) -> None:
        self._is_owner, self._credentials = is_owner, credentials
        self._lock = threading.Lock()
        # With what each was made with; those of before a renewal go on with the calls that they have.
        self._channels: dict[str, tuple[grpc.ChannelCredentials | None, grpc.Channel]] = {}
        self._renewed: list[grpc.Channel] = []
        self._waits = threading.BoundedSemaphore(limit)

    def unary(self, method: str, request: Any, owner: OwnedElsewhereError, context: grpc.ServicerContext) -> bytes:
        """The answer's bytes. Raises the owner's refusal as grpc.RpcError, and UnavailableError where it is the owner
        no longer: it may hang for as long as the caller waits."""
        _check(owner)
        with self._bounded(request):
            ask = self._channel(owner.grpc_address).unary_unary(method)
            call = ask.future(request.SerializeToString(), timeout=_left(context), metadata=_marked(owner, context))
            context.add_callback(call.cancel)
            while True:
                try:
                    with waiting():
                        answer: bytes = call.result(timeout=_LOOK_S)
                    return answer
                except grpc.FutureTimeoutError:
                    if not self._is_owner(owner.run, owner.grpc_address):
                        call.cancel()
                        raise UnavailableError(f"{owner}; its owner has changed") from None
                except grpc.FutureCancelledError:
                    raise UnavailableError("the caller has gone away") from None

    def stream(
        self, method: str, request: Any, owner: OwnedElsewhereError, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        _check(owner)
        ask = self._channel(owner.grpc_address).unary_stream(method)
        call = ask(request.SerializeToString(), timeout=_left(context), metadata=_marked(owner, context))
        context.add_callback(call.cancel)
        yield from call

    def close(self) -> None:
        with self._lock:
            for channel in (*self._renewed, *(channel for _, channel in self._channels.values())):
                channel.close()

    def _channel(self, address: str) -> grpc.Channel:
        shown = None if self._credentials is None else self._credentials()
        with self._lock:
            made_with, channel = self._channels.get(address, (None, None))
            if channel is not None and made_with is shown:
                return channel
            if channel is not None:
                self._renewed.append(channel)
            if shown is None:
                channel = grpc.insecure_channel(address, _OPTIONS)
            else:
                channel = grpc.secure_channel(address, shown, _OPTIONS)
            self._channels[address] = shown, channel
            return channel

    @contextmanager
    def _bounded(self, request: Any) -> Iterator[None]:
        """A call that waits holds a thread here, too."""
        if not getattr(request, "wait_s", 0.0):
            yield
            return
        has_place = self._waits.acquire(blocking=False)
        if not has_place:
            request.wait_s = 0.0
        try:
            yield
        finally:
            if has_place:
                self._waits.release()


def _check(owner: OwnedElsewhereError) -> None:
    if passed_on.current():
        raise UnavailableError(f"{owner}; its owner is changing")


def _marked(owner: OwnedElsewhereError, context: grpc.ServicerContext) -> tuple[tuple[str, str], ...]:
    """What is passed on carries the id that its caller knows, the caller's own token, and its trace."""
    shown = ((key, value) for key, value in context.invocation_metadata() if key == AUTHORIZATION)
    mine = (passed_on.MARK, owner.secret), (passed_on.CAME_FROM, context.peer())
    return *mine, (request_ids.HEADER, request_ids.current()), *shown, *tracing.carried().items()


def _left(context: grpc.ServicerContext) -> float:
    """Seconds that the caller still waits."""
    left = context.time_remaining()
    return _LONGEST_S if left is None else min(left, _LONGEST_S)
