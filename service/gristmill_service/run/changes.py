"""Who wants to know when a run changes. Callbacks only wake: they read the run again by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable

Callback = Callable[[], None]


class Changes:
    """Thread-safe. Callbacks are called from whichever thread made the change; they are quick and do not raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: tuple[Callback, ...] = ()

    def subscribe(self, callback: Callback) -> None:
        with self._lock:
            self._callbacks = (*self._callbacks, callback)

    def unsubscribe(self, callback: Callback) -> None:
        with self._lock:
            self._callbacks = tuple(kept for kept in self._callbacks if kept != callback)

    def notify(self) -> None:
        for callback in self._callbacks:
            callback()
