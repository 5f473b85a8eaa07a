"""The process's metrics, in a registry of their own; the metrics of its runs are read at each scrape."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from prometheus_client import (
    CollectorRegistry,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import gristmill
from gristmill_service.access.quotas import QuotaUsage
from gristmill_service.monitoring.metrics.run_stats import RunStats, gauge
from gristmill_service.monitoring.metrics.storage_timing import StoreMetrics

# From a small call to a wait that lasts as long as the service allows.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# When a series was made would be a series of its own, twice as many in all.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Watched:
    """The sources that each scrape reads.

    runs: the metrics of each run that this process owns. waiting: the number of calls that wait. leases: runs by who
    owns them. unhealthy_reason: why storage cannot take batches or calls now, empty where it can. room: bytes used and
    bytes in all, of each place where something is stored. quotas: how much of each is taken.
    """

    runs: Callable[[], Iterable[RunStats]]
    waiting: Callable[[], int]
    leases: Callable[[], Mapping[str, int]] = dict
    unhealthy_reason: Callable[[], str] = str
    room: Callable[[], Mapping[str, tuple[int, int]]] = dict
    quotas: Callable[[], Iterable[QuotaUsage]] = tuple


class Metrics:
    """Thread-safe, as far as what is watched is."""

    def __init__(self) -> None:
        self._registry, self._watched = CollectorRegistry(), list[Watched]()
        self._calls = Histogram(
            "gristmill_call_seconds",
            "Seconds from a call's arrival to its answer, waiting included.",
            ("door", "call", "status"),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.storing = StoreMetrics(self._registry)
        build = Info("gristmill_build", "Which version runs, always 1.", registry=self._registry)
        build.info({"version": gristmill.__version__, "python": platform.python_version()})
        ProcessCollector(registry=self._registry)

    def watch(self, watched: Watched) -> None:
        """Exposes these, too, from now on."""
        self._watched.append(watched)

    def observe_call(self, door: str, call: str, status: str, seconds: float) -> None:
        self._calls.labels(door, call, status).observe(seconds)

    def read(self) -> Callable[[], bytes]:
        """Reads all metrics. Returns a function that writes them in the Prometheus text format: that takes most of the
        time, and may be called by any thread."""
        metrics = [*self._registry.collect(), *chain.from_iterable(map(_of_process, self._watched))]
        runs = [stats for watched in self._watched for stats in watched.runs()]
        return lambda: generate_latest(_Read([*metrics, *_joined(runs)]))

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return self.read()()


class _Read(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _of_process(watched: Watched) -> Iterator[Metric]:
    yield gauge("gristmill_waiting_calls", "Calls that wait now.", watched.waiting())
    yield gauge(
        "gristmill_store_unhealthy",
        "1 while batches or calls wait for storage; /readyz says why.",
        int(bool(watched.unhealthy_reason())),
    )
    yield gauge("gristmill_leases", "Runs, by who decides for them.", watched.leases(), "state")
    room = watched.room()
    used = {store: taken for store, (taken, _) in room.items()}
    limit = {store: most for store, (_, most) in room.items()}
    yield gauge("gristmill_store_used_bytes", "Bytes used, of each place where something is stored.", used, "store")
    yield gauge("gristmill_store_limit_bytes", "Bytes in all, of each place where something is stored.", limit, "store")
    labels = ("quota", "of", "name")
    quota_used = GaugeMetricFamily("gristmill_quota_used", "How much of a quota is taken.", labels=labels)
    quota_limit = GaugeMetricFamily("gristmill_quota_limit", "What the quota allows.", labels=labels)
    for usage in watched.quotas():
        quota_used.add_metric((usage.quota, usage.of, usage.name), usage.used)
        quota_limit.add_metric((usage.quota, usage.of, usage.name), usage.most)
    yield from (quota_used, quota_limit)


def _joined(runs: Iterable[RunStats]) -> Iterable[Metric]:
    """Joins the metrics of all runs: each is written once, with the samples of every run."""
    metrics: dict[str, Metric] = {}
    for metric in chain.from_iterable(runs):
        joined = metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        joined.samples += metric.samples
    return metrics.values()
