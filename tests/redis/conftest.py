"""Redis servers for tests: a shared fast one, and any that a test starts for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from gristmill_service.storage.redis import keys, tables
from gristmill_service.storage.redis.connection import Client, RedisAddress, connect
from gristmill_service.storage.redis.run_store import RedisRunStore
from tests.redis.cluster import RedisCluster
from tests.redis.opening import Open
from tests.redis.proxy import Proxy
from tests.redis.run_logs import PREFIX, Join
from tests.redis.servers import HOST, RedisServer, StartRedis


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


@pytest.fixture(params=["alone", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Of one server, and of three that share the keys."""
    server: RedisServer | RedisCluster = request.getfixturevalue(
        "redis_server" if request.param == "alone" else "redis_cluster"
    )
    return server.url


@pytest.fixture
def join() -> Iterator[Join]:
    """A store as a process of its own has it, closed with the test."""
    with ExitStack() as opened:

        def start(url: str, number: int = 0, lease_s: float = 30.0) -> RedisRunStore:
            client = opened.enter_context(closing(connect(RedisAddress(url=url))))
            store = RedisRunStore(client, PREFIX, lease_s)
            opened.callback(store.close)
            store.advertise(f"grpc-{number}", f"http-{number}")
            return store

        yield start


@pytest.fixture
def store(url: str, join: Join) -> RedisRunStore:
    return join(url)


@pytest.fixture
def small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (keys, tables):
        monkeypatch.setattr(module, "VALUE_BYTES", 300)
    monkeypatch.setattr(tables, "_SMALL_BYTES", 300)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connects to a URL; closed with the test."""
    with ExitStack() as clients:
        yield lambda url, **rest: clients.enter_context(closing(connect(RedisAddress(url=url, **rest))))


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as running:
        yield running


@pytest.fixture
def through(proxy: Proxy, opened: Open) -> Client:
    return opened(proxy.url)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@pytest.fixture
def tls(redis_server: RedisServer, authority: trustme.CA) -> Iterator[Proxy]:
    with Proxy(redis_server.port, certificate=authority.issue_cert(HOST)) as running:
        yield running
