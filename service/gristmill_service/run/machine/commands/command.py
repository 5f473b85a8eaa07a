"""A command to a run: reads the run, says what happens, and answers. Pure: the run's writer applies and logs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from gristmill_service.access.held import Quota
from gristmill_service.config import RunConfig
from gristmill_service.run.machine.decisions.admission import BytesLeft, Room
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State

T = TypeVar("T")

FindQuota = Callable[[], Quota]
"""Says what the runs of a caller hold now, and may."""


class View(Protocol):
    """The run as a command sees it."""

    @property
    def state(self) -> State: ...

    @property
    def config(self) -> RunConfig:
        """As it holds now: a trainer may have come back with another dp_size."""

    def room(self) -> Room:
        """Groups that may be admitted now."""

    def bytes_left(self) -> BytesLeft:
        """Bytes that rows of groups which are admitted may still take."""

    def quota(self) -> Quota | None:
        """What the run may hold whatever there is room for, where that is limited."""

    def now(self) -> float:
        """The run's own time, in seconds."""


class Command(Generic[T]):
    """
    is_internal: a background task's result, which a run takes also while the service shuts down.
    follows: whether `follow` has anything to say.
    """

    is_internal = False
    follows = False

    def decide(self, view: View) -> Sequence[Event]:
        """Returns the events that the command leads to. Raises the refusal. Changes nothing."""
        return ()

    def follow(self, state: State) -> Sequence[Event]:
        """Returns further events that are due once the first ones are applied."""
        return ()

    def answer(self, state: State) -> T:
        """Returns the answer, once the events and all that follows from them are applied. Called once."""
        raise NotImplementedError
