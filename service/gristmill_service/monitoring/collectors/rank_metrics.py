"""A trainer's ranks for metrics: what each was given, how long it had nothing to train on, how far it is behind.

Waiting is found from the run's events, not from calls: a rank that prefetches asks long before it needs the answer. A
rank waits while it has acknowledged all that is published and more is to come, from its first question on, and while
its trainer is there: one of the model's ranks, or the controller of all of them, asks again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gristmill_service.config import Model
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.state import State

# Who was told that there is nothing yet asks again within this, or has gone away.
ASKS_AGAIN_S = 35.0


@dataclass(frozen=True, slots=True)
class RankStats:
    """pulls, nbytes: the shards that the rank was told the place of, and their bytes. waited: seconds. lag: shards
    behind the rank that is furthest."""

    model: Model
    rank: int
    pulls: int
    nbytes: int
    acknowledged: int
    waited: float
    lag: int


@dataclass(slots=True)
class _RankCounts:
    """waited: seconds without the wait that goes on since `waits_since`, which is None where the rank has something to
    train on."""

    pulls: int = 0
    nbytes: int = 0
    acknowledged: int = 0
    waited: float = 0.0
    waits_since: float | None = None


class RankMetrics:
    """Not thread-safe: the lock of the `RunMetrics` that owns it guards it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[tuple[Model, int], _RankCounts] = {}
        self._heard: dict[Model, float] = {}

    def asked(self, state: State, model: Model, rank: int) -> None:
        self._hear(model)
        if (model, rank) not in self._counts:
            self._update(state, model, rank, self._counts.setdefault((model, rank), _RankCounts()), self._clock())

    def pulled(self, model: Model, rank: int, nbytes: int) -> None:
        found = self._counts.get((model, rank))
        if found is not None:
            found.pulls += 1
            found.nbytes += nbytes

    def acknowledged(self, state: State, model: Model, rank: int) -> None:
        self._hear(model)
        found = self._counts.setdefault((model, rank), _RankCounts())
        found.acknowledged += 1
        self._update(state, model, rank, found, self._clock())

    def update_all(self, state: State) -> None:
        """After an event that may concern any rank."""
        now = self._clock()
        for model, rank in list(self._counts):
            if rank >= len(state.models[model].next):
                del self._counts[model, rank]
            else:
                self._update(state, model, rank, self._counts[model, rank], now)

    def waited(self, model: Model) -> float:
        """Seconds that a rank waited, on an average of those that asked for something."""
        now = self._clock()
        own = (found for (other, _), found in self._counts.items() if other == model)
        waits = [found.waited + self._waits_until(now, model, found) for found in own]
        return sum(waits) / len(waits) if waits else 0.0

    def stats(self, state: State) -> Iterator[RankStats]:
        """One for each rank that has asked for something."""
        now = self._clock()
        behind = {model: lags(state, model) for model in state.models}
        for (model, rank), found in self._counts.items():
            waited = found.waited + self._waits_until(now, model, found)
            lag = behind[model][rank]
            yield RankStats(model, rank, found.pulls, found.nbytes, found.acknowledged, waited, lag)

    def _update(self, state: State, model: Model, rank: int, found: _RankCounts, now: float) -> None:
        waits = _waits(state, progress.next_of(state, model, rank))
        if found.waits_since is not None and not waits:
            found.waited += self._waits_until(now, model, found)
            found.waits_since = None
        elif found.waits_since is None and waits:
            found.waits_since = now

    def _hear(self, model: Model) -> None:
        """The model's trainer is there now. While it was gone nobody waited."""
        now = self._clock()
        if now - self._heard.get(model, now) > ASKS_AGAIN_S:
            for (other, _), found in self._counts.items():
                if other == model and found.waits_since is not None:
                    found.waited += self._waits_until(now, model, found)
                    found.waits_since = now
        self._heard[model] = now

    def _waits_until(self, now: float, model: Model, found: _RankCounts) -> float:
        """Seconds of the wait that goes on, without those in which the trainer was gone."""
        if found.waits_since is None:
            return 0.0
        return max(0.0, min(now, self._heard[model] + ASKS_AGAIN_S) - found.waits_since)


def _waits(state: State, position: Position) -> bool:
    batch = state.batches.get(position.batch)
    if batch is not None:
        return not batch.is_published or bool(batch.awaits)
    return not state.finished or bool(state.complete)


def lags(state: State, model: Model) -> list[int]:
    """The number of shards that each rank is behind the one that is furthest."""
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
        if one.batch <= number <= other.batch and number not in state.failed
    }
    whole = sum(size * state.epochs for number, size in sizes.items() if number < other.batch)
    return whole + _within(sizes, other) - _within(sizes, one)


def _within(sizes: dict[int, int], position: Position) -> int:
    return sizes.get(position.batch, 0) * position.epoch + position.mini_batch
