"""A run's numbers for metrics, all of one moment."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill_service.config import Model
from gristmill_service.monitoring.collectors.run_metrics import MetricsSnapshot
from gristmill_service.monitoring.collectors.run_monitor import monitor_of
from gristmill_service.monitoring.health.health import assess
from gristmill_service.monitoring.health.health_models import HealthState, RunCounts
from gristmill_service.monitoring.health.run_facts import RunFacts, facts_of
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run


@dataclass(frozen=True, slots=True)
class RunStats:
    """The state, and what was counted of its events, under the run's lock: a batch that is published in one is counted
    in the other.

    oldest_open: seconds since the oldest group that is not complete was begun, 0 where there is none. committed: the
    batch that each model's training is committed up to. journal_bytes: the size of the run's log of events. lease:
    seconds for which this process still decides, None where it needs no lease.
    """

    run: str
    health: HealthState
    counts: RunCounts
    groups_dropped: dict[str, int]
    batches_buffered: int
    max_buffered_batches: int
    max_buffered_bytes: int
    oldest_open: float
    committed: dict[Model, int]
    journal_bytes: int
    lease: float | None
    counted: MetricsSnapshot


def run_stats(run: Run) -> RunStats:
    facts, groups_dropped, oldest, counted = run.read(lambda state, room: _read(run, state, room))
    return RunStats(
        run=run.name,
        health=assess(facts).state,
        counts=facts.counts,
        groups_dropped=groups_dropped,
        batches_buffered=facts.held,
        max_buffered_batches=run.config.max_buffered_batches,
        max_buffered_bytes=int(run.config.max_buffered_bytes),
        oldest_open=oldest,
        committed={model.model: model.committed.batch for model in facts.models},
        journal_bytes=run.log_bytes,
        lease=run.lease,
        counted=counted,
    )


def _read(run: Run, state: State, room: Room) -> tuple[RunFacts, dict[str, int], float, MetricsSnapshot]:
    metrics = monitor_of(run).metrics
    return (
        facts_of(run, state, room),
        dict(state.groups_dropped),
        _oldest_open(state, metrics.run_time()),
        metrics.snapshot(state),
    )


def _oldest_open(state: State, now: float) -> float:
    """now: the run's own time."""
    found = next((group for key, group in state.open.items() if key not in state.complete), None)
    return 0.0 if found is None else max(0.0, now - found.admitted_at)
