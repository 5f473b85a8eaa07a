"""The interface of a run's monitor, which counts events and calls for metrics and history, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gristmill._wire.steps import Steps
from gristmill_service.config import Model
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State


class RunMonitor(Protocol):
    """The monitor of one run. Its methods must not raise. The run's writer calls the methods that have a `state`, one
    at a time; any thread may call the others."""

    def applied(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        """Called after an event was applied. released: the number of rows that nothing refers to any more. tokens:
        counts the tokens of these rows; call it during this call or never."""

    def changed(self, state: State, room: Room) -> None:
        """Called after all events of a decision were applied. room: the capacity for new groups."""

    def asked_for_groups(self, found_room: bool) -> None:
        """Called when a worker requests to begin groups."""

    def asked_for_shard(self, state: State, model: Model, rank: int) -> None:
        """Called when a rank requests a shard."""

    def gave_shard(self, model: Model, rank: int, nbytes: int) -> None:
        """Called when a rank received the location of a published shard of `nbytes` bytes."""

    def received(self, outcomes: Sequence[Outcome], steps: Steps) -> None:
        """Called with the rows of a request and their outcomes."""

    def refused(self, rows: int) -> None:
        """Called with the number of rows that were refused alone because they broke a rule for single rows."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Returns a context that measures its block as a stage of building a batch."""

    def building(self, batch: int) -> None:
        """Called when building a batch begins."""

    def built(self, batch: int, stats: Callable[[], Figures]) -> Figures | None:
        """Called before a batch is published for the first time. Returns the figures to store in the log; None if they
        cannot be computed."""
