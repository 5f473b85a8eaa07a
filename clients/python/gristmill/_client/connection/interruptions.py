"""Bounds what a client does after Ctrl-C, or after its task was cancelled, while the service is unreachable."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from math import inf

TIME_S = 1.0
"""The time for aborting trajectories and delivering rows after an interruption."""

# Many trajectories end one after another: after one of them has used up the time, the others get none.
_MEMORY_S = 2.0

_until: ContextVar[float] = ContextVar("gristmill_interrupted_until", default=inf)


def left_s() -> float:
    """Returns the seconds that this thread or task may still wait; infinite unless it was interrupted."""
    return _until.get() - time.monotonic()


def without_limit() -> Context:
    """Returns a copy of the current context in which waits are not limited."""
    context = copy_context()
    context.run(_until.set, inf)
    return context


class Interruptions:
    """The interruptions of one client."""

    def __init__(self) -> None:
        self._used_up = -inf

    @contextmanager
    def limiting(self, error: BaseException | None = None) -> Iterator[None]:
        """Limits the waits within the block to `TIME_S` if the error, by default the exception that is being handled,
        is an interruption."""
        if not is_interruption(error or sys.exc_info()[1]):
            yield
            return
        now = time.monotonic()
        until = now if now - self._used_up < _MEMORY_S else now + TIME_S
        token = _until.set(until)
        try:
            yield
        finally:
            _until.reset(token)
            if (now := time.monotonic()) >= until:
                self._used_up = now


def is_interruption(error: BaseException | None) -> bool:
    return isinstance(error, (KeyboardInterrupt, asyncio.CancelledError))
