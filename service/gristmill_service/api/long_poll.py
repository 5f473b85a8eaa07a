"""Calls that wait for a run to change: bounded in number and time, and ended by whoever goes away, the caller or the
service.

A wait over gRPC holds a thread, so that at most `limit` wait at once, over both doors; one more is answered at once
with what there is so far. A waiting call sleeps until its run wakes it, reads again, and goes on waiting where the
answer is not settled, because another caller was faster.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.call_threads import waiting
from gristmill_service.run.machine.queries.conditions import Condition

T = TypeVar("T")
Wake = Callable[[], None]

LONGEST_WAIT_S = 30.0


class Waitable(Protocol):
    """The part of a run that wakes callers."""

    def wait(self, condition: Condition, wake: Wake) -> None: ...

    def stop_waiting(self, condition: Condition, wake: Wake) -> None: ...


class Caller(Protocol):
    """The part of grpc.ServicerContext that tells whether anyone still listens."""

    def is_active(self) -> bool: ...

    def add_callback(self, callback: Callable[[], None]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A call that may wait: `read` is called again whenever the run meets the condition, until its answer is
    settled. condition: what to wait for, as the last reading left it."""

    run: Waitable
    condition: Callable[[], Condition]
    read: Callable[[], T]
    is_settled: Callable[[T], bool]


class LongPoll:
    """The calls that wait now. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._wakes: set[Wake] = set()
        self._is_closed = False

    @property
    def count(self) -> int:
        return len(self._wakes)

    def close(self) -> None:
        """Ends every wait: what is settled by now is answered, the others with UnavailableError."""
        with self._lock:
            self._is_closed = True
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

    def ask(self, question: Question[T], wait_s: float, caller: Caller) -> T:
        """The answer once it is settled, else as it is when the wait ends. Holds the calling thread."""
        deadline = time.monotonic() + checked_wait(wait_s)
        answer = question.read()
        if question.is_settled(answer) or not wait_s:
            return answer
        # Its put and get are C, where an Event's are dozens of lines of Python, for each of hundreds who are woken.
        woken: SimpleQueue[None] = SimpleQueue()

        def wake() -> None:
            woken.put(None)

        with self._place(wake) as has_place:
            if not has_place or not caller.add_callback(wake):
                return answer
            while not question.is_settled(answer) and not self._is_closed and caller.is_active():
                with _listening(question, wake), waiting(), suppress(Empty):
                    woken.get(timeout=max(0.0, deadline - time.monotonic()))
                if not caller.is_active():
                    # A reading may admit groups, of which nobody would hear.
                    break
                answer = question.read()
                if time.monotonic() >= deadline:
                    break
        return self._checked(question, answer)

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
            # The answer may come while the loop is closing, when nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

        with self._place(wake) as has_place:
            if not has_place:
                return answer
            while not question.is_settled(answer) and not self._is_closed and not watcher.done():
                woken.clear()
                with _listening(question, wake), waiting(), suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), max(0.0, deadline - time.monotonic()))
                if watcher.done():
                    break
                answer = await run_in_threadpool(question.read)
                if time.monotonic() >= deadline:
                    break
        return self._checked(question, answer)

    def _checked(self, question: Question[T], answer: T) -> T:
        if self._is_closed and not question.is_settled(answer):
            raise UnavailableError("the service is shutting down; ask again when it is back")
        return answer

    @contextmanager
    def _place(self, wake: Wake) -> Iterator[bool]:
        """A place among the calls that wait, where there is one."""
        with self._lock:
            has_place = len(self._wakes) < self._limit
            if has_place:
                self._wakes.add(wake)
        try:
            yield has_place
        finally:
            self._wakes.discard(wake)


@contextmanager
def _listening(question: Question[Any], wake: Wake) -> Iterator[None]:
    condition = question.condition()
    question.run.wait(condition, wake)
    try:
        yield
    finally:
        question.run.stop_waiting(condition, wake)


def checked_wait(wait_s: float) -> float:
    """Seconds to wait, no longer than the service allows."""
    if math.isnan(wait_s) or wait_s < 0:
        raise InvalidArgumentError(f"wait_s is {wait_s}; give the seconds to wait, 0 or more")
    return min(wait_s, LONGEST_WAIT_S)
