"""A run's numbers for metrics, all of one moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gristmill_service.config import Model
from gristmill_service.monitoring.rank_metrics import lags
from gristmill_service.monitoring.run_metrics import RunMetrics
from gristmill_service.run.machine.admission import Room
from gristmill_service.run.machine.answers import RunStatus
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run


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


def run_stats(run: Run) -> RunStats:
    """The run's numbers, of what is in memory, which need not be safe yet."""
    metrics = run.monitor.metrics  # type: ignore

    def take(state: State, room: Room) -> RunStats:
        return RunStats(
            status=run.status_of(state),
            batches_buffered=len(state.batches),
            max_buffered_batches=run.config.max_buffered_batches,
            max_buffered_bytes=int(run.config.max_buffered_bytes),
            oldest_open=oldest_open(state, metrics.now()),
            throttled=metrics.throttled,
            ranks=list(rank_stats(state, metrics)),
            journal_bytes=run.log_bytes,
            lease=run.lease,
            meters=metrics,
        )

    return run.read(take)
