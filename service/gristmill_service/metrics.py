"""What /metrics tells. Gauges come from each run's status when asked; only what a status does not keep is counted here.

Labels are bounded: runs, reasons, outcomes, calls and statuses; never a uid. A deleted run's series go with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gristmill_service.run.views import Outcome, RunStatus

# From a small call to a wait that lasts as long as the service allows.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


_REASONS = frozenset(["aborted", "batch_failed", "finished", "rows_lost", "stale", "timeout", "zero_variance"])


class Metrics:
    """The process's metrics, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Histogram(
            "gristmill_call_seconds",
            "Seconds from a call's arrival to its answer, waiting included.",
            ("door", "call", "status"),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._rows = _RowCounts()
        ProcessCollector(registry=self._registry)

    def watch(self, statuses: Callable[[], Iterable[RunStatus]], waiting: Callable[[], int]) -> None:
        """Tells the runs' statuses and the number of waiting calls from now on; both are asked at each scrape."""
        self._registry.register(_StatusCollector(statuses, waiting, self._rows))

    def observe_call(self, door: str, call: str, status: str, seconds: float) -> None:
        self._calls.labels(door, call, status).observe(seconds)

    def count_rows(self, run: str, outcomes: Sequence[Outcome], tokens: int) -> None:
        self._rows.add(run, outcomes, tokens)

    def forget(self, run: str) -> None:
        self._rows.forget(run)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)


class _RowCounts:
    """Rows by outcome and tokens, of each run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: Counter[tuple[str, Outcome]] = Counter()
        self._tokens: Counter[str] = Counter()

    def add(self, run: str, outcomes: Sequence[Outcome], tokens: int) -> None:
        with self._lock:
            self._tokens[run] += tokens
            for outcome, count in Counter(outcomes).items():
                self._rows[run, outcome] += count

    def forget(self, run: str) -> None:
        with self._lock:
            self._tokens.pop(run, None)
            for outcome in Outcome:
                self._rows.pop((run, outcome), None)

    def rows(self, run: str, outcome: Outcome) -> int:
        return self._rows[run, outcome]

    def tokens(self, run: str) -> int:
        return self._tokens[run]


class _StatusCollector(Collector):
    def __init__(
        self, statuses: Callable[[], Iterable[RunStatus]], waiting: Callable[[], int], rows: _RowCounts
    ) -> None:
        self._statuses = statuses
        self._waiting = waiting
        self._rows = rows

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry would otherwise ask every run when this is registered."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("gristmill_waiting_calls", "Calls that wait now.")
        waiting.add_metric((), self._waiting())
        yield waiting
        statuses = list(self._statuses())
        yield from self._rows_received(statuses)
        yield from _groups(statuses)
        yield from _batches(statuses)
        yield from _training(statuses)

    def _rows_received(self, statuses: Sequence[RunStatus]) -> Iterator[Metric]:
        rows = CounterMetricFamily(
            "gristmill_rows", "Rows received, by what became of them.", labels=("run", "outcome")
        )
        tokens = CounterMetricFamily("gristmill_tokens", "Prompt and response tokens received.", labels=("run",))
        for status in statuses:
            for outcome in Outcome:
                rows.add_metric((status.run, outcome.name.lower()), self._rows.rows(status.run, outcome))
            tokens.add_metric((status.run,), self._rows.tokens(status.run))
        yield from (rows, tokens)


def _groups(statuses: Sequence[RunStatus]) -> Iterator[Metric]:
    groups = GaugeMetricFamily("gristmill_groups", "Prompt groups: open, complete, room.", labels=("run", "state"))
    dropped = CounterMetricFamily("gristmill_groups_dropped", "Groups dropped, by reason.", labels=("run", "reason"))
    for status in statuses:
        groups.add_metric((status.run, "open"), status.groups_open)
        groups.add_metric((status.run, "complete"), status.groups_complete)
        groups.add_metric((status.run, "room"), status.groups_room)
        for reason, count in _bounded(status.groups_dropped).items():
            dropped.add_metric((status.run, reason), count)
    yield from (groups, dropped)


def _bounded(dropped: Mapping[str, int]) -> dict[str, int]:
    """Counts by reason, with what clients call their reasons under one: labels are ours, so that they are few."""
    counts: dict[str, int] = {}
    for reason, count in dropped.items():
        label = reason if reason in _REASONS else "aborted"
        counts[label] = counts.get(label, 0) + count
    return counts


def _batches(statuses: Sequence[RunStatus]) -> Iterator[Metric]:
    batches = CounterMetricFamily("gristmill_batches", "Batches, by how far they came.", labels=("run", "stage"))
    held = GaugeMetricFamily("gristmill_held_bytes", "Bytes held of rows and of shards.", labels=("run", "kind"))
    for status in statuses:
        batches.add_metric((status.run, "sealed"), status.batches_sealed)
        batches.add_metric((status.run, "published"), status.batches_published)
        batches.add_metric((status.run, "failed"), len(status.failed_batches))
        batches.add_metric((status.run, "freed"), status.batches_freed)
        held.add_metric((status.run, "rows"), status.row_bytes)
        held.add_metric((status.run, "shards"), status.shard_bytes)
    yield from (batches, held)


def _training(statuses: Sequence[RunStatus]) -> Iterator[Metric]:
    version = GaugeMetricFamily("gristmill_policy_version", "The version that rollouts sample from.", labels=("run",))
    committed = GaugeMetricFamily(
        "gristmill_committed_batch", "The batch that the model's training is committed up to.", labels=("run", "model")
    )
    for status in statuses:
        version.add_metric((status.run,), status.policy_version)
        for progress in status.models:
            committed.add_metric((status.run, progress.model), progress.committed.batch)
    yield from (version, committed)
