"""Who wants to know when a run changes. Callbacks only wake: they read the run again by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

Callback = Callable[[], None]

_log = structlog.get_logger(__name__)


class Changes:
    """Thread-safe. Callbacks are called from whichever thread made the change, after it, with no lock held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: tuple[Callback, ...] = ()

    def subscribe(self, callback: Callback) -> None:
        """Calls back after every change from now on. Read the run after this, not before, to miss nothing."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)

    def unsubscribe(self, callback: Callback) -> None:
        with self._lock:
            self._callbacks = tuple(kept for kept in self._callbacks if kept != callback)

    def notify(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - it is logged, and is not this thread's
                # Whoever changed the run is not to blame for who listens to it, and the others want to hear, too.
                _log.exception("a callback of a run's changes failed")
