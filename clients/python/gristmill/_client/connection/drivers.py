"""Run a client in threads, where calls block, or in an event loop, where they are awaited.

A client's core is written once, as coroutines. The driver implements the operations that differ: calls, pauses, a lock,
waiting, and the worker that sends. With the driver `Blocking` a coroutine never suspends, so `block_on` can run it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, Protocol, TypeVar

from gristmill._client.connection.channels import AsyncChannels, Channels, Replicas
from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.interruptions import left_s, without_limit
from gristmill.errors import UnavailableError

_log = logging.getLogger("gristmill")

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, None]]
Join = Callable[[], Awaitable[None]]


class Signal(Protocol):
    """Wakes waiting callers after a change of state. Acquire the driver's lock to wait and to notify."""

    async def wait(self, seconds: float | None) -> None:
        """Returns after `notify_all` or after the seconds; it may also return early."""

    def notify_all(self) -> None: ...


class Driver(Protocol):
    """The operations that differ between threads and tasks."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards shared state. Released during calls."""

    def channels(self, address: str, credentials: Credentials) -> Replicas: ...

    def signal(self) -> Signal: ...

    @property
    def can_start(self) -> bool:
        """Whether `start` may be called here: tasks can only be started in their event loop."""

    def start(self, work: Work, name: str) -> Join:
        """Starts a worker. Returns a function that waits for its end."""

    async def call(self, method: Callable[..., Any], *request: Any, **options: Any) -> Any: ...

    def collecting(self, stream: Callable[..., Any]) -> Callable[..., Any]:
        """Converts a method that streams messages to a method that returns a list of them."""

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work that an error requires. After an interruption (`interruptions`), raises UnavailableError when the
        time for it is over."""

    async def wait_for_clean_ups(self) -> None:
        """Returns when the work that continues in the background has ended, or when the time for it is over."""

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function that blocks. The event loop, if there is one, continues."""

    async def pause(self, seconds: float, closed: threading.Event) -> None: ...


def block_on(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a coroutine of a blocking client suspended; its driver must block instead")


class Blocking:
    """For threads. Thread-safe."""

    channels = Channels

    def __init__(self) -> None:
        # Acquire the lock directly, not through a condition: Ctrl-C in Condition.__enter__ would leave it locked.
        self.lock = threading.Lock()

    def signal(self) -> Signal:
        return _ThreadSignal(self.lock)

    can_start = True

    def start(self, work: Work, name: str) -> Join:
        thread = threading.Thread(target=lambda: block_on(work()), name=name, daemon=True)
        thread.start()

        async def join() -> None:
            thread.join()

        return join

    async def call(self, method: Callable[..., Any], *request: Any, **options: Any) -> Any:
        return method(*request, **options)

    def collecting(self, stream: Callable[..., Iterator[Any]]) -> Callable[..., list[Any]]:
        return lambda request, timeout: list(stream(request, timeout=timeout))

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> None:
        await work

    async def wait_for_clean_ups(self) -> None:
        pass

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def pause(self, seconds: float, closed: threading.Event) -> None:
        closed.wait(seconds)


class _ThreadSignal:
    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)
        self.notify_all = self._condition.notify_all

    async def wait(self, seconds: float | None) -> None:
        self._condition.wait(seconds)


class Awaited:
    """For the tasks of one event loop. They need no lock, because a task is not interrupted between two awaits."""

    channels = AsyncChannels

    def __init__(self) -> None:
        self.lock = nullcontext()
        self._clean_ups: set[asyncio.Task[Any]] = set()

    def signal(self) -> Signal:
        return _TaskSignal()

    @property
    def can_start(self) -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    def start(self, work: Work, name: str) -> Join:
        task = asyncio.create_task(work(), name=name)

        async def join() -> None:
            # An interrupted client disconnects first, which cancels the worker's call.
            await asyncio.wait((task,))

        return join

    async def call(self, method: Callable[..., Awaitable[Any]], *request: Any, **options: Any) -> Any:
        return await method(*request, **options)

    def collecting(self, stream: Callable[..., AsyncIterator[Any]]) -> Callable[..., Awaitable[list[Any]]]:
        async def collect(request: Any, timeout: float) -> list[Any]:
            return [message async for message in stream(request, timeout=timeout)]

        return collect

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> None:
        if (left := left_s()) == inf:
            await work
            return
        # The task may be cancelled because of its own time limit. The loop, and this work, then continue.
        task = asyncio.create_task(work, context=without_limit())
        self._clean_ups.add(task)
        task.add_done_callback(self._cleaned_up)
        await asyncio.wait((task,), timeout=max(0.0, left))
        if not task.done():
            raise UnavailableError("the service did not answer yet, and is called again until the client is closed")
        task.result()

    def _cleaned_up(self, task: asyncio.Task[Any]) -> None:
        self._clean_ups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("cleaning up after a cancelled task failed: %s", error)

    async def wait_for_clean_ups(self) -> None:
        if self._clean_ups:
            left = left_s()
            await asyncio.wait(self._clean_ups, timeout=None if left == inf else max(0.0, left))

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, *args)

    async def pause(self, seconds: float, closed: threading.Event) -> None:
        await asyncio.sleep(seconds)


class _TaskSignal:
    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self, seconds: float | None) -> None:
        notified = asyncio.get_running_loop().create_future()
        self._waiting.append(notified)
        if seconds is None:
            # `asyncio.wait` takes ten times as long, and thousands of tasks may wait.
            await notified
        else:
            await asyncio.wait((notified,), timeout=seconds)

    def notify_all(self) -> None:
        for notified in self._waiting:
            if not notified.done():
                notified.set_result(None)
        self._waiting.clear()
