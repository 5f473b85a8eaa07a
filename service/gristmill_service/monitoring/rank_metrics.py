"""A trainer's ranks for metrics: what each was given, how long it had nothing to train on, how far it is behind.

Waiting is told by the run's events, not by calls: a rank that prefetches asks long before it needs the answer. A rank
waits while it has acknowledged all that is published and more is to come, from its first question on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gristmill_service.config import Model
from gristmill_service.run.machine import progress
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.state import State


@dataclass(slots=True)
class RankCounts:
    """pulls, nbytes: shards that it was told the place of, and their bytes. waited: seconds, but for the wait that
    goes on since `waits_since`, which is None where it has something to train on."""

    pulls: int = 0
    nbytes: int = 0
    acknowledged: int = 0
    waited: float = 0.0
    waits_since: float | None = None


class RankMetrics:
    """Guarded by the run's lock, but for `pulled`, where a count may be lost between two calls of one rank."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.found: dict[tuple[Model, int], RankCounts] = {}

    def asked(self, state: State, model: Model, rank: int) -> None:
        if (model, rank) not in self.found:
            self._look_at(state, model, rank, self.found.setdefault((model, rank), RankCounts()), self._clock())

    def pulled(self, model: Model, rank: int, nbytes: int) -> None:
        found = self.found.get((model, rank))
        if found is not None:
            found.pulls += 1
            found.nbytes += nbytes

    def moved(self, state: State, model: Model, rank: int) -> None:
        """It acknowledged a shard."""
        found = self.found.setdefault((model, rank), RankCounts())
        found.acknowledged += 1
        self._look_at(state, model, rank, found, self._clock())

    def look(self, state: State) -> None:
        """All of them, after what may concern any."""
        now = self._clock()
        for model, rank in list(self.found):
            if rank >= len(state.models[model].next):
                del self.found[model, rank]
            else:
                self._look_at(state, model, rank, self.found[model, rank], now)

    def waited(self, found: RankCounts) -> float:
        return found.waited + (0.0 if found.waits_since is None else self._clock() - found.waits_since)

    def _look_at(self, state: State, model: Model, rank: int, found: RankCounts, now: float) -> None:
        waits = _waits(state, progress.next_of(state, model, rank))
        if found.waits_since is not None and not waits:
            found.waited += now - found.waits_since
            found.waits_since = None
        elif found.waits_since is None and waits:
            found.waits_since = now


def _waits(state: State, position: Position) -> bool:
    batch = state.batches.get(position.batch)
    if batch is not None:
        return not batch.is_published
    return not state.finished or bool(state.complete)


def lags(state: State, model: Model) -> list[int]:
    """Of each rank, how many shards it is behind the one that is furthest."""
    places = [progress.next_of(state, model, rank) for rank in range(len(state.models[model].next))]
    furthest, behind = max(places), dict[Position, int]()
    for place in set(places):
        behind[place] = _between(state, model, place, furthest)
    return [behind[place] for place in places]


def _between(state: State, model: Model, one: Position, other: Position) -> int:
    """Shards from one position to a later one. What lies between is held: nobody may free it."""
    sizes = {
        number: (batch.mini_batches or {}).get(model, 0)
        for number, batch in state.batches.items()
        if one.batch <= number <= other.batch
    }
    whole = sum(size * state.epochs for number, size in sizes.items() if number < other.batch)
    return whole + _within(sizes, other) - _within(sizes, one)


def _within(sizes: dict[int, int], position: Position) -> int:
    return sizes.get(position.batch, 0) * position.epoch + position.mini_batch
