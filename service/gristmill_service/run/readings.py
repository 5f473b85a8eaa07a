"""A run's numbers for metrics, all of one moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gristmill_service.config import Model
from gristmill_service.run.meters import Meters
from gristmill_service.run.ranks import lags
from gristmill_service.run.state import State
from gristmill_service.run.views import RunStatus


@dataclass(frozen=True, slots=True)
class RankReading:
    """See `RankMeter`. waited: seconds. lag: shards behind the rank that is furthest."""

    model: Model
    rank: int
    pulls: int
    nbytes: int
    acknowledged: int
    waited: float
    lag: int


@dataclass(frozen=True, slots=True)
class Readings:
    """oldest_open: seconds since the oldest group that is not complete was begun, 0 where there is none. throttled:
    seconds during which workers waited for room. journal_bytes: of the run's log of events. lease: seconds for which
    this process still decides, None where it needs no lease. meters: what the process counted."""

    status: RunStatus
    batches_buffered: int
    max_buffered_batches: int
    max_buffered_bytes: int
    oldest_open: float
    throttled: float
    ranks: list[RankReading]
    journal_bytes: int
    lease: float | None
    meters: Meters


def oldest_open(state: State, now: float) -> float:
    """now: the run's own time."""
    found = next((group for key, group in state.open.items() if key not in state.complete), None)
    return 0.0 if found is None else max(0.0, now - found.admitted_at)


def rank_readings(state: State, meters: Meters) -> Iterator[RankReading]:
    """Of the ranks that have asked for something."""
    for model in state.models:
        behind = lags(state, model)
        for (of, rank), found in meters.ranks.found.items():
            if of == model:
                waited = meters.ranks.waited(found)
                yield RankReading(model, rank, found.pulls, found.nbytes, found.acknowledged, waited, behind[rank])
