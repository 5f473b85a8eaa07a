"""A run's metrics, all of one moment: those that its monitor counted, and those that its state has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gristmill_service.monitoring.collectors.run_metrics import REASONS, bounded_reason
from gristmill_service.monitoring.collectors.run_monitor import monitor_of
from gristmill_service.monitoring.health.findings import STATES
from gristmill_service.monitoring.health.health import assess
from gristmill_service.monitoring.health.run_facts import RunFacts, facts_of
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run

# A trajectory's rows are superseded or surplus, and a plan's misaligned, never a whole group here.
_GROUP_REASONS = tuple(reason for reason in REASONS if reason not in ("misaligned", "superseded", "surplus"))


RunStats = list[Metric]
"""A run's metrics, each sample labeled with the run."""


def run_stats(run: Run) -> RunStats:
    """Reads the run's metrics: a batch that is published in one of them is counted in the others."""

    def read(state: State, room: Room) -> tuple[RunFacts, list[Metric]]:
        facts, counted = facts_of(run, state, room), monitor_of(run).metrics
        return facts, [*counted.collect(state), *_of_state(run, state, facts, counted.run_time())]

    facts, metrics = run.read(read)
    health = assess(facts).state
    states: dict[str, float] = {state: int(state == health) for state in STATES}
    metrics.append(
        gauge("gristmill_run_state", "1 for the state that the run is in, 0 for the others.", states, "state")
    )
    for metric in metrics:
        for sample in metric.samples:
            # Made for this scrape, each with labels of its own.
            sample.labels["run"] = run.name
    return metrics


def _of_state(run: Run, state: State, facts: RunFacts, now: float) -> Iterator[Metric]:
    counts = facts.counts
    groups = {"open": counts.groups_open, "complete": counts.groups_complete, "room": counts.groups_room}
    yield gauge("gristmill_groups", "Prompt groups: open, complete, room.", groups, "state")
    dropped = Counter(dict.fromkeys(_GROUP_REASONS, 0))
    for reason, count in state.groups_dropped.items():
        dropped[bounded_reason(reason)] += count
    yield counter("gristmill_groups_dropped", "Groups dropped, by reason.", dropped, "reason")
    yield gauge(
        "gristmill_oldest_open_group_seconds", "Age of the oldest group that is not complete.", _oldest_open(state, now)
    )
    batches = {
        "sealed": counts.batches_sealed,
        "published": counts.batches_published,
        "failed": counts.batches_failed,
        "freed": counts.batches_freed,
    }
    yield counter("gristmill_batches", "Batches, by how far they came.", batches, "stage")
    yield gauge("gristmill_batches_buffered", "Batches that are sealed and not freed.", facts.held)
    yield gauge(
        "gristmill_batches_buffered_limit", "As many may be: max_buffered_batches.", run.config.max_buffered_batches
    )
    held = {"rows": counts.row_bytes, "shards": counts.shard_bytes}
    yield gauge("gristmill_held_bytes", "Bytes held of rows and of shards.", held, "kind")
    yield gauge(
        "gristmill_held_limit_bytes", "As many may be held: max_buffered_bytes.", int(run.config.max_buffered_bytes)
    )
    yield gauge(
        "gristmill_run_generation",
        "How often the run's log was found shorter than promised, plus 1.",
        counts.generation,
    )
    yield gauge("gristmill_policy_version", "The version that rollouts sample from.", counts.policy_version)
    committed: dict[str, float] = {model.model: model.committed.batch for model in facts.models}
    yield gauge(
        "gristmill_committed_batch", "The batch that the model's training is committed up to.", committed, "model"
    )
    yield gauge("gristmill_journal_bytes", "Bytes of the run's log of events.", run.log_bytes)
    if (lease := run.lease) is not None:
        yield gauge("gristmill_lease_seconds", "Seconds for which this process decides unless it renews that.", lease)


def _oldest_open(state: State, now: float) -> float:
    """Returns the age of the oldest group that is not complete. now: the run's own time."""
    oldest = next((group for key, group in state.open.items() if key not in state.complete), None)
    return 0.0 if oldest is None else max(0.0, now - oldest.admitted_at)


def gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Makes a gauge. value: one number, or numbers by the label's values."""
    if not isinstance(value, Mapping):
        return GaugeMetricFamily(name, text, value)
    metric = GaugeMetricFamily(name, text, labels=(label,))
    for key, one in value.items():
        metric.add_metric((key,), one)
    return metric


def counter(name: str, text: str, values: Mapping[str, float], label: str) -> Metric:
    metric = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        metric.add_metric((key,), value)
    return metric
