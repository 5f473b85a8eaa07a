"""Calls to storage are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.monitoring.metrics import StoreMetrics
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.row_tables import steps_of
from tests.faults.services import Services, eventually, on_redis
from tests.metrics.scraping import Scrape, scrape
from tests.run.harness import group_rows, table


class Watched:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = StoreMetrics(self._registry)

    def calls(self, name: str = "gristmill_store_seconds_count") -> dict[str, float]:
        counts = Scrape(generate_latest(self._registry).decode()).of(name)
        return {operation: count for operation, count in counts.items() if count}


def test_a_journals_calls_are_counted_and_do_what_they_did(tmp_path: Path) -> None:
    watched = Watched()
    store = watched.metrics.timed(JournalRunStore(tmp_path))
    log = store.create("run", b"{}")
    assert list(log.replay().records) == []
    before = log.log_bytes
    log.append(b"something happened", {3: table(*group_rows("a"))})
    log.flush()
    assert steps_of(log.get(3)).uids == ["a", "a"]
    assert log.log_bytes > before
    assert log.lease is None
    log.close()
    store.close()
    assert watched.calls() == {"replay": 1, "append": 1, "flush": 1, "get": 1}


def test_what_fails_is_an_error_and_what_is_not_there_is_none() -> None:
    watched = Watched()
    store = watched.metrics.timed(MemoryShardStore())
    with pytest.raises(NotFoundError):
        store.plan("run", 0)

    def refuse() -> None:
        raise UnavailableError("the disk is gone")

    with pytest.raises(UnavailableError):
        watched.metrics.call("append", refuse)
    assert watched.calls("gristmill_store_errors_total") == {"append": 1}
    assert watched.calls() == {}


def test_how_full_redis_is(services: Services, redis_url: str) -> None:
    service = services.start(1, *on_redis(redis_url))[0]
    assert set(scrape(service.http_url).of("gristmill_store_limit_bytes")) == {"rows"}, "it has no bound of its own"
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", "1gb")
    limit = eventually(lambda: scrape(service.http_url).of("gristmill_store_limit_bytes").get("redis"), "it is seen")
    assert limit == 1 << 30
    assert 0 < scrape(service.http_url).one("gristmill_store_used_bytes", store="redis") < limit
