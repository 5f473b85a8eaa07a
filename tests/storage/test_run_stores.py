"""What every run store promises, whatever it stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory_runs import MemoryRunStore
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.run_store import RunStore
from tests.redis.servers import RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server


def in_memory(request: pytest.FixtureRequest) -> MemoryRunStore:
    return MemoryRunStore()


def in_journal(request: pytest.FixtureRequest) -> JournalRunStore:
    return JournalRunStore(request.getfixturevalue("tmp_path"))


def in_redis(request: pytest.FixtureRequest) -> RedisRunStore:
    client = request.getfixturevalue("redis_server").client()
    client.flushall()
    store = RedisRunStore(client, "gristmill", 30.0)
    store.advertise("grpc", "http")
    return store


@pytest.fixture(params=[in_memory, in_journal, in_redis], ids=["memory", "journal", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    store = request.param(request)
    yield store
    store.close()


@pytest.mark.parametrize(
    "config",
    [b'{"a":18446744073709551616}', b'{"a":-9223372036854775809}', b'{"a":1' + b"0" * 400 + b"}", b'{"a":NaN}', b"{"],
)
def test_a_configuration_that_could_not_be_read_again_makes_no_run(store: RunStore, config: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="run 'run': its configuration cannot be stored as JSON"):
        store.create("run", config)
    assert store.names() == []
    with pytest.raises(NotFoundError):
        store.open("run")
