"""The monitor of a run: metrics and history are notified of what happens, and decide nothing."""

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
    """The monitor of one run. Its methods must not raise. Calls with a state come one at a time, from the run's writer;
    the others come from any thread."""

    def applied(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        """An event happened, and the state has it. released: how many rows nothing refers to any more; tokens: counts
        theirs, to be called at once or never."""

    def changed(self, state: State, room: Room) -> None:
        """All that was decided together has been applied. room: what may be admitted now."""

    def asked_for_groups(self, found_room: bool) -> None:
        """A worker asked to begin groups."""

    def asked_for_shard(self, state: State, model: Model, rank: int) -> None:
        """A rank asked for its next shard, or for another."""

    def gave_shard(self, model: Model, rank: int, nbytes: int) -> None:
        """A rank was given the location of a published shard of n bytes."""

    def received(self, outcomes: Sequence[Outcome], steps: Steps) -> None:
        """A request's rows, by what became of them."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Measures what it is around as a stage of building a batch."""

    def building(self, batch: int) -> None:
        """The building of the batch begins."""

    def built(self, batch: int, stats: Callable[[], Figures]) -> Figures | None:
        """The batch will be published for the first time, with these figures. Returns the figures that the log keeps;
        None where they cannot be computed."""
