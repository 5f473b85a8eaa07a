"""The streams that are open: bounded, as each holds a thread for as long as its caller likes, and ended at shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar

import grpc

from gristmill.errors import UnavailableError
from gristmill_service.api.places import Place, Places
from gristmill_service.api.rpc.peers import caller_of
from gristmill_service.call_threads import waiting

T = TypeVar("T")
_PATIENCE_S = 60.0
_REFUSAL = "{limit} streams are open and max_streams allows no more; use SubmitRows, retry, or raise the setting"


class Streams:
    """Thread-safe. Streams that bring rows and those that read have as many places each."""

    def __init__(self, limit: int) -> None:
        refusal = _REFUSAL.format(limit=limit)
        self._bringing = Places(limit, refusal, _PATIENCE_S, takes_back=True)
        self._reading = Places(limit, refusal, _PATIENCE_S, takes_back=True)
        self._lock = threading.Lock()
        self._idle: set[grpc.ServicerContext] = set()
        self._closed = False

    def read(self, answers: Iterator[T], context: grpc.ServicerContext) -> Iterator[T]:
        """Gives the answers of a stream that reads. A caller who takes none of them is idle.

        Raises ResourceExhaustedError where there is no place left.
        """
        with self._reading.place(caller_of(context), context.cancel) as place:
            for answer in answers:
                place.idle_since = self._reading.clock()
                yield answer
                place.idle_since = None

    def requests(self, stream: Iterator[T], context: grpc.ServicerContext) -> Iterator[T]:
        """The requests of a stream that brings rows. Raises ResourceExhaustedError where there is no place left, and
        UnavailableError after the one being answered when the service shuts down."""
        with self._bringing.place(caller_of(context), context.cancel) as place:
            while True:
                with self._lock:
                    if self._closed:
                        raise UnavailableError("the service is shutting down; open the stream again when it is back")
                    self._idle.add(context)
                try:
                    request = self._next(stream, place)
                except StopIteration:
                    return
                finally:
                    with self._lock:
                        self._idle.discard(context)
                yield request

    def _next(self, stream: Iterator[T], place: Place) -> T:
        place.idle_since = self._bringing.clock()
        try:
            with waiting():
                return next(stream)
        finally:
            place.idle_since = None

    def close(self) -> None:
        """Streams that are being answered end after that answer; the others now, which their callers see as CANCELLED:
        gRPC offers no other way to end a call whose thread waits for the next request."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
        for context in idle:
            context.cancel()
