"""What callers owe the service for calls that it refused: it did their work for nothing, while others waited.

A caller whose refused calls take more than a two-hundredth of the service's time is not read until it has made up for
them: first it waits, then it is refused unread. Whoever is refused now and then notices nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gristmill.errors import ResourceExhaustedError

_SHARE = 1 / 200
_FREE_S, _MOST_S = 0.25, 0.5
"""Seconds of the service's time that are owed before a caller waits, and that it can owe at most."""
_CALL_S, _BYTE_S = 0.5e-3, 1.2e-9
"""What a call takes, and each byte of it: one of 12 MiB stops all of Python for 13 ms while gRPC copies it."""
_SMALL_BYTES = 64 << 10
_MOST_CALLERS = 4096
_LONGEST_WAIT_S, _MOST_WAITING = 5.0, 48
"""Each that waits has a thread or a connection."""

_WRONG = frozenset(["INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"])
_NOT_THE_CALLERS = frozenset(["INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])


def cost_s(code: str, nbytes: int) -> float:
    """Seconds that are owed for a call which was refused with this status. What happens to good callers too, as where
    there is no room, costs nothing as long as it is small."""
    if code in _NOT_THE_CALLERS:
        return 0.0
    large = max(0, nbytes - _SMALL_BYTES) * _BYTE_S
    return _CALL_S + large if code in _WRONG else large


class Debts:
    """Thread-safe. Callers are told apart by whatever text names them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._paid_at: dict[str, float] = {}
        self._all_free_at, self._waiting = 0.0, 0

    def charge(self, caller: str, code: str, nbytes: int) -> None:
        """Notes that a call of so many bytes was refused with this status."""
        if not (cost := cost_s(code, nbytes)):
            return
        now = self._clock()
        with self._lock:
            paid_at = max(now, self._paid_at.pop(caller, now)) + cost / _SHARE
            self._paid_at[caller] = paid_at = min(paid_at, now + _MOST_S / _SHARE)
            self._all_free_at = max(self._all_free_at, paid_at - _FREE_S / _SHARE)
            if len(self._paid_at) > _MOST_CALLERS:
                self._forget(now)

    def wait_s(self, caller: str) -> float:
        """How long the caller has to wait yet; 0 for most."""
        return max(0.0, self._paid_at.get(caller, 0.0) - self._clock() - _FREE_S / _SHARE)

    @property
    def any_owe(self) -> bool:
        """Whether there is anybody who has to wait."""
        return self._clock() < self._all_free_at

    @contextmanager
    def waiting(self, caller: str) -> Iterator[float]:
        """Gives how long to wait now: some seconds at most, and nothing where many wait."""
        wait_s = self.wait_s(caller)
        with self._lock:
            if not wait_s or self._waiting >= _MOST_WAITING:
                wait_s = 0.0
            self._waiting += bool(wait_s)
        try:
            yield min(wait_s, _LONGEST_WAIT_S)
        finally:
            with self._lock:
                self._waiting -= bool(wait_s)

    def check(self, caller: str) -> None:
        """Raises ResourceExhaustedError where the caller has to wait, which says for how long."""
        if wait_s := self.wait_s(caller):
            raise ResourceExhaustedError(
                "too many calls of this caller were refused lately, so the service did not read this one; see why "
                f"they were refused, and retry in {wait_s:.0f} s",
                retry_after_s=max(1.0, wait_s),
            )

    def _forget(self, now: float) -> None:
        """Forgets who has paid; where nobody has, who will have paid soonest."""
        owed = sorted((paid_at, caller) for caller, paid_at in self._paid_at.items() if paid_at > now)
        self._paid_at = {caller: paid_at for paid_at, caller in owed[-_MOST_CALLERS // 2 :]}
