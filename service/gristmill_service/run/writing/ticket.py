"""A command on its way through a run's writer."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from gristmill_service.run.machine.commands.command import Command
from gristmill_service.run.machine.events import Event

T = TypeVar("T")


class Ticket(Generic[T]):
    """signal: gives True to the thread that is to be the writer, False to one whose command is done. Its put and get
    are C, where an Event's are dozens of lines of Python."""

    __slots__ = ("command", "error", "events", "signal", "value")

    def __init__(self, command: Command[T]) -> None:
        self.command = command
        self.signal: SimpleQueue[bool] = SimpleQueue()
        self.events: Sequence[Event] = ()
        self.error: Exception | None = None
        self.value: Any = None

    def result(self) -> T:
        """The answer. Raises the command's refusal."""
        if self.error is None:
            answer: T = self.value
            return answer
        error, self.error = self.error, None
        try:
            raise error
        finally:
            # The error's traceback holds this frame: without this, the two would hold each other.
            del error
