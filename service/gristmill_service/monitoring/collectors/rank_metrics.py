"""Counts per rank of a trainer: the shards that it pulled, the time that it had nothing to train on, and its lag.

Waiting time is computed from the run's events, not from calls, because a rank that prefetches makes its call long
before it needs the answer. After its first call, a rank waits while it has acknowledged everything that is published,
the run continues, and its trainer is alive: one of the model's ranks, or their controller, makes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gristmill_service.config import Model
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.state import State

# A trainer counts as alive for this number of seconds after a call.
ASKS_AGAIN_S = 35.0


@dataclass(slots=True)
class _RankCounts:
    """The counts of a rank.

    pulls, nbytes: the number of shards whose location it received, and their bytes. waited: seconds, without the
    current wait, which began at `waits_since`; None while the rank has something to train on.
    """

    pulls: int = 0
    nbytes: int = 0
    acknowledged: int = 0
    waited: float = 0.0
    waits_since: float | None = None


class RankMetrics:
    """The counts of all ranks. Call it on the event loop, or with the state locked; the builder's thread may also call
    `waited`, and may then miss concurrent updates."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[tuple[Model, int], _RankCounts] = {}
        self._heard: dict[Model, float] = {}

    def asked(self, state: State, model: Model, rank: int) -> None:
        self._hear(model)
        if (model, rank) not in self._counts:
            self._update(state, model, rank, self._counts.setdefault((model, rank), _RankCounts()), self._clock())

    def pulled(self, model: Model, rank: int, nbytes: int) -> None:
        counts = self._counts.get((model, rank))
        if counts is not None:
            counts.pulls += 1
            counts.nbytes += nbytes

    def acknowledged(self, state: State, model: Model, rank: int) -> None:
        self._hear(model)
        counts = self._counts.setdefault((model, rank), _RankCounts())
        counts.acknowledged += 1
        self._update(state, model, rank, counts, self._clock())

    def update_all(self, state: State) -> None:
        """Updates all ranks after an event that may affect any of them."""
        now = self._clock()
        for model, rank in list(self._counts):
            if rank >= len(state.models[model].next):
                del self._counts[model, rank]
            else:
                self._update(state, model, rank, self._counts[model, rank], now)

    def waited(self, model: Model) -> float:
        """Returns the mean waiting time in seconds of the ranks that have made a request."""
        now = self._clock()
        ranks = [counts for (other, _), counts in list(self._counts.items()) if other == model]
        return sum(self._waited(now, model, counts) for counts in ranks) / len(ranks) if ranks else 0.0

    def collect(self, state: State) -> Sequence[Metric]:
        """Returns the metrics of each rank that has made a request."""
        labels = ("model", "rank")
        metrics: list[CounterMetricFamily | GaugeMetricFamily] = [
            CounterMetricFamily("gristmill_rank_pulls", "Shards that the rank pulled.", labels=labels),
            CounterMetricFamily(
                "gristmill_rank_pulled_bytes",
                "Bytes of the shards that the rank pulled.",
                labels=labels,
            ),
            CounterMetricFamily("gristmill_rank_acknowledged", "Shards that the rank acknowledged.", labels=labels),
            CounterMetricFamily(
                "gristmill_rank_wait_seconds", "Seconds during which the rank had nothing to train on.", labels=labels
            ),
            GaugeMetricFamily(
                "gristmill_rank_lag_shards", "Shards that the rank is behind the furthest one.", labels=labels
            ),
        ]
        now = self._clock()
        behind = {model: lags(state, model) for model in state.models}
        for (model, rank), counts in self._counts.items():
            waited = self._waited(now, model, counts)
            values = (counts.pulls, counts.nbytes, counts.acknowledged, waited, behind[model][rank])
            for metric, value in zip(metrics, values, strict=True):
                metric.add_metric((model, str(rank)), value)
        return metrics

    def _update(self, state: State, model: Model, rank: int, counts: _RankCounts, now: float) -> None:
        waits = _waits(state, progress.next_of(state, model, rank))
        if counts.waits_since is not None and not waits:
            counts.waited = self._waited(now, model, counts)
            counts.waits_since = None
        elif counts.waits_since is None and waits:
            counts.waits_since = now

    def _hear(self, model: Model) -> None:
        """Records that the model's trainer is alive. Time during which it was not alive is not counted as waiting."""
        now = self._clock()
        if now - self._heard.get(model, now) > ASKS_AGAIN_S:
            for (other, _), counts in self._counts.items():
                if other == model and counts.waits_since is not None:
                    counts.waited = self._waited(now, model, counts)
                    counts.waits_since = now
        self._heard[model] = now

    def _waited(self, now: float, model: Model, counts: _RankCounts) -> float:
        """Returns the total waiting time in seconds, without the time during which the trainer was not alive."""
        waited, since = counts.waited, counts.waits_since
        return waited if since is None else waited + max(0.0, min(now, self._heard[model] + ASKS_AGAIN_S) - since)


def _waits(state: State, position: Position) -> bool:
    batch = state.batches.get(position.batch)
    if batch is not None:
        return not batch.is_published or bool(batch.awaits)
    return not state.finished or bool(state.complete)


def lags(state: State, model: Model) -> list[int]:
    """Returns by how many shards each rank is behind the rank that is furthest ahead."""
    places = [progress.next_of(state, model, rank) for rank in range(len(state.models[model].next))]
    furthest, behind = max(places), dict[Position, int]()
    for place in set(places):
        behind[place] = _between(state, model, place, furthest)
    return [behind[place] for place in places]


def _between(state: State, model: Model, one: Position, other: Position) -> int:
    """Counts the shards from one position to a later one. No batch between them may be freed."""
    sizes = {
        number: (batch.mini_batches or {}).get(model, 0)
        for number, batch in state.batches.items()
        if one.batch <= number <= other.batch and number not in state.failed
    }
    whole = sum(size * state.epochs for number, size in sizes.items() if number < other.batch)
    return whole + _within(sizes, other) - _within(sizes, one)


def _within(sizes: dict[int, int], position: Position) -> int:
    return sizes.get(position.batch, 0) * position.epoch + position.mini_batch
