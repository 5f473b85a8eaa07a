"""The page asks any replica, and what a run reported before a restart it reports after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.apis import Refused
from tests.faults.services import Services, on_redis, owner
from tests.page.stage import CONFIG, group
from tests.redis.servers import RedisServer

BATCH = "batches/0"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", appendonly="no") as server:
        yield server


def answers(service: Any, run: str) -> dict[str, Any]:
    """All that does not depend on when it is asked."""
    return {
        what: service.http.call("GET", f"/runs/{run}/{BATCH}/{what}").json() for what in ("picture", "breaks", "scores")
    }


def fill(service: Any, run: str) -> None:
    service.http.begin(run, ["a", "b"])
    service.http.submit(run, [*group("a"), *group("b")])
    assert service.http.batch(run, 0, wait_s=20)["state"] == "published"


def test_a_replica_that_does_not_own_the_run_passes_the_questions_on(services: Services, redis: RedisServer) -> None:
    replicas = services.start(2, *on_redis(redis.url))
    replicas[0].http.create("r", CONFIG)
    fill(replicas[0], "r")
    run_owner = owner(replicas, "r")
    other = next(one for one in replicas if one is not run_owner)
    assert answers(other, "r") == answers(run_owner, "r")
    assert answers(other, "r")["breaks"]["in_all"] == 2
    health = other.http.call("GET", "/runs/r/health")
    assert health.json()["batches_published"] == 1
    assert health.headers["etag"]
    assert other.http.call("GET", "/runs/r/timeline").json()["ranks_in_all"] == 2
    # Of runs that it does not own it knows the names alone.
    assert other.http.call("GET", "/overview").json()["runs"] == [{"run": "r"}]
    assert run_owner.http.call("GET", "/overview").json()["runs"][0]["state"] == "no trainer"


def test_pictures_are_the_same_after_a_restart(services: Services, tmp_path: Path) -> None:
    flags = ["--journal-dir", str(tmp_path / "journal"), "--store", "memory"]
    [first] = services.start(1, *flags)
    first.http.create("r", CONFIG)
    fill(first, "r")
    before = answers(first, "r")
    first.process.kill()
    first.process.wait()
    [second] = services.start(1, *flags)
    assert second.http.batch("r", 0, wait_s=20)["state"] == "published"
    assert answers(second, "r") == before


def test_after_a_restart_freed_batches_are_gone_and_the_answer_says_so(services: Services, tmp_path: Path) -> None:
    flags = ["--journal-dir", str(tmp_path / "journal"), "--store", "memory"]
    [first] = services.start(1, *flags)
    first.http.create("r", CONFIG)
    fill(first, "r")
    before = answers(first, "r")
    for rank in range(2):
        for mini_batch in range(2):
            first.http.acknowledge("r", rank, {"batch": 0, "epoch": 0, "mini_batch": mini_batch}, commit=True)
    assert first.http.get("r")["batches_freed"] == 1
    assert answers(first, "r") == before
    first.process.kill()
    first.process.wait()
    [second] = services.start(1, *flags)
    with pytest.raises(Refused, match="batch 0 is freed, and its numbers are gone"):
        answers(second, "r")
