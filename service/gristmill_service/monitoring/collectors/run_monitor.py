"""A run's monitor: forwards the run's events to its metrics and its history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog

from gristmill._wire.steps import Steps
from gristmill_service.config import Model
from gristmill_service.monitoring.collectors.run_history import RunHistory
from gristmill_service.monitoring.collectors.run_metrics import RunMetrics
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State

if TYPE_CHECKING:
    from gristmill_service.run.run import Run

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def _never_raises(method: Callable[P, R]) -> Callable[P, R | None]:
    """Makes a method log errors and return None, so that a run continues if its monitoring fails."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the event has happened, counted or not
            _log.exception("monitor callback failed", call=method.__name__)
            return None

    return guarded


class Monitor:
    """See `gristmill_service.run.monitor.RunMonitor`.

    clock: returns seconds, like `time.monotonic`. now: returns the run's time, in which groups are admitted; not called
    before the first event.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self.metrics = RunMetrics(clock, now)
        self.history = RunHistory(clock, now)

    @_never_raises
    def applied(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        # Metrics and history are updated separately, so that an error in one does not affect the other.
        try:
            self.metrics.applied(event, state, released, tokens)
        finally:
            self.history.applied(event, state)

    @_never_raises
    def changed(self, state: State, room: Room) -> None:
        self.history.changed(state, room)

    @_never_raises
    def asked_for_groups(self, found_room: bool) -> None:
        self.metrics.asked_for_groups(found_room)

    @_never_raises
    def asked_for_shard(self, state: State, model: Model, rank: int) -> None:
        self.history.pulling.add(model)
        self.metrics.asked_for_shard(state, model, rank)

    @_never_raises
    def gave_shard(self, model: Model, rank: int, nbytes: int) -> None:
        self.metrics.gave_shard(model, rank, nbytes)
        self.history.gave_shard(model, rank)

    @_never_raises
    def received(self, outcomes: Sequence[Outcome], steps: Steps) -> None:
        self.metrics.received(outcomes, steps)

    @_never_raises
    def refused(self, rows: int) -> None:
        self.metrics.refused(rows)

    def timed(self, stage: str) -> AbstractContextManager[None]:
        return self.metrics.timed(stage)

    @_never_raises
    def building(self, batch: int) -> None:
        self.metrics.building(batch)

    @_never_raises
    def built(self, batch: int, stats: Callable[[], Figures]) -> Figures:
        # Counting a large batch takes a while.
        return self.metrics.built(batch, stats(), self.history.now())


def monitor_of(run: Run) -> Monitor:
    """Returns the run's monitor. Raises TypeError if it is of another class."""
    if not isinstance(run.monitor, Monitor):
        raise TypeError(f"run {run.name!r} has a {type(run.monitor).__name__}; make Runs with Monitor")
    return run.monitor
