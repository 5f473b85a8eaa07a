"""Redis servers for tests: a shared fast one, and any that a test starts for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.redis.servers import RedisCluster, RedisServer, StartRedis


@pytest.fixture(scope="module")
def _module_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server


@pytest.fixture
def redis_server(_module_redis: RedisServer) -> RedisServer:
    """A module's server that keeps nothing on disk, empty at the start of each test. Leave it running."""
    _module_redis.client().flushall()
    return _module_redis


@pytest.fixture(scope="module")
def _module_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(_module_cluster: RedisCluster) -> RedisCluster:
    """A module's cluster that keeps nothing on disk, empty at the start of each test. Leave its nodes running."""
    for node in _module_cluster.nodes:
        node.client().flushall()
    return _module_cluster


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[StartRedis]:
    """Starts servers of the test's own, which it may kill, pause and restart; stopped with the test."""
    with ExitStack() as started:
        count = 0

        def start(**options: Any) -> RedisServer:
            nonlocal count
            count += 1
            return started.enter_context(RedisServer(tmp_path / f"redis-{count}", **options))

        yield start
