"""Places that callers share: requests that are read, streams that are open. Nobody's are used up by another caller."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gristmill.errors import ResourceExhaustedError
from gristmill_service.call_threads import waiting


@dataclass(slots=True, eq=False)
class Place:
    """caller: whose it is. end: ends what the place is for, which then gives it back. idle_since: since when its caller
    has had it and sent nothing; None while the service is at work for it."""

    caller: str
    end: Callable[[], object]
    idle_since: float | None
    granted: threading.Event = field(default_factory=threading.Event)


class Places:
    """Thread-safe.

    Where all are taken, one that is idle for longer than `patience_s` is ended for whoever needs a place. Who waits for
    one gets it before others who have more, and callers who have as many take turns. share: how many of the places one
    caller may have. takes_back: whether the longest idle one of the caller who has the most is ended for a caller who
    has fewer.
    """

    def __init__(
        self,
        limit: int,
        refusal: str,
        patience_s: float,
        *,
        share: float = 1.0,
        takes_back: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._refusal, self._patience_s = limit, refusal, patience_s
        self._most = max(1, int(share * limit))
        self._takes_back, self.clock = takes_back, clock
        self._lock = threading.Lock()
        self._taken: dict[Place, None] = {}
        self._waiting: dict[str, deque[Place]] = {}

    @contextmanager
    def place(self, caller: str, end: Callable[[], object], wait_s: float = 0.0) -> Iterator[Place]:
        """Raises ResourceExhaustedError where none comes free in this time."""
        place = Place(caller, end, self.clock())
        self._take(place, wait_s)
        try:
            yield place
        finally:
            self._give_back(place)

    def _take(self, place: Place, wait_s: float) -> None:
        with self._lock:
            ended = None
            is_free = len(self._taken) < self._limit and not self._waiting and self._has_few(place.caller)
            if not is_free and (ended := self._to_end(place.caller)):
                del self._taken[ended]
            if is_free or ended:
                self._taken[place] = None
            elif wait_s:
                self._waiting.setdefault(place.caller, deque()).append(place)
            else:
                raise ResourceExhaustedError(self._refusal)
        if ended:
            ended.end()
        elif not is_free:
            with waiting():
                is_granted = place.granted.wait(wait_s)
            if not is_granted and not self._stop_waiting(place):
                raise ResourceExhaustedError(self._refusal)

    def _has_few(self, caller: str) -> bool:
        return self._most == self._limit or sum(one.caller == caller for one in self._taken) < self._most

    def _stop_waiting(self, place: Place) -> bool:
        """Whether the place was granted in the last moment."""
        with self._lock:
            if place in self._taken:
                return True
            waiting = self._waiting[place.caller]
            waiting.remove(place)
            if not waiting:
                del self._waiting[place.caller]
            return False

    def _give_back(self, place: Place) -> None:
        with self._lock:
            if place not in self._taken:
                # It was ended for somebody else, who has it.
                return
            del self._taken[place]
            if not self._waiting:
                return
            counts = Counter(taken.caller for taken in self._taken)
            caller = min(self._waiting, key=lambda waiting: counts[waiting])
            waiting = self._waiting[caller]
            following = waiting.popleft()
            del self._waiting[caller]
            if waiting:
                # Behind the others.
                self._waiting[caller] = waiting
            following.idle_since = self.clock()
            self._taken[following] = None
        following.granted.set()

    def _to_end(self, caller: str) -> Place | None:
        """The place that is ended so that the caller gets one."""
        idle = [(place.idle_since, place) for place in self._taken if place.idle_since is not None]
        if not idle:
            return None
        since, longest = min(idle, key=lambda found: found[0])
        if self.clock() - since >= self._patience_s:
            return longest
        counts = Counter(place.caller for place in self._taken)
        if not self._takes_back or max(counts.values()) <= counts[caller] + 1:
            return None
        return min(idle, key=lambda found: (-counts[found[1].caller], found[0]))[1]
