"""The metrics that /metrics exposes; docs/metrics.md lists them, and a test compares the two.

Metrics of the process (calls, storage, leases) are in a registry. Metrics of runs are read at each scrape, from each
run's monitor and state. The duration of store calls is measured around them.

The number of label values is limited: runs, callers, ranks, and fixed words; never a uid. A run's name is in the label
`run`, and a caller's in `caller`, by which `Gate.sees_labels` hides those of others.
"""

from __future__ import annotations

import platform
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ParamSpec, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import gristmill
from gristmill.errors import AlreadyExistsError, NotFoundError
from gristmill_service.access.quotas import QuotaUsage
from gristmill_service.monitoring.collectors.run_metrics import REASONS, bounded_reason
from gristmill_service.monitoring.collectors.run_monitor import monitor_of
from gristmill_service.monitoring.health.findings import STATES
from gristmill_service.monitoring.health.health import assess
from gristmill_service.monitoring.health.run_facts import RunFacts, facts_of
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.state import State
from gristmill_service.run.run import Run
from gristmill_service.storage.run_store import OwnedElsewhereError

P = ParamSpec("P")
T = TypeVar("T")

RunStats = list[Metric]
"""A run's metrics. Each sample has a label with the run's name."""

# The buckets range from a small call to the longest wait that the service allows.
_CALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STORE_SECONDS = (0.0001, 0.0005, 0.0025, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
# A missing run or table is not a failure of the store.
_NO_FAILURE = (NotFoundError, AlreadyExistsError, OwnedElsewhereError)
_OPERATIONS = ("publish", "plan", "free", "append", "flush", "compact", "get", "replay")
# The operation of each method of shard stores and run logs. Methods of run stores return a log, which is measured.
_MEASURED = {**{name: name for name in _OPERATIONS}, "get_all": "get"}
_OPENS = ("create", "open")
# These reasons apply to rows of a trajectory (superseded, surplus) or of a plan (misaligned), not to whole groups.
_GROUP_REASONS = tuple(reason for reason in REASONS if reason not in ("misaligned", "superseded", "surplus"))

# The creation time of each series would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Watched:
    """The sources that each scrape reads.

    runs: the metrics of each run that this process owns. waiting: the number of waiting calls. leases: the number of
    runs by owner. unhealthy_reason: why storage cannot accept batches or calls now; empty if it can. room: used bytes
    and capacity of each store. quotas: the usage of each quota.
    """

    runs: Callable[[], Iterable[RunStats]]
    waiting: Callable[[], int]
    leases: Callable[[], Mapping[str, int]] = dict
    unhealthy_reason: Callable[[], str] = str
    room: Callable[[], Mapping[str, tuple[int, int]]] = dict
    quotas: Callable[[], Iterable[QuotaUsage]] = tuple


class Metrics:
    """The process's metrics. Thread-safe if the watched sources are."""

    def __init__(self) -> None:
        self._registry, self._watched = CollectorRegistry(), list[Watched]()
        self._calls = Histogram(
            "gristmill_call_seconds",
            "Seconds from a call's arrival to its answer, waiting included.",
            ("api", "call", "status"),
            registry=self._registry,
            buckets=_CALL_SECONDS,
        )
        self.storing = StoreMetrics(self._registry)
        build = Info("gristmill_build", "Which version runs, always 1.", registry=self._registry)
        build.info({"version": gristmill.__version__, "python": platform.python_version()})
        ProcessCollector(registry=self._registry)

    def watch(self, watched: Watched) -> None:
        """Adds these sources to each scrape."""
        self._watched.append(watched)

    def observe_call(self, api: str, call: str, status: str, seconds: float) -> None:
        self._calls.labels(api, call, status).observe(seconds)

    def read(self, sees: Callable[[Mapping[str, str]], bool] = lambda _: True) -> Callable[[], bytes]:
        """Reads all metrics. Returns a function that formats them as Prometheus text: this takes most of the time, and
        any thread may call it.

        sees: returns whether to include a sample with these labels, of any metric.
        """
        runs = [stats for watched in self._watched for stats in watched.runs()]
        of_process = chain.from_iterable(map(_of_process, self._watched))
        metrics = [*self._registry.collect(), *of_process, *_joined(runs)]
        for metric in metrics:
            metric.samples = [sample for sample in metric.samples if sees(sample.labels)]
        return lambda: generate_latest(_Read(metrics))

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return self.read()()


class _Read(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class StoreMetrics:
    """Measures calls to stores. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            "gristmill_store_seconds",
            "Seconds of calls to the stores of shards, rows and events.",
            ("operation",),
            registry=registry,
            buckets=_STORE_SECONDS,
        )
        failed = Counter("gristmill_store_errors", "Failed calls to these stores.", ("operation",), registry=registry)
        # Looked up once, because each request makes some of these calls.
        self._observe = {name: seconds.labels(name).observe for name in _OPERATIONS}
        self._fail = {name: failed.labels(name).inc for name in _OPERATIONS}

    def call(self, operation: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.perf_counter()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, _NO_FAILURE):
                self._fail[operation]()
            raise
        self._observe[operation](time.perf_counter() - begin)
        return result

    def timed(self, store: T) -> T:
        """Returns the shard store, run store or run log with measured calls, also of the logs that it opens."""
        return cast("T", _Timed(store, self))


class _Timed:
    def __init__(self, store: object, metrics: StoreMetrics) -> None:
        self._store, self._metrics = store, metrics

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name in _OPENS:
            return lambda *args: self._metrics.timed(value(*args))
        if name in _MEASURED:
            # Later accesses find the attribute without calling `__getattr__`.
            value = self.__dict__[name] = partial(self._metrics.call, _MEASURED[name], value)
        return value


def _of_process(watched: Watched) -> Iterator[Metric]:
    yield gauge("gristmill_waiting_calls", "Calls that wait now.", watched.waiting())
    yield gauge(
        "gristmill_store_unhealthy",
        "1 while batches or calls wait for storage; /readyz says why.",
        int(bool(watched.unhealthy_reason())),
    )
    yield gauge("gristmill_leases", "Runs, by their owner.", watched.leases(), "state")
    room = watched.room()
    used = {store: taken for store, (taken, _) in room.items()}
    limit = {store: most for store, (_, most) in room.items()}
    yield gauge("gristmill_store_used_bytes", "Bytes used of each store's capacity.", used, "store")
    yield gauge("gristmill_store_limit_bytes", "Capacity of each store in bytes.", limit, "store")
    quota_used = Metric("gristmill_quota_used", "Usage of a quota.", "gauge")
    quota_limit = Metric("gristmill_quota_limit", "Limit of a quota.", "gauge")
    for usage in watched.quotas():
        whose = {"quota": usage.quota, usage.of: usage.name}
        quota_used.add_sample(quota_used.name, whose, usage.used)
        quota_limit.add_sample(quota_limit.name, whose, usage.most)
    yield from (quota_used, quota_limit)


def _joined(runs: Iterable[RunStats]) -> Iterable[Metric]:
    """Merges the metrics of all runs, so that each metric is exposed once, with the samples of every run."""
    metrics: dict[str, Metric] = {}
    for metric in chain.from_iterable(runs):
        joined = metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        joined.samples += metric.samples
    return metrics.values()


def run_stats(run: Run) -> RunStats:
    """Reads all metrics of the run at one time, so that they are consistent."""

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
            # Each sample was created for this scrape, so its labels may be changed.
            sample.labels["run"] = run.name
    return metrics


def _of_state(run: Run, state: State, facts: RunFacts, now: float) -> Iterator[Metric]:
    counts = facts.counts
    groups = {"open": counts.groups_open, "complete": counts.groups_complete, "room": counts.groups_room}
    yield gauge("gristmill_groups", "Prompt groups: open, complete, room.", groups, "state")
    dropped = Counts(dict.fromkeys(_GROUP_REASONS, 0))
    for reason, count in state.groups_dropped.items():
        dropped[bounded_reason(reason)] += count
    yield counter("gristmill_groups_dropped", "Groups dropped, by reason.", dropped, "reason")
    yield gauge(
        "gristmill_groups_dropped_in_a_row",
        "Groups dropped since the last batch was sealed, if none is complete; 0 if they are few.",
        facts.dropped_in_a_row,
    )
    yield gauge(
        "gristmill_oldest_open_group_seconds", "Age of the oldest group that is not complete.", _oldest_open(state, now)
    )
    batches = {
        "sealed": counts.batches_sealed,
        "published": counts.batches_published,
        "failed": counts.batches_failed,
        "freed": counts.batches_freed,
    }
    yield counter("gristmill_batches", "Batches, by the stage that they reached.", batches, "stage")
    yield gauge("gristmill_batches_buffered", "Batches that are sealed and not freed.", facts.held)
    yield gauge(
        "gristmill_batches_buffered_limit",
        "Limit of buffered batches: max_buffered_batches.",
        run.config.max_buffered_batches,
    )
    stored = {"rows": counts.row_bytes, "shards": counts.shard_bytes}
    yield gauge("gristmill_held_bytes", "Bytes that the run stores, of rows and of shards.", stored, "kind")
    yield gauge(
        "gristmill_held_limit_bytes", "Limit of stored bytes: max_buffered_bytes.", int(run.config.max_buffered_bytes)
    )
    yield gauge(
        "gristmill_run_generation",
        "How often the run's log was found shorter than confirmed, plus 1.",
        counts.generation,
    )
    yield gauge("gristmill_policy_version", "The version that rollouts sample from.", counts.policy_version)
    committed: dict[str, float] = {model.model: model.committed.batch for model in facts.models}
    yield gauge(
        "gristmill_committed_batch", "The batch that the model's training is committed up to.", committed, "model"
    )
    yield gauge("gristmill_journal_bytes", "Bytes of the run's log of events.", run.log_bytes)
    if (lease := run.lease) is not None:
        yield gauge(
            "gristmill_lease_seconds", "Seconds until the run's lease expires unless this process renews it.", lease
        )


def _oldest_open(state: State, now: float) -> float:
    """Returns the age of the oldest group that is not complete. now: in the run's time."""
    oldest = next((group for key, group in state.open.items() if key not in state.complete), None)
    return 0.0 if oldest is None else max(0.0, now - oldest.admitted_at)


def gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """Creates a gauge. value: one number, or one number per value of the label."""
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
