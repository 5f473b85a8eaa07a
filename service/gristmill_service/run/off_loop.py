"""Work that leaves the event loop: how it is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Awaits work that must not be left half done where the caller goes away."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await asyncio.wait([task])
        raise


async def each(pieces: Iterator[T]) -> AsyncIterator[T]:
    """Yields what a blocking iterator gives, each read in a thread."""
    try:
        # An iterator that is being read cannot be closed.
        while (piece := await finished(asyncio.to_thread(next, pieces, None))) is not None:
            yield piece
    finally:
        close: Any = getattr(pieces, "close", None)
        if close is not None:
            await asyncio.to_thread(close)
