"""Loads values before they are requested, in a thread that runs only while there are values to load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Load = Callable[[K, Callable[[], bool]], V | None]


class _Ticket(Generic[V]):
    """A value that will be requested."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_wanted = True
        self.is_done = threading.Event()
        self.value: V | None = None
        self.error: Exception | None = None


class Prefetch(Generic[K, V]):
    """Loads at most `ahead` values in the background and stores them until they are taken. Thread-safe.

    load(key, is_wanted): returns the value of the key, or None if it cannot be loaded ahead, which is not an error. It
        must stop waiting when `is_wanted()` becomes False.
    """

    def __init__(self, load: Load[K, V], ahead: int) -> None:
        self._load, self._ahead = load, ahead
        self._lock = threading.Lock()
        self._tickets: dict[K, _Ticket[V]] = {}
        self._thread: threading.Thread | None = None
        self._is_loading = False

    def expect(self, keys: Iterable[K]) -> None:
        """Load the values that will be taken next, in this order. Drop all other values that were loaded."""
        with self._lock:
            earlier, self._tickets = self._tickets, {}
            for key in islice(keys, self._ahead):
                self._tickets[key] = earlier.get(key) or _Ticket()
            for key, ticket in earlier.items():
                ticket.is_wanted = key in self._tickets
            if not self._is_loading and self._waiting():
                self._is_loading = True
                self._thread = threading.Thread(target=self._work, name="gristmill-prefetch", daemon=True)
                self._thread.start()

    def take(self, key: K) -> V | None:
        """Return the value that was loaded ahead, and wait while it is loading; None if it was not loaded. Raises the
        error of loading, once."""
        with self._lock:
            ticket = self._tickets.pop(key, None)
            if ticket is None or not ticket.has_begun:
                return None
        ticket.is_done.wait()
        if ticket.error is not None:
            raise ticket.error
        return ticket.value

    def close(self) -> None:
        """Drop all values, and wait for the thread to end. The caller must end the thread's current load first."""
        self.expect(())
        if self._thread is not None:
            self._thread.join()

    def _waiting(self) -> list[K]:
        return [key for key, ticket in self._tickets.items() if not ticket.has_begun]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not (waiting := self._waiting()):
                    self._is_loading = False
                    return
                ticket = self._tickets[waiting[0]]
                ticket.has_begun = True
            self._fill(waiting[0], ticket)
            # This thread must not keep a reference to the value after it was taken.
            del ticket

    def _fill(self, key: K, ticket: _Ticket[V]) -> None:
        try:
            ticket.value = self._load(key, lambda: ticket.is_wanted)
        except Exception as error:  # noqa: BLE001  `take` raises it
            ticket.error = error
        ticket.is_done.set()
