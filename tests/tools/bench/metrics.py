"""Measures what metrics cost: a scrape of many ranks and runs, counting, and the CPU time of a loaded service."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry

from gristmill import RolloutClient
from gristmill._wire.steps import Steps
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.monitoring.metrics import Metrics, StoreMetrics
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.events import RowsStored
from gristmill_service.run.machine.state import State
from tests.api.apis import GrpcApi, group
from tests.metrics.scraping import Scrape
from tests.tools.bench.figures import Figure, seconds
from tests.tools.bench.processes import Served, scrape, served
from tests.tools.bench.submissions import SHORT, Sender, config, tables

RUNS, RANKS, SCRAPES = 8, 64, 25
SCRAPED_EACH_S = 15.0
_BYTES, _ROUNDS = 200 << 20, 3
# A request of some groups, as workers send them who do not wait for many: counting costs by the request.
_ROWS = 64
_MANY = 20_000


def figures() -> Iterator[Figure]:
    """scrape_ms: over HTTP, of 8 runs of 64 ranks each, a busy thing otherwise idle. cpu_percent: of the CPU time of a
    service that takes short rows as fast as it can, what counting them and a scrape each 15 s take: each instrument's
    own time, measured alone, as often as the service says it used it."""
    with served(["--store", "memory"]) as service:
        _train(service)
        samples = [1000 * seconds(lambda: scrape(service)) for _ in range(SCRAPES)]
        yield Figure("metrics.scrape_ms", statistics.median(samples), "ms", 50.0)
        scrape_s = _cpu_seconds_of(service, lambda: [scrape(service) for _ in range(SCRAPES)]) / SCRAPES
        yield Figure("metrics.scrape_cpu_ms", 1000 * scrape_s, "ms", None)
        yield Figure("metrics.series", float(sum(line[:1] != "#" for line in scrape(service).splitlines())), "", None)
        samples = [_share(service, f"load-{at}", scrape_s) for at in range(_ROUNDS)]
        yield Figure("metrics.cpu_percent", 100 * statistics.median(samples), "%", 2.0)


def _train(service: Served) -> None:
    """Each rank of each run has trained a batch."""
    api = GrpcApi(service.grpc_address)
    for number in range(RUNS):
        name = f"run-{number}"
        settings = {"train_batch_size": 2, "n_samples_per_prompt": 2, "policy_mini_batch_size": 2, "step_wise": True}
        api.create(name, {**settings, "micro_batch": {"size": 4}, "dp_size": RANKS})
        api.submit(name, [*group("a"), *group("b")])
        api.batch(name, 0, wait_s=20)
        for rank in range(RANKS):
            api.shard(name, rank)
            api.acknowledge(name, rank, {"batch": 0, "epoch": 0, "mini_batch": 0}, commit=True)
    api.close()


class _Counted(NamedTuple):
    cpu_s: float
    calls: float
    store_calls: float


def _share(service: Served, run: str, scrape_s: float) -> float:
    sender = Sender(service.grpc_address, list(_requests()))
    with RolloutClient(service.grpc_address, run, timeout_s=60) as client:
        client.create_run(config().model_dump(exclude_defaults=True))
    before = _counted(service)
    wall_s = sender.seconds(run)
    after = _counted(service)
    sender.close()
    GrpcApi(service.grpc_address).delete(run)
    costs = _costs()
    cost_s = (after.calls - before.calls) * costs.request_s + (after.store_calls - before.store_calls) * costs.store_s
    return (cost_s + scrape_s * wall_s / SCRAPED_EACH_S) / (after.cpu_s - before.cpu_s - scrape_s)


def _requests() -> Iterator[Steps]:
    for table in tables(SHORT, _BYTES):
        for start in range(0, len(table) - _ROWS, _ROWS):
            yield _part(table, start)


def _part(table: Steps, start: int) -> Steps:
    return table.take(np.arange(start, start + _ROWS))


class _Costs(NamedTuple):
    """request_s: of counting a request, its rows and its event. store_s: of measuring around a call to a store."""

    request_s: float
    store_s: float


def _costs() -> _Costs:
    monitor, metrics = Monitor(time.monotonic, time.monotonic), Metrics()
    rows, outcomes = _part(next(tables(SHORT, 1 << 20)), 0), [Outcome.ACCEPTED] * _ROWS
    event, state = RowsStored(()), State.initial(config())

    def request() -> None:
        monitor.received(outcomes, rows)
        monitor.applied(event, state, 0, lambda: 0)
        metrics.observe_call("grpc", "SubmitRows", "OK", 0.01)

    call = StoreMetrics(CollectorRegistry()).call
    return _Costs(_each(request), _each(lambda: call("append", lambda: None)))


def _each(work: Callable[[], object]) -> float:
    def many() -> None:
        for _ in range(_MANY):
            work()

    return min(seconds(many) for _ in range(3)) / _MANY


def _counted(service: Served) -> _Counted:
    scraped = Scrape(scrape(service))
    calls = scraped.of("gristmill_call_seconds_count", call="SubmitRows")
    return _Counted(
        scraped.one("process_cpu_seconds_total"),
        sum(calls.values()),
        sum(scraped.of("gristmill_store_seconds_count").values()),
    )


def _cpu_seconds_of(service: Served, work: Callable[[], object]) -> float:
    before = _counted(service).cpu_s
    work()
    return _counted(service).cpu_s - before
