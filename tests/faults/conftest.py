"""Services and Redis servers that a test may kill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.replicas import Join, Replica
from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer, StartRedis

_numbers = itertools.count()


@pytest.fixture
def run() -> str:
    """A name that no other test uses."""
    return f"trouble-{next(_numbers)}"


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[StartRedis]:
    """Starts servers of the test's own, which it may kill, pause and restart; stopped with the test."""
    with ExitStack() as started:
        count = itertools.count()
        yield lambda **options: started.enter_context(RedisServer(tmp_path / f"redis-{next(count)}", **options))


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for all tests of a module that do it no harm."""
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server


@pytest.fixture
def proxy(shared_redis: RedisServer) -> Iterator[Proxy]:
    """A network to it that a test may break."""
    with Proxy(shared_redis.port) as running:
        yield running


@pytest.fixture
def server(shared_redis: RedisServer) -> RedisServer:
    shared_redis.client().flushall()
    return shared_redis


@pytest.fixture
def join() -> Iterator[Join]:
    with ExitStack() as opened:

        def start(url: str, name: str = "one", lease_s: float = 3.0, **more: Any) -> Replica:
            replica = Replica(url, name, lease_s, **more)
            opened.callback(replica.close)
            return replica

        yield start
