"""Waiting for a run to change: bounded in number and time, and ended by whoever goes away, the caller or the service.

A wait over gRPC holds a thread, so that at most `limit` wait at once, over both doors; one more is answered at once
with what is so far. Nothing here knows what is waited for.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from gristmill.errors import InvalidArgumentError, UnavailableError

T = TypeVar("T")

LONGEST_WAIT_S = 30.0
# A waiter looks again at most this often, so that hundreds of them cost a busy run little.
_PAUSE_S = 0.002


class Changes(Protocol):
    """Calls back, from any thread, after each change of a run."""

    def subscribe(self, callback: Callable[[], None]) -> object: ...

    def unsubscribe(self, callback: Callable[[], None]) -> object: ...


class Caller(Protocol):
    """The part of grpc.ServicerContext that tells whether anyone still listens."""

    def is_active(self) -> bool: ...

    def add_callback(self, callback: Callable[[], None]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """What a caller asks for: read again after each change until the answer is settled."""

    changes: Changes
    read: Callable[[], T]
    is_settled: Callable[[T], bool]


class Waiting:
    """The calls that wait now. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._wakers: set[Callable[[], None]] = set()
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._wakers)

    def close(self) -> None:
        """Ends every wait: what is settled by now is answered, the others with UnavailableError."""
        with self._lock:
            self._closed = True
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def ask(self, question: Question[T], wait_s: float, caller: Caller) -> T:
        """The answer once it is settled, else as it is when the wait ends. Holds the calling thread."""
        deadline = time.monotonic() + checked_wait(wait_s)
        answer = question.read()
        if question.is_settled(answer) or not wait_s:
            return answer
        woken = threading.Event()
        with self._place(woken.set, question.changes) as found:
            if not found or not caller.add_callback(woken.set):
                return answer
            while True:
                woken.clear()
                answer = question.read()
                left = deadline - time.monotonic()
                if self._is_over(question.is_settled(answer), left) or not caller.is_active():
                    return answer
                woken.wait(left)
                if not self._closed:
                    time.sleep(_PAUSE_S)

    async def ask_async(self, question: Question[T], wait_s: float, gone: Coroutine[Any, Any, None]) -> T:
        """The same for asyncio, holding no thread. `gone` returns when the caller has gone away."""
        watcher = asyncio.ensure_future(gone)
        try:
            return await self._ask_async(question, wait_s, watcher)
        finally:
            watcher.cancel()

    async def _ask_async(self, question: Question[T], wait_s: float, watcher: asyncio.Future[None]) -> T:
        deadline = time.monotonic() + checked_wait(wait_s)
        answer = await run_in_threadpool(question.read)
        if question.is_settled(answer) or not wait_s:
            return answer
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        watcher.add_done_callback(lambda _: woken.set())

        def wake() -> None:
            # A change may come while the loop is closing, when nobody waits any more.
            with suppress(RuntimeError):
                if not woken.is_set():
                    loop.call_soon_threadsafe(woken.set)

        with self._place(wake, question.changes) as found:
            if not found:
                return answer
            while True:
                woken.clear()
                answer = await run_in_threadpool(question.read)
                left = deadline - time.monotonic()
                if self._is_over(question.is_settled(answer), left) or watcher.done():
                    return answer
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), left)
                if not self._closed:
                    await asyncio.sleep(_PAUSE_S)

    def _is_over(self, settled: bool, left: float) -> bool:
        if self._closed and not settled:
            raise UnavailableError("the service is shutting down; ask again when it is back")
        return settled or left <= 0

    @contextmanager
    def _place(self, wake: Callable[[], None], changes: Changes) -> Iterator[bool]:
        """A place among those who wait, or False where there is none."""
        with self._lock:
            if found := len(self._wakers) < self._limit:
                self._wakers.add(wake)
        if not found:
            yield False
            return
        changes.subscribe(wake)
        try:
            yield True
        finally:
            changes.unsubscribe(wake)
            with self._lock:
                self._wakers.discard(wake)


def checked_wait(wait_s: float) -> float:
    """Seconds to wait, no longer than the service allows."""
    if math.isnan(wait_s) or wait_s < 0:
        raise InvalidArgumentError(f"wait_s is {wait_s}; give the seconds to wait, 0 or more")
    return min(wait_s, LONGEST_WAIT_S)
