"""Shim until the history subscribes."""

from __future__ import annotations

from collections.abc import Callable

from gristmill_service.monitoring.run_metrics import RunMetrics
from gristmill_service.run.machine.admission import Room
from gristmill_service.run.machine.events import Event
from gristmill_service.run.machine.state import State


class Monitor:
    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self.metrics = RunMetrics(clock, now)
        self.received = self.metrics.received
        self.timed = self.metrics.timed
        self.building = self.metrics.started
        self.built = self.metrics.made
        self.asked_for_groups = self.metrics.asked_for_groups
        self.asked_for_shard = self.metrics.ranks.asked
        self.gave_shard = self.metrics.ranks.pulled

    def applied(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        self.metrics.note(event, state, released, tokens)

    def changed(self, state: State, room: Room) -> None:
        pass
