"""Measures how long a run is without an owner when the replica that owns it is killed."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from gristmill import RolloutClient
from tests.redis.servers import RedisServer
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import Served, served
from tests.tools.bench.submissions import config

KILLS = 5


def figures() -> Iterator[Figure]:
    """With the lease that a service has by default. The bound is that lease."""
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory), appendonly="everysec") as server:
        times = [_takeover(server, f"run-{number}") for number in range(KILLS)]
    yield Figure("takeover.seconds", statistics.median(times), "s", 5.0, 3.0, "s lease")
    yield Figure("takeover.longest_seconds", max(times), "s", None)


def _takeover(server: RedisServer, run: str) -> float:
    """From the kill until the client's next call is decided by the other replica."""
    flags = ["--store", "redis", "--redis-url", server.url]
    with ExitStack() as opened:
        both = [opened.enter_context(served(flags)) for _ in range(2)]
        addresses = ",".join(one.grpc_address for one in both)
        client = opened.enter_context(RolloutClient(addresses, run, timeout_s=60))
        client.create_run(config().model_dump(exclude_defaults=True))
        client.begin_groups(["before"])
        owner = next(one for one in both if owns(one, run))
        owner.process.kill()
        owner.process.wait()
        begin = time.perf_counter()
        assert client.begin_groups(["after"]) == ["after"]
        return time.perf_counter() - begin


def owns(one: Served, run: str) -> bool:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{one.http_url}/metrics") as answer:
        return re.search(rf'gristmill_groups{{run="{run}"', answer.read().decode()) is not None
