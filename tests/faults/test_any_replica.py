"""Several services on one Redis: any takes any call, whichever owns the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.apis import Api, Refused
from tests.faults.services import (
    CONFIG,
    Service,
    Services,
    eventually,
    group,
    on_redis,
    owner,
    patiently,
    train,
    uids_of,
)
from tests.redis.servers import RedisServer


@pytest.fixture(scope="module")
def replicas(shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    """Two that every test of the module may call, and none may harm."""
    started = Services(tmp_path_factory.mktemp("replicas"))
    try:
        first, second = started.start(2, *on_redis(shared_redis.url))
        yield first, second
    finally:
        started.close()


@pytest.fixture
def owned(replicas: tuple[Service, Service], run: str) -> Service:
    """The owner of the test's run; `other` is the one that is not."""
    replicas[0].grpc.create(run, CONFIG)
    return owner(replicas, run)


@pytest.fixture
def other(replicas: tuple[Service, Service], owned: Service) -> Service:
    return next(one for one in replicas if one is not owned)


@pytest.fixture(params=["grpc", "http"])
def api(request: pytest.FixtureRequest, other: Service) -> Api:
    """Calls the replica that does not own the run."""
    fixture: Api = getattr(other, request.param)
    return fixture


class TestAnyTakesAnyCall:
    def test_a_whole_run_through_one_that_does_not_decide(
        self, api: Api, owned: Service, other: Service, run: str
    ) -> None:
        assert api.create(run, CONFIG)["created"] is False
        assert run in api.names()
        assert api.begin(run, ["a", "b"]) == ["admitted"] * 2
        late = group("b", reward=None)
        assert api.submit(run, [*group("a"), *late]) == ["accepted"] * 4
        assert api.set_rewards(run, [{"uid": "b", "sample": sample, "reward": float(sample)} for sample in (0, 1)]) == 2
        again, errors = api.submit_by_row(run, [*group("a"), group("z")[0] | {"sample": 9}])
        assert {*again[:2]} <= {"duplicate", "sealed"}
        assert [(index, error.code) for index, error in errors.items()] == [(2, "INVALID_ARGUMENT")]
        assert api.batch(run, 0, wait_s=20)["state"] == "published"
        assert api.table(run, 0) == owned.grpc.table(run, 0)
        api.announce(run, 3)
        assert api.policy_version(run) == 3
        assert api.submit(run, [*group("c"), *group("d"), *group("e")]) == ["accepted"] * 6
        assert api.abort_groups(run, ["e"], "not wanted") == 1
        resumed = api.resume(run, "launch")
        for batch in range(2):
            data = train(api, run, batch, commit=False)
            assert data == owned.grpc.read(run, batch, 0, 0)
        assert api.commit(run, {"batch": 2, "epoch": 0, "mini_batch": 0}, resumed["incarnation"])["batch"] == 2
        assert api.submit(run, group("f")) == ["accepted"] * 2
        assert api.seal(run)["batch"] == 2
        train(api, run, 2)
        assert api.finish(run) == 3
        assert api.shard(run, 0, wait_s=20)["state"] == "end"
        status = api.get(run)
        assert (status["batches_freed"], status["row_bytes"], status["shard_bytes"]) == (3, 0, 0)
        assert status["groups_dropped"] == {"not wanted": 1}
        api.delete(run)
        assert run not in owned.grpc.names()
        with pytest.raises(Refused) as refused:
            api.get(run)
        assert refused.value.code == "NOT_FOUND"

    def test_who_waits_at_one_is_woken_by_what_happens_at_the_other(self, api: Api, owned: Service, run: str) -> None:
        with ThreadPoolExecutor(3) as pool:
            batch = pool.submit(api.batch, run, 0, 20.0)
            shard = pool.submit(lambda: api.shard(run, 0, wait_s=20.0))
            version = pool.submit(api.policy_version, run, 5, 20.0)
            eventually(lambda: "gristmill_waiting_calls 3.0" in owned.probe("/metrics").text, "all three wait")
            start = time.monotonic()
            owned.grpc.submit(run, [*group("a"), *group("b")])
            owned.grpc.announce(run, 5)
            assert batch.result()["state"] == "published"
            assert shard.result()["state"] == "published"
            assert version.result() == 5
            assert time.monotonic() - start < 10

    def test_a_wait_that_ends_with_nothing_is_answered_as_by_the_owner(self, api: Api, run: str) -> None:
        assert api.batch(run, 0, wait_s=0.2) == {"state": "pending"}
        assert api.shard(run, 0, wait_s=0.2)["state"] == "pending"

    def test_a_refusal_is_the_owners_own_word(self, api: Api, owned: Service, run: str) -> None:
        def refusals(at: Api) -> list[tuple[str, str, str]]:
            answers = []
            for call in (
                lambda: at.create(run, {**CONFIG, "dp_size": 2}),
                lambda: at.batch(run, -1),
                lambda: at.shard(run, 7),
                lambda: at.seal(run),
                lambda: at.submit(run, [{**group("a")[0], "sample": 9}]),
                lambda: at.read(run, 77, 0, 0),
                lambda: at.get("no-such-run"),
            ):
                with pytest.raises(Refused) as refused:
                    call()
                answers.append((refused.value.code, refused.value.kind, refused.value.message))
            return answers

        assert refusals(api) == refusals(getattr(owned, "grpc" if api.__class__.__name__ == "GrpcApi" else "http"))

    def test_a_run_created_at_all_at_once_is_one_run(self, replicas: tuple[Service, Service], run: str) -> None:
        names = [f"{run}-{number}" for number in range(5)]
        with ThreadPoolExecutor(8) as pool:
            for name in names:
                apis = [one.grpc for one in replicas] * 2 + [one.http for one in replicas] * 2
                calls = [pool.submit(patiently, lambda api=api, name=name: api.create(name, CONFIG)) for api in apis]
                assert sum(call.result()["created"] for call in calls) <= 1
        for name in names:
            assert {one.grpc.get(name)["rows_accepted"] for one in replicas} == {0}

    def test_other_ranks_asked_for_at_one_that_is_not_the_owner_get_every_batch_cut_again(
        self, other: Service, run: str
    ) -> None:
        stop, errors = threading.Event(), []

        def produce() -> None:
            number = 0
            while not stop.is_set():
                try:
                    other.grpc.submit(run, [*group(f"{number}-x"), *group(f"{number}-y")])
                    number += 1
                except Refused as refused:
                    if refused.code not in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
                        errors.append(refused)
                        return
                    time.sleep(0.05)

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            for turn, dp_size in enumerate([2, 1, 3, 1]):
                eventually(lambda turn=turn: other.grpc.get(run)["batches_published"] > 3 * turn, "batches are made")  # type: ignore[misc]
                resumed = other.http.call(
                    "POST", f"/runs/{run}/resume", {"launch": f"launch-{turn}", "position": None, "dp_size": dp_size}
                ).json()
        finally:
            stop.set()
            producer.join()
        assert not errors
        sealed = other.grpc.get(run)["batches_sealed"]
        seen: list[str] = []
        for batch in range(sealed):
            assert other.grpc.batch(run, batch, wait_s=20)["plan"]["dp_size"] == 1
            seen += set(uids_of(train(other.grpc, run, batch, commit=False)))
        assert resumed["position"]["batch"] == 0
        assert len(seen) == len(set(seen)) == 2 * sealed
