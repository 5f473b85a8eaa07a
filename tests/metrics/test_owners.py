"""Counters survive nothing that they should not: deletion, a restart, another owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.apis import CONFIG
from tests.faults.services import CONFIG as SMALL
from tests.faults.services import Services, eventually, group, on_redis, owner, patiently, train
from tests.metrics.scraping import scrape

LEASE_S = 3.0


def test_a_deleted_run_has_no_series_and_one_of_its_name_begins_at_0(services: Services) -> None:
    service = services.start(1, "--store", "memory")[0]
    service.grpc.create("run", CONFIG)
    service.grpc.submit("run", group("a"))
    service.grpc.shard("run", 0)
    assert "run" in scrape(service.http_url).runs()
    service.grpc.delete("run")
    assert scrape(service.http_url).runs() == set()
    service.grpc.create("run", CONFIG)
    scraped = scrape(service.http_url)
    assert set(scraped.of("gristmill_rows_total").values()) == {0}
    assert scraped.of("gristmill_rank_pulls_total") == {}


def test_a_restart_begins_at_0_and_counts_nothing_again(services: Services, tmp_path: Path) -> None:
    flags = ["--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path)]
    first = services.start(1, *flags)[0]
    first.grpc.create("run", SMALL)
    first.grpc.submit("run", [*group("a"), *group("b"), *group("c")])
    patiently(lambda: first.grpc.batch("run", 0, wait_s=20))
    before = scrape(first.http_url)
    assert before.one("gristmill_batch_rows_total", kind="submitted") == 4
    assert before.one("gristmill_journal_bytes") > 0
    assert before.of("gristmill_store_used_bytes").keys() == {"rows", "journal", "shared_memory"}
    first.kill()
    again = services.start(1, *flags)[0]
    # Its shards died with the process, and are rebuilt.
    eventually(lambda: again.grpc.batch("run", 0)["state"] == "published", "rebuilt")
    after = scrape(again.http_url)
    assert after.one("gristmill_publish_seconds_count") == 1
    for name in ("gristmill_rows_total", "gristmill_tokens_total", "gristmill_batch_rows_total"):
        assert set(after.of(name).values()) == {0}, name
    assert after.one("gristmill_batches_total", stage="published") == 1, "the run's own history goes on"
    again.grpc.submit("run", group("d"))
    assert scrape(again.http_url).one("gristmill_rows_total", outcome="accepted") == 2


@pytest.mark.slow
def test_a_run_that_moves_is_reported_by_one_replica_and_counted_once(services: Services, redis_url: str) -> None:
    one, two = services.start(2, *on_redis(redis_url, LEASE_S))
    one.grpc.create("run", SMALL)
    # Through either, it is the owner that counts.
    one.grpc.submit("run", [*group("a"), *group("b")])
    two.grpc.submit("run", [*group("c"), *group("d")])
    first = owner([one, two], "run")
    second = two if first is one else one
    eventually(lambda: first.grpc.batch("run", 1)["state"] == "published", "both are made")
    before = scrape(first.http_url)
    assert before.one("gristmill_rows_total", outcome="accepted") == 8
    assert before.one("gristmill_batch_rows_total", kind="submitted") == 8
    assert 0 < before.one("gristmill_lease_seconds") <= LEASE_S
    assert before.one("gristmill_leases", state="own") == 1
    assert scrape(second.http_url).runs() == set()
    eventually(lambda: scrape(second.http_url).one("gristmill_leases", state="elsewhere") == 1, "it sees the owner")
    first.kill()
    patiently(lambda: second.grpc.submit("run", [*group("e"), *group("f")]))
    eventually(lambda: second.grpc.batch("run", 2)["state"] == "published", "made by the other")
    after = scrape(second.http_url)
    # With what the first reported: each row once.
    assert after.one("gristmill_rows_total", outcome="accepted") == 4
    assert after.one("gristmill_batch_rows_total", kind="submitted") == 4
    assert after.one("gristmill_batches_total", stage="sealed") == 3
    train(second.grpc, "run", 0)
