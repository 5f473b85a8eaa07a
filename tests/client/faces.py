"""Both rollout clients with the same calls, so that a test runs on either: the asyncio one in a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gristmill import AsyncRolloutClient, AsyncTrajectory, RolloutClient

FACES = ["blocking", "awaited"]

Connect = Callable[..., Any]


@contextmanager
def connecting(face: str) -> Iterator[Connect]:
    """Makes clients with `RolloutClient`'s arguments and calls. Who makes one closes it."""
    if face == "blocking":
        yield RolloutClient
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda *args, **options: AwaitedClient(loop, AsyncRolloutClient(*args, **options))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Awaited:
    """Runs the coroutines of another object in a loop, and gives their results."""

    def __init__(self, loop: asyncio.AbstractEventLoop, awaited: Any) -> None:
        self._loop, self.awaited = loop, awaited

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.awaited, name)
        return self._blocking(member) if asyncio.iscoroutinefunction(member) else member

    def _blocking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(method(*args, **options), self._loop).result()

        return call

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocking(self.awaited.__aexit__)(*error)


class AwaitedClient(Awaited):
    def trajectory(self, *args: Any, **options: Any) -> Awaited:
        async def make() -> AsyncTrajectory:
            trajectory: AsyncTrajectory = self.awaited.trajectory(*args, **options)
            return trajectory

        return Awaited(self._loop, asyncio.run_coroutine_threadsafe(make(), self._loop).result())
