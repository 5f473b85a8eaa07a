"""Measures how soon the page shows a batch of 3,500 rows, and what an open page costs the service."""

from __future__ import annotations

import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill import RolloutClient, TrainerClient
from tests.bench.figures import Figure
from tests.bench.processes import Served, served
from tests.bench.submissions import Sender, split
from tests.bench.workloads import DP_SIZE, workload
from tests.page.chromium import MISSING, found, launched

VIEWS = 7
WATCHED_S = 30.0
_SCRAPE_S = 15.0
_NEWS_S = 1.0


def figures() -> Iterator[Figure]:
    """first_view_s: from the navigation until the shards are drawn, the batch never looked at before, in a window that
    has nothing of the page. cpu_percent: of one core, for a page that is open on a run to which groups come, and
    a scrape each 15 s; what the service takes with neither is taken off."""
    if found() is None:
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
        begin, before = time.monotonic(), _cpu_seconds(service)
        scraped = 0.0
        while (now := time.monotonic()) < begin + WATCHED_S:
            client.begin_groups([f"{run}-{now}"])
            if scrapes and now - scraped >= _SCRAPE_S:
                scraped = now
                _scrape(service)
            time.sleep(_NEWS_S)
        return (_cpu_seconds(service) - before) / (time.monotonic() - begin)


def _scrape(service: Served) -> None:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{service.http_url}/metrics") as answer:
        answer.read()


def _cpu_seconds(service: Served) -> float:
    # What stands before the name's end may hold spaces; user and system time are the 14th and 15th of all.
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
