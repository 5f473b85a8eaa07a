"""Runs on Redis that ended are closed: no replica takes one over until a call for it comes to any of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import pytest

from gristmill.errors import NotFoundError
from gristmill_service.monitoring.health.report import described, reported
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.storage.run_store import OwnedElsewhereError
from tests.faults.replicas import CREATED, Join, Replica, keys, published
from tests.redis.servers import RedisServer, wait_until
from tests.run.harness import group_rows, table

DORMANT_S = 1.0
SEVERAL_LOOKS_S = 3.0


@pytest.fixture
def replicas(server: RedisServer, join: Join) -> list[Replica]:
    return [join(server.url, name, describe=described, dormant_after_s=DORMANT_S) for name in ("first", "second")]


def end(replica: Replica) -> None:
    """Creates a run, trains its one batch and finishes it."""
    replica.runs.create("run", CREATED)
    run = replica.runs.get("run")
    run.submit(table(*group_rows("a")))
    wait_until(lambda: published(replica, "run", 0), "it is published")
    answer = run.shard("policy", 0, None, 0)
    run.acknowledge("policy", 0, answer.position, 0, True)
    run.finish()


def is_dormant(replicas: Sequence[Replica]) -> bool:
    return all(not one.runs.own() and one.runs.leases()["dormant"] == 1 for one in replicas)


def test_no_replica_owns_a_dormant_run_and_a_call_to_either_opens_it(
    server: RedisServer, replicas: list[Replica]
) -> None:
    first, second = replicas
    end(first)
    run_id = first.runs.get("run").run_id
    wait_until(lambda: is_dormant(replicas), "it is dormant")
    assert not server.client().exists(first.run_store._keys("run").owner), "its lease is released"
    time.sleep(SEVERAL_LOOKS_S)
    assert is_dormant(replicas)
    for one in replicas:
        assert (one.runs.names(), one.runs.leases()["nobody"]) == (["run"], 0)
        report = reported(one.runs.descriptions(["run"])["run"])
        assert report is not None
        assert (report.status.run_id, report.status.finished, report.state) == (run_id, True, "finished")
    assert second.runs.get("run").batch(1).state is BatchState.END
    assert second.runs.get("run").run_id == run_id
    assert first.runs.descriptions(["run"]) == {}, "at once"
    wait_until(lambda: first.runs.leases()["elsewhere"] == 1, "the other sees the owner")
    wait_until(lambda: is_dormant(replicas), "it is dormant again")


def test_the_owners_death_makes_no_dormant_run_anybodys(server: RedisServer, replicas: list[Replica]) -> None:
    first, second = replicas
    end(first)
    wait_until(lambda: is_dormant(replicas), "it is dormant")
    first.die()
    time.sleep(SEVERAL_LOOKS_S)
    assert second.runs.own() == []
    assert second.runs.get("run").status().finished


def test_a_dormant_run_is_deleted_by_a_replica_that_never_opened_it(
    server: RedisServer, replicas: list[Replica]
) -> None:
    first, second = replicas
    end(first)
    wait_until(lambda: is_dormant(replicas), "it is dormant")

    def deleted() -> bool:
        # A run is marked as dormant shortly before its owner releases it; until then the API forwards the call.
        with suppress(OwnedElsewhereError):
            second.runs.delete("run")
            return True
        return False

    wait_until(deleted, "it is released and deleted")
    assert {*keys(server, "run")} <= {"runs:probe"}
    for one in replicas:
        with pytest.raises(NotFoundError):
            one.runs.get("run")
    wait_until(lambda: not any(one.runs.leases()["dormant"] for one in replicas), "both know")
    assert [one.run_store._known for one in replicas] == [{}, {}]


def test_a_mark_of_a_run_that_has_an_owner_is_removed(server: RedisServer, replicas: list[Replica]) -> None:
    first, second = replicas
    first.runs.create("run", CREATED)
    server.client().hset(first.run_store._dormant, "run", "late")
    wait_until(lambda: first.run_store.dormant() == [], "the owner removes it")
    wait_until(lambda: second.runs.leases()["dormant"] == 0, "the other sees it")
    assert [run.name for run in first.runs.own()] == ["run"]


def test_a_replica_forgets_a_run_that_another_deletes(server: RedisServer, replicas: list[Replica]) -> None:
    first, second = replicas
    first.runs.create("run", CREATED)
    wait_until(lambda: "run" in second.run_store._known, "it knows the owner")
    first.runs.delete("run")
    wait_until(lambda: second.run_store._known == {}, "it is forgotten")
