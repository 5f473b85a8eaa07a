"""A run's ordered log of events. What is appended has happened: the fold of the log is the run's state."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from gristmill_service.run.events import Event


class Log(Protocol):
    def append(self, event: Event) -> None:
        """Returns when the event is as safe as the log makes it. Called in order, by one thread at a time."""


class MemoryLog:
    """Keeps the latest events only: nothing in memory outlives the process, so nothing is ever replayed from it."""

    def __init__(self, keep: int = 1000) -> None:
        self.events: deque[Event] = deque(maxlen=keep)

    def append(self, event: Event) -> None:
        self.events.append(event)
