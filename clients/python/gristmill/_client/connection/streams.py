"""Read streams whose duration is unknown: each message must arrive in time, not the whole stream."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from math import inf
from typing import Any

import grpc


class StalledError(grpc.RpcError):  # type: ignore[misc]
    """The next message of a stream did not arrive in time. Has the methods of gRPC's own errors."""

    def __init__(self, idle_s: float) -> None:
        super().__init__(idle_s)
        self._idle_s = idle_s

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return f"no message of the stream for {self._idle_s:.3g} s"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def messages(begin: Callable[[], Any], idle_s: float) -> Iterator[Any]:
    """Yields the messages of the stream that `begin` starts.

    Raises StalledError if the next message takes longer than `idle_s`. Errors get the attribute `progress_s`: the
    seconds until the last message.
    """
    began = last = time.monotonic()
    call = begin()
    watch = _Watch(call.cancel, idle_s)
    try:
        stream = iter(call)
        while True:
            with watch:
                message = next(stream, None)
            if message is None:
                return
            last = time.monotonic()
            yield message
    except grpc.RpcError as error:
        failed = StalledError(idle_s) if watch.has_fired else error
        failed.progress_s = last - began
        raise failed from None
    finally:
        watch.stop()
        call.cancel()


async def awaited_messages(begin: Callable[[], Any], idle_s: float) -> AsyncIterator[Any]:
    """Yields the messages of an asyncio stream, like `messages`."""
    began = last = time.monotonic()
    call = begin()
    try:
        while True:
            try:
                message = await asyncio.wait_for(call.read(), idle_s)
            except TimeoutError:
                raise StalledError(idle_s) from None
            if message is grpc.aio.EOF:
                return
            last = time.monotonic()
            yield message
    except grpc.RpcError as error:
        error.progress_s = last - began
        raise
    finally:
        call.cancel()


class _Watch:
    """Calls `cancel` in a thread if a block takes longer than `idle_s`. A blocking stream cannot be read with a timeout
    for each message."""

    def __init__(self, cancel: Callable[[], Any], idle_s: float) -> None:
        self._cancel, self._idle_s = cancel, idle_s
        self._since = inf
        self._stopped = threading.Event()
        self.has_fired = False
        threading.Thread(target=self._run, name="gristmill-stream", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = inf

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause_s = self._idle_s
        while not self._stopped.wait(pause_s):
            left_s = self._since + self._idle_s - time.monotonic()
            if left_s <= 0:
                self.has_fired = True
                self._cancel()
                return
            pause_s = min(left_s, self._idle_s)
