"""Two ways to run one client: its calls block their thread, or they are awaited in an event loop.

The core of a client is written once, as coroutines that take from their driver all that differs: calls, pauses, a lock,
who waits for whom, and the worker that sends. Driven by `Blocking` such a coroutine never suspends, so that `block_on`
runs it to its end in one go.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from gristmill._client.connection.channels import AsyncChannels, Channels, Replicas
from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.sigint import DeferSigint

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, None]]
Join = Callable[[], Awaitable[None]]


class Signal(Protocol):
    """Wakes those who wait for a change. To wait and to notify, hold the driver's lock."""

    async def wait(self, seconds: float | None) -> None:
        """Returns after `notify_all`, after the seconds, or early."""

    def notify_all(self) -> None: ...


class Driver(Protocol):
    """All of a client that differs between threads and tasks."""

    @property
    def waiters_send(self) -> bool:
        """Whether who waits for rows sends them itself. A thread does, as no other has to wake up for it then. A task
        does not: it may be cancelled, and would take the rows of others along."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while state is read or changed that several share, never during a call."""

    def channels(self, address: str, credentials: Credentials) -> Replicas: ...

    def signal(self) -> Signal: ...

    def start(self, work: Work) -> Join:
        """Starts the worker; what is returned waits for its end."""

    def uninterrupted(self) -> AbstractContextManager[Any]:
        """Ctrl-C within the block is raised at its end."""

    async def call(self, method: Callable[..., Any], *request: Any, **options: Any) -> Any: ...

    def collecting(self, stream: Callable[..., Any]) -> Callable[..., Any]:
        """The method of a stream as one that gives all of its messages at once."""

    async def pause(self, seconds: float, closed: threading.Event) -> None: ...


def block_on(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a blocking client awaits what does not block")


class Blocking:
    """Thread-safe."""

    waiters_send = True
    channels = Channels
    uninterrupted = DeferSigint

    def __init__(self) -> None:
        # Taken itself, never through a condition: there, Ctrl-C may come when it is taken and nobody gives it back.
        self.lock = threading.Lock()

    def signal(self) -> Signal:
        return _ThreadSignal(self.lock)

    def start(self, work: Work) -> Join:
        thread = threading.Thread(target=lambda: block_on(work()), name="gristmill-sender", daemon=True)
        thread.start()

        async def join() -> None:
            thread.join()

        return join

    async def call(self, method: Callable[..., Any], *request: Any, **options: Any) -> Any:
        return method(*request, **options)

    def collecting(self, stream: Callable[..., Iterator[Any]]) -> Callable[..., list[Any]]:
        return lambda request, timeout: list(stream(request, timeout=timeout))

    async def pause(self, seconds: float, closed: threading.Event) -> None:
        closed.wait(seconds)


class _ThreadSignal:
    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)
        self.notify_all = self._condition.notify_all

    async def wait(self, seconds: float | None) -> None:
        self._condition.wait(seconds)


class Awaited:
    """For one event loop, that of the calls. Its tasks need no lock: none is interrupted between two awaits."""

    waiters_send = False
    channels = AsyncChannels
    uninterrupted = nullcontext

    def __init__(self) -> None:
        self.lock = nullcontext()

    def signal(self) -> Signal:
        return _TaskSignal()

    def start(self, work: Work) -> Join:
        task = asyncio.create_task(work(), name="gristmill-sender")

        async def join() -> None:
            await task

        return join

    async def call(self, method: Callable[..., Awaitable[Any]], *request: Any, **options: Any) -> Any:
        return await method(*request, **options)

    def collecting(self, stream: Callable[..., AsyncIterator[Any]]) -> Callable[..., Awaitable[list[Any]]]:
        async def collect(request: Any, timeout: float) -> list[Any]:
            return [message async for message in stream(request, timeout=timeout)]

        return collect

    async def pause(self, seconds: float, closed: threading.Event) -> None:
        await asyncio.sleep(seconds)


class _TaskSignal:
    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self, seconds: float | None) -> None:
        notified = asyncio.get_running_loop().create_future()
        self._waiting.append(notified)
        await asyncio.wait((notified,), timeout=seconds)

    def notify_all(self) -> None:
        for notified in self._waiting:
            if not notified.done():
                notified.set_result(None)
        self._waiting.clear()
