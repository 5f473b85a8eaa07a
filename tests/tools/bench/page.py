"""Measures how soon the page shows a batch of 3,500 rows, and what an open page costs the service."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from gristmill import RolloutClient, TrainerClient
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.batch_records import keep
from gristmill_service.settings import Settings
from tests.on_loop import Run, Service
from tests.page.chromium import MISSING, executable, launched
from tests.serving import FREE_PORTS
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import Served, cpu_s, scrape, served
from tests.tools.bench.submissions import Sender, split
from tests.tools.bench.workloads import DP_SIZE, workload

VIEWS = 7
WATCHED_S = 30.0
LONG_RUN_BATCHES, LONG_RUN_RANKS = 10_000, 64
_SCRAPE_S = 15.0
_NEWS_S = 1.0


def figures() -> Iterator[Figure]:
    """first_view_s: from the navigation until the shards are drawn, the batch never looked at before, in a window that
    has nothing of the page. cpu_percent: of one core, for a page that is open on a run to which groups come, and
    a scrape each 15 s; what the service takes with neither is taken off. long_run_first_view_s: see
    `long_run_view`."""
    if executable() is None:
        print(f"page.*: not measured: {MISSING}", file=sys.stderr)
        return
    with served(["--store", "memory"]) as service, launched() as browser:
        names = [f"run-{number}" for number in range(VIEWS)]
        _publish(service, names)
        # Chromium's own start is nobody's.
        _view(browser, service, names[0])
        views = [_view(browser, service, name) for name in names]
        yield Figure("page.first_view_s", statistics.median(views), "s", 1.0)
        yield Figure("page.longest_first_view_s", max(views), "s", None)
        alone = _cpu_share(service, names[0], scrapes=False)
        with _opened(browser, service, names[0]):
            open_ = _cpu_share(service, names[0], scrapes=True)
        yield Figure("page.cpu_percent", 100 * (open_ - alone), "% of a core", 2.0)
    yield Figure("page.long_run_first_view_s", long_run_view(), "s", 1.0)


def long_run_view() -> float:
    """Seconds from the navigation until a run of 64 ranks and 10,000 batches is shown: its newest batch's shards, and
    the curves of all. The middle one of several windows that have nothing of the page."""
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    service.start()
    try:
        run = _long_run(service)
        with launched() as browser:
            return statistics.median(_long_view(browser, service.http_url, run.name) for _ in range(VIEWS))
    finally:
        service.stop()


def _long_run(service: Service) -> Run:
    work = workload("short")
    config = work.config("none", LONG_RUN_RANKS)
    service.runs.create("long", config)
    run = service.runs.get("long")
    run.begin_groups(0, list(dict.fromkeys(work.steps.uids)))
    run.submit(work.steps)
    while not run.status().batches_published:
        time.sleep(0.05)
    # As if it had been so all the while: what a batch leaves is its record.
    run.read(lambda state, _: _remember(state.records))
    return run


def _remember(records: list[Figures]) -> None:
    [first] = records
    for number in range(1, LONG_RUN_BATCHES):
        keep(records, replace(first, first=number, last=number, at=first.at + number))


def _long_view(browser: Any, http_url: str, run: str) -> float:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        page.goto(f"{http_url}/#/{run}")
        marks = "['picture drawn', 'history drawn'].map(name => performance.getEntriesByName(name)[0]?.startTime)"
        while not all(times := page.evaluate(marks)):
            time.sleep(0.05)
        return float(max(times)) / 1000
    finally:
        context.close()


def _publish(service: Served, names: list[str]) -> None:
    work = workload("short")
    config, uids = work.config("none").model_dump(exclude_defaults=True), list(dict.fromkeys(work.steps.uids))
    sender = Sender(service.grpc_address, list(split(work)))
    for name in names:
        with RolloutClient(service.grpc_address, name, timeout_s=60) as client:
            client.create_run(config)
            client.begin_groups(uids)
            sender.seconds(name)
    sender.close()
    for name in names:
        with TrainerClient(service.grpc_address, name, rank=0, dp_size=DP_SIZE, timeout_s=60) as trainer:
            next(iter(trainer))


def _view(browser: Any, service: Served, name: str) -> float:
    with _opened(browser, service, name) as page:
        return float(page.evaluate("performance.getEntriesByName('picture drawn')[0].startTime")) / 1000


@contextmanager
def _opened(browser: Any, service: Served, name: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        page.goto(f"{service.http_url}/#/{name}")
        page.locator("section[aria-label=Shards] canvas").first.wait_for()
        yield page
    finally:
        context.close()


def _cpu_share(service: Served, run: str, *, scrapes: bool) -> float:
    """CPU seconds that the service takes in a second in which groups come, so that the page has always news."""
    with RolloutClient(service.grpc_address, run, timeout_s=60) as client:
        begin, before = time.monotonic(), cpu_s(service.process.pid)
        scraped = 0.0
        while (now := time.monotonic()) < begin + WATCHED_S:
            client.begin_groups([f"{run}-{now}"])
            if scrapes and now - scraped >= _SCRAPE_S:
                scraped = now
                scrape(service)
            time.sleep(_NEWS_S)
        return (cpu_s(service.process.pid) - before) / (time.monotonic() - begin)
