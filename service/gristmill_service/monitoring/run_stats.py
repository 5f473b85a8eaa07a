"""A run's numbers for metrics, all of one moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gristmill_service.config import Model
from gristmill_service.monitoring.rank_metrics import lags
from gristmill_service.monitoring.run_metrics import RunMetrics
from gristmill_service.run.machine.answers import RunStatus
from gristmill_service.run.machine.state import State


@dataclass(frozen=True, slots=True)
class RankStats:
    """See `RankCounts`. waited: seconds. lag: shards behind the rank that is furthest."""

    model: Model
    rank: int
    pulls: int
    nbytes: int
    acknowledged: int
    waited: float
    lag: int


@dataclass(frozen=True, slots=True)
class RunStats:
    """oldest_open: seconds since the oldest group that is not complete was begun, 0 where there is none. throttled:
    seconds during which workers waited for room. journal_bytes: of the run's log of events. lease: seconds for which
    this process still decides, None where it needs no lease. meters: what the process counted."""

    status: RunStatus
    batches_buffered: int
    max_buffered_batches: int
    max_buffered_bytes: int
    oldest_open: float
    throttled: float
    ranks: list[RankStats]
    journal_bytes: int
    lease: float | None
    meters: RunMetrics


def oldest_open(state: State, now: float) -> float:
    """now: the run's own time."""
    found = next((group for key, group in state.open.items() if key not in state.complete), None)
    return 0.0 if found is None else max(0.0, now - found.admitted_at)


def rank_stats(state: State, meters: RunMetrics) -> Iterator[RankStats]:
    """Of the ranks that have asked for something."""
    for model in state.models:
        behind = lags(state, model)
        for (of, rank), found in meters.ranks.found.items():
            if of == model:
                waited = meters.ranks.waited(found)
                yield RankStats(model, rank, found.pulls, found.nbytes, found.acknowledged, waited, behind[rank])
