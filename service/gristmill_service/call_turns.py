"""Whose call is answered next: of those who wait, who has had the least of the threads' time.

It is start-time fair queueing (Goyal, Vin and Cheng 1996), but that a call's cost is known only afterwards. So a caller
whose calls are costly gets fewer of them answered, and one who comes after a pause is not owed for it.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST_BEHIND_S = 0.05
"""By how much a long call may put its caller behind the others, as a stream that took seconds in an hour."""
_MOST_CALLERS = 4096


class CallTurns(Generic[T]):
    """Not thread-safe. T: whatever stands for a call."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}
        # Seconds that each has had, as if nobody had ever paused; `_now` is that of who came last.
        self._had: dict[str, float] = {}
        self._now = 0.0
        # Who has calls, by what each had when it was put here: since then it may have had more.
        self._order: list[tuple[float, int, str]] = []
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, caller: str, call: T) -> None:
        queue = self._queues.get(caller)
        if queue is None:
            queue = self._queues[caller] = deque()
            had = self._had[caller] = max(self._had.get(caller, 0.0), self._now)
            heappush(self._order, (had, next(self._numbers), caller))
        queue.append(call)

    def first(self) -> T:
        """The first call of the caller whose turn it is, which stays here. There must be one."""
        had, _, caller = self._order[0]
        while had < self._had[caller]:
            heapreplace(self._order, (self._had[caller], next(self._numbers), caller))
            had, _, caller = self._order[0]
        return self._queues[caller][0]

    def take(self) -> tuple[str, T]:
        """The same with its caller, and it is here no more."""
        self.first()
        had, _, caller = self._order[0]
        self._now = max(self._now, had)
        queue = self._queues[caller]
        call = queue.popleft()
        if queue:
            # Behind others who have had as much.
            heapreplace(self._order, (had, next(self._numbers), caller))
        else:
            heappop(self._order)
            del self._queues[caller]
        return caller, call

    def charge(self, caller: str, seconds: float) -> None:
        """The caller's call has taken so much time."""
        had = max(self._had.get(caller, 0.0), self._now)
        self._had[caller] = max(had, min(had + seconds, self._now + _MOST_BEHIND_S))
        if len(self._had) > _MOST_CALLERS:
            self._forget()

    def _forget(self) -> None:
        """Forgets half of the callers without calls: those that have had the least time, and so lose nothing by it."""
        had = sorted((had, caller) for caller, had in self._had.items() if caller not in self._queues)
        for _, caller in had[: len(had) // 2]:
            del self._had[caller]
