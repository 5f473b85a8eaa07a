"""Work that takes long and much memory, done in the pool one piece after another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class OneByOne:
    """Calls functions in the pool, each when the one before has returned, also where its caller has gone meanwhile."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        await self._lock.acquire()
        work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        work.add_done_callback(self._end)
        return await asyncio.shield(work)

    def _end(self, work: asyncio.Future[T]) -> None:
        self._lock.release()
        if not work.cancelled():
            # Else asyncio logs an error for whose caller has gone.
            work.exception()
