"""Waiting for a run to change: bounded in number and time, and ended by whoever goes away, the caller or the service.

Hundreds wait for the same: the ranks of a trainer for one batch. So it is not they who look at the run after each
change, but one thread for all, once for each question; they sleep until it has found their answer. A run that changes
all the time pays for its waiters with that one look.

A wait over gRPC holds a thread, so that at most `limit` wait at once, over both doors; one more is answered at once
with what is so far. Nothing here knows what is waited for.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from gristmill.errors import InvalidArgumentError, UnavailableError

T = TypeVar("T")

LONGEST_WAIT_S = 30.0
# Between two looks the watching thread pauses so long at least, and so many times what the last look took: different
# questions by the hundred must not take a busy run's time either.
_PAUSE_S, _PAUSE_LOOKS = 0.001, 8


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
    """What a caller asks for: read again after changes until the answer is settled.

    key: questions about the same `changes` with the same key have the same answer, which is read once for all of them.
        None: a question of its own.
    """

    changes: Changes
    read: Callable[[], T]
    is_settled: Callable[[T], bool]
    key: Hashable = None


class _Topic(Generic[T]):
    """One question, and those who wait for its answer."""

    def __init__(self, question: Question[T]) -> None:
        self._question = question
        self.wakers: set[Callable[[], None]] = set()
        self.is_over = False
        self._answer: list[T] = []

    def look(self) -> None:
        """Reads the answer. One that cannot be read is found by each who waits, whose error it is."""
        try:
            answer = self._question.read()
            self.is_over = self._question.is_settled(answer)
        except Exception:  # noqa: BLE001
            self.is_over = True
            return
        if self.is_over:
            self._answer.append(answer)

    def answer(self, question: Question[T]) -> T:
        """The settled answer, else as it is now."""
        return self._answer[0] if self._answer else question.read()


@dataclass(slots=True, eq=False)
class _Watch:
    """The topics of one run. was_changed: since they were last looked at."""

    changed: threading.Event
    topics: dict[Hashable, _Topic[Any]] = field(default_factory=dict)
    was_changed: bool = False

    def wake(self) -> None:
        """What a change calls: from the thread of a producer, so that it does next to nothing."""
        if not self.was_changed:
            self.was_changed = True
            self.changed.set()


class Waiting:
    """The calls that wait now. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._wakers: set[Callable[[], None]] = set()
        self._watches: dict[Changes, _Watch] = {}
        self._changed = threading.Event()
        self._is_watching = False
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
        # Its put and get are C, where an Event's are dozens of lines of Python, for each of hundreds who are woken.
        woken: SimpleQueue[None] = SimpleQueue()

        def wake() -> None:
            woken.put(None)

        with self._place(question, wake) as topic:
            if topic is None or not caller.add_callback(wake):
                return answer
            # Woken once: by the answer, the caller's going away, or the service's.
            if not self._closed:
                with suppress(Empty):
                    woken.get(timeout=max(0.0, deadline - time.monotonic()))
            answer = topic.answer(question)
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

        with self._place(question, wake) as topic:
            if topic is None:
                return answer
            if not self._closed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), deadline - time.monotonic())
            answer = await run_in_threadpool(topic.answer, question)
        return self._checked(question, answer)

    def _checked(self, question: Question[T], answer: T) -> T:
        if self._closed and not question.is_settled(answer):
            raise UnavailableError("the service is shutting down; ask again when it is back")
        return answer

    @contextmanager
    def _place(self, question: Question[T], wake: Callable[[], None]) -> Iterator[_Topic[T] | None]:
        """A place among those who wait for the question's answer, or None where there is none."""
        # Whoever shares no question has it under a name of his own.
        key = wake if question.key is None else question.key
        with self._lock:
            topic = self._join(question, key, wake) if len(self._wakers) < self._limit else None
        try:
            yield topic
        finally:
            if topic is not None and wake in topic.wakers:
                with self._lock:
                    self._leave(question.changes, key, topic, wake)

    def _join(self, question: Question[T], key: Hashable, wake: Callable[[], None]) -> _Topic[T]:
        self._wakers.add(wake)
        watch = self._watches.get(question.changes)
        if watch is None:
            watch = self._watches[question.changes] = _Watch(self._changed)
            question.changes.subscribe(watch.wake)
        topic = watch.topics.get(key)
        if topic is None:
            topic = watch.topics[key] = _Topic(question)
            # It may have changed after the caller read it, before anybody watched.
            watch.wake()
        topic.wakers.add(wake)
        if not self._is_watching:
            self._is_watching = True
            threading.Thread(target=self._look, name="gristmill-waiting", daemon=True).start()
        return topic

    def _leave(self, changes: Changes, key: Hashable, topic: _Topic[Any], wake: Callable[[], None]) -> None:
        """Of one who waits no longer, and was not dismissed."""
        if wake not in topic.wakers:
            return
        self._wakers.discard(wake)
        topic.wakers.discard(wake)
        if not topic.wakers:
            self._end(changes, key)

    def _end(self, changes: Changes, key: Hashable) -> None:
        """Of a topic that nobody waits for any more."""
        watch = self._watches[changes]
        del watch.topics[key]
        if not watch.topics:
            changes.unsubscribe(watch.wake)
            del self._watches[changes]
            # The watching thread ends with the last one.
            self._changed.set()

    def _look(self) -> None:
        """The watching thread: looks after changes, and wakes who waits for what is settled."""
        while True:
            self._changed.wait()
            self._changed.clear()
            with self._lock:
                if not self._watches:
                    self._is_watching = False
                    return
                changed = [item for item in self._watches.items() if item[1].was_changed]
            begin = time.monotonic()
            for changes, watch in changed:
                watch.was_changed = False
                for wake in self._settle(changes, watch):
                    wake()
            time.sleep(max(_PAUSE_S, _PAUSE_LOOKS * (time.monotonic() - begin)))

    def _settle(self, changes: Changes, watch: _Watch) -> list[Callable[[], None]]:
        """Looks at a run's topics, and dismisses who waits for those that are over; returns whom to wake."""
        with self._lock:
            topics = dict(watch.topics)
        for topic in topics.values():
            topic.look()
        dismissed: list[Callable[[], None]] = []
        with self._lock:
            for key, topic in topics.items():
                # One that nobody waited for meanwhile has ended; another may have its key.
                if topic.is_over and topic.wakers:
                    dismissed += topic.wakers
                    topic.wakers.clear()
                    self._end(changes, key)
            self._wakers.difference_update(dismissed)
        return dismissed


def checked_wait(wait_s: float) -> float:
    """Seconds to wait, no longer than the service allows."""
    if math.isnan(wait_s) or wait_s < 0:
        raise InvalidArgumentError(f"wait_s is {wait_s}; give the seconds to wait, 0 or more")
    return min(wait_s, LONGEST_WAIT_S)
