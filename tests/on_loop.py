"""Services and runs for tests that block: all of a test process live on one event loop, in a thread of its own.

gRPC's asyncio server wants one loop a process. What is asked of a proxy here happens on that loop, and the calling
thread waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from gristmill_service.api.meter import MeteredPool
from gristmill_service.run import run as run_module
from gristmill_service.run import runs as runs_module
from gristmill_service.settings import Settings

T = TypeVar("T")


_THREAD = "tests-loop"


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The loop of this process."""
    made = asyncio.new_event_loop()
    made.set_default_executor(MeteredPool())
    threading.Thread(target=made.run_forever, name=_THREAD, daemon=True).start()
    return made


def on_loop(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the function on the loop, awaits what it returns, and returns that. Proxies become what they stand for."""

    async def call() -> Any:
        value = function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        return await value if isinstance(value, Awaitable) else value

    if threading.current_thread().name == _THREAD:
        # A proxy that is asked on the loop itself: only what needs not be awaited.
        return function(*map(_plain, args), **kwargs)
    return asyncio.run_coroutine_threadsafe(call(), loop()).result()


class Proxy:
    """An object on the loop. Its methods block until they are done."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        attribute = on_loop(getattr, self._target, name)
        if not callable(attribute):
            return _wrapped(attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _wrapped(on_loop(attribute, *args, **kwargs))

        return call


class Run(Proxy):
    """See `gristmill_service.run.run.Run`."""


class Runs(Proxy):
    """See `gristmill_service.run.runs.Runs`. Its timers run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(on_loop(runs_module.Runs, *args, **kwargs))
        on_loop(self._target.start)


class Service:
    """See `gristmill_service.service.Service`."""

    def __init__(self, settings: Settings) -> None:
        # Only tests that serve need what serving needs.
        from gristmill_service.service import Service as Target

        self._target = on_loop(Target, settings)

    def start(self) -> None:
        on_loop(self._target.start)

    def stop(self) -> None:
        on_loop(self._target.stop)

    @property
    def runs(self) -> Any:
        return _wrapped(self._target.runs)

    @property
    def grpc_address(self) -> str:
        return str(self._target.grpc_address)

    @property
    def http_url(self) -> str:
        return str(self._target.http_url)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


# By the id of what they stand for, which lives as long as they do.
_proxies: WeakValueDictionary[int, Proxy] = WeakValueDictionary()


def _plain(value: Any) -> Any:
    return value._target if isinstance(value, Proxy) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_wrapped(one) for one in value]
    if isinstance(value, AsyncIterator):
        return _iterated(value)
    if isinstance(value, run_module.Run):
        return _proxies.setdefault(id(value), Run(value))
    if isinstance(value, runs_module.Runs):
        return _proxies.setdefault(id(value), Proxy(value))
    return value


def _iterated(values: AsyncIterator[T]) -> Iterator[T]:
    while True:
        try:
            yield on_loop(values.__anext__)
        except StopAsyncIteration:
            return
