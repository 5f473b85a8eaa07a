"""The streams that are open: bounded, as each holds a thread for as long as its caller likes, and ended at shutdown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from gristmill.errors import ResourceExhaustedError, UnavailableError

T = TypeVar("T")


class Streams:
    """Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: set[grpc.ServicerContext] = set()
        self._closed = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """Raises ResourceExhaustedError where there is none left."""
        if not self._places.acquire(blocking=False):
            raise ResourceExhaustedError(
                f"{self._limit} streams are open and max_streams allows no more; use SubmitRows, retry, or raise the "
                "setting"
            )
        try:
            yield
        finally:
            self._places.release()

    def requests(self, stream: Iterator[T], context: grpc.ServicerContext) -> Iterator[T]:
        """The stream's requests. Raises UnavailableError after the one being answered when the service shuts down."""
        while True:
            with self._lock:
                if self._closed:
                    raise UnavailableError("the service is shutting down; open the stream again when it is back")
                self._idle.add(context)
            try:
                request = next(stream)
            except StopIteration:
                return
            finally:
                with self._lock:
                    self._idle.discard(context)
            yield request

    def close(self) -> None:
        """Streams that are being answered end after that answer; the others now, which their callers see as CANCELLED:
        gRPC offers no other way to end a call whose thread waits for the next request."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
        for context in idle:
            context.cancel()
