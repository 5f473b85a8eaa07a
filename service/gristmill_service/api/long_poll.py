"""Calls that wait for a run to change. A wait is a coroutine, which is cancelled when its caller disconnects.

A waiting call sleeps until its run wakes it, then reads again. If another caller was faster and there is nothing to
return, it continues to wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.api.admission import Slot
from gristmill_service.run.waiters import Condition

T = TypeVar("T")
Wake = Callable[[], None]

LONGEST_WAIT_S = 30.0


class Waitable(Protocol):
    """The interface of a run that wakes waiting calls."""

    def wait(self, condition: Condition, wake: Wake) -> None: ...

    def stop_waiting(self, condition: Condition, wake: Wake) -> None: ...


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A call that may wait. `read` is called again each time the run meets the condition, until the answer is settled.

    condition: returns what to wait for, according to the last `read`.
    """

    run: Waitable
    condition: Callable[[], Condition]
    read: Callable[[], Awaitable[T]]
    is_settled: Callable[[T], bool]


class LongPoll:
    """The waiting calls."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._is_closed = False

    @property
    def count(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Ends all waits: returns settled answers, and raises UnavailableError in other calls."""
        self._is_closed = True
        for woken in self._waiting:
            _wake(woken)

    async def ask(self, question: Question[T], wait_s: float, slot: Slot) -> T:
        """Returns the answer when it is settled, or the unsettled answer when the wait ends."""
        answer = await self._ask(question, checked_wait(wait_s), slot)
        if self._is_closed and wait_s and not question.is_settled(answer):
            raise UnavailableError("the service is shutting down; retry after it has restarted")
        return answer

    async def _ask(self, question: Question[T], wait_s: float, slot: Slot) -> T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        answer = await question.read()
        if question.is_settled(answer) or not wait_s or not slot.wait():
            return answer
        try:
            while not question.is_settled(answer) and not self._is_closed and loop.time() < deadline:
                await self._change(question, deadline)
                answer = await question.read()
        finally:
            slot.stop_waiting()
        return answer

    async def _change(self, question: Question[T], deadline: float) -> None:
        """Returns when the run meets the condition, at the deadline, or when all waits end."""
        loop, condition = asyncio.get_running_loop(), question.condition()
        woken = loop.create_future()

        def wake() -> None:
            _wake(woken)

        self._waiting.add(woken)
        timer = loop.call_at(deadline, wake)
        try:
            question.run.wait(condition, wake)
            await woken
        finally:
            timer.cancel()
            question.run.stop_waiting(condition, wake)
            self._waiting.discard(woken)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def checked_wait(wait_s: float) -> float:
    """Returns the seconds to wait, limited to the service's maximum. Raises InvalidArgumentError."""
    if math.isnan(wait_s) or wait_s < 0:
        raise InvalidArgumentError(f"wait_s {wait_s} is not a duration; send the seconds to wait, 0 or more")
    return min(wait_s, LONGEST_WAIT_S)
