"""Several services on one Redis: whatever becomes of the one that owns a run, the others go on."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from gristmill.v1 import rollout_pb2
from tests.api.apis import Api, Refused, rows_message
from tests.faults.services import (
    COMMAND,
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
from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer

LEASE_S = 3.0


class TestTheOwnerGoes:
    @pytest.fixture
    def start(self, services: Services, shared_redis: RedisServer, run: str) -> Callable[..., tuple[Service, Service]]:
        """An owner of the run, and another."""

        def begin(lease_s: float = LEASE_S) -> tuple[Service, Service]:
            both = services.start(2, *on_redis(shared_redis.url, lease_s, run))
            both[0].grpc.create(run, CONFIG)
            first = owner(both, run)
            return first, next(one for one in both if one is not first)

        return begin

    def test_killed_it_is_replaced_within_seconds_and_nothing_is_lost(
        self, start: Callable[[], tuple[Service, Service]], run: str
    ) -> None:
        first, second = start()
        first.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
        before = first.grpc.batch(run, 0, wait_s=20)
        data = second.grpc.read(run, 0, 0, 0)
        first.grpc.announce(run, 4)
        resumed = first.grpc.resume(run, "launch")
        first.kill()
        killed = time.monotonic()
        assert second.grpc.read(run, 0, 0, 0) == data, "shards need no owner"
        after = patiently(lambda: second.grpc.batch(run, 0))
        assert time.monotonic() - killed < 15
        assert after == before
        assert second.grpc.policy_version(run) == 4
        assert second.grpc.submit(run, [*group("a"), *group("c")]) == ["duplicate"] * 4
        assert second.grpc.shard(run, 0, incarnation=resumed["incarnation"])["incarnation"] == resumed["incarnation"]
        assert train(second.grpc, run, 0) == data
        assert second.grpc.submit(run, group("d")) == ["accepted"] * 2
        assert sorted(set(uids_of(train(second.http, run, 1)))) == ["c", "d"]

    def test_a_replica_that_stops_meanwhile_does_not_hold_the_calls_that_it_passed_on(
        self, start: Callable[..., tuple[Service, Service]], run: str
    ) -> None:
        first, second = start(lease_s=30)
        first.pause()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(second.grpc.get, run)
            time.sleep(0.5)
            second.terminate()
            stopped = time.monotonic()
            with pytest.raises(Refused, match="UNAVAILABLE"):
                call.result()
            assert time.monotonic() - stopped < 2
        first.resume()

    def test_stopped_beyond_its_lease_it_seals_and_publishes_nothing_when_it_wakes_up(
        self, start: Callable[[], tuple[Service, Service]], run: str
    ) -> None:
        first, second = start()
        first.grpc.submit(run, group("a"))
        first.pause()
        try:
            # It takes the run over by itself.
            assert owner([second], run) is second
            assert second.grpc.submit(run, group("b")) == ["accepted"] * 2
            assert second.grpc.batch(run, 0, wait_s=20)["state"] == "published"
            data = second.grpc.read(run, 0, 0, 0)
            status = second.grpc.get(run)
        finally:
            first.resume()
        # Asked as itself, its answer is the new owner's, or none.
        assert patiently(lambda: first.grpc.submit(run, group("c"))) == ["accepted"] * 2
        assert patiently(lambda: first.grpc.read(run, 0, 0, 0)) == data
        after = second.grpc.get(run)
        assert (after["batches_sealed"], after["rows_accepted"]) == (1, status["rows_accepted"] + 2)
        assert owner([first, second], run) is second
        assert patiently(lambda: first.grpc.get(run)) == after
        assert train(first.grpc, run, 0) == data
        assert first.trouble == ""

    def test_a_call_passed_on_to_an_owner_that_hangs_ends_when_another_takes_the_run_over(
        self, start: Callable[[], tuple[Service, Service]], run: str
    ) -> None:
        first, second = start()
        second.grpc.get(run)
        request = rollout_pb2.SubmitRowsRequest(run=run, rows=rows_message(group("a")))
        first.pause()
        try:
            with pytest.raises(grpc.RpcError) as refused:
                second.grpc.rollouts.SubmitRows(request, timeout=15)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert patiently(lambda: second.grpc.submit(run, group("a"))) == ["accepted"] * 2
        finally:
            first.resume()

    def test_asked_to_stop_it_hands_over_at_once(self, start: Callable[..., tuple[Service, Service]], run: str) -> None:
        first, second = start(lease_s := 30.0)
        first.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
        first.grpc.batch(run, 0, wait_s=20)
        waits = threading.Thread(target=lambda: patiently(lambda: second.grpc.batch(run, 1, wait_s=20.0)))
        waits.start()
        assert first.stop() == 0
        stopped = time.monotonic()
        assert patiently(lambda: second.grpc.submit(run, group("d"))) == ["accepted"] * 2
        assert time.monotonic() - stopped < lease_s / 2
        waits.join(20)
        assert not waits.is_alive()
        assert second.grpc.batch(run, 1, wait_s=20)["state"] == "published"

    def test_killed_while_it_deletes_the_run_can_be_deleted_by_the_next(
        self, start: Callable[[], tuple[Service, Service]], run: str, shared_redis: RedisServer
    ) -> None:
        first, second = start()
        for number in range(20):
            first.grpc.submit(run, [*group(f"{number}-a"), *group(f"{number}-b")])
        eventually(lambda: first.grpc.get(run)["batches_published"] == 20, "all is made")
        with ThreadPoolExecutor(1) as pool:
            deleting = pool.submit(first.grpc.delete, run)
            time.sleep(0.005)
            first.kill()
            deleting.exception()

        def deleted() -> bool:
            try:
                second.grpc.delete(run)
            except Refused as refused:
                if refused.code != "NOT_FOUND":
                    raise
            return True

        eventually(deleted, "it is deleted")
        second.grpc.create(run, CONFIG)
        assert second.grpc.get(run)["batches_sealed"] == 0
        second.grpc.submit(run, [*group("a"), *group("b")])
        assert sorted(set(uids_of(train(second.grpc, run, 0)))) == ["a", "b"]


class TestOneIsCutOff:
    @pytest.fixture
    def near_and_far(
        self, services: Services, shared_redis: RedisServer, proxy: Proxy, run: str
    ) -> tuple[Service, Service]:
        """One next to Redis, and the run's owner, which the proxy may cut off."""
        near = services.begin(*on_redis(shared_redis.url, LEASE_S))
        far = services.begin(*on_redis(proxy.url, LEASE_S))
        far.ready()
        far.grpc.create(run, CONFIG)
        assert owner([far], run) is far
        near.ready()
        return near, far

    def test_it_says_so_and_the_others_go_on_until_it_is_back(
        self, near_and_far: tuple[Service, Service], proxy: Proxy, run: str
    ) -> None:
        near, far = near_and_far
        far.grpc.submit(run, group("a"))
        proxy.refuse()
        proxy.cut()
        begun = time.monotonic()
        assert patiently(lambda: near.grpc.submit(run, group("b"))) == ["accepted"] * 2
        assert time.monotonic() - begun < 15
        assert "Redis at" in eventually(lambda: far.trouble, "it is reported")
        for api in (far.grpc, far.http):
            with pytest.raises(Refused) as refused:
                api.submit(run, group("c"))
            assert refused.value.code == "UNAVAILABLE"
            assert refused.value.retry_after_s
        assert far.probe("/healthz").status_code == 200
        assert near.trouble == ""
        data = train(near.grpc, run, 0)
        assert sorted(set(uids_of(data))) == ["a", "b"]
        proxy.accept()
        assert patiently(lambda: far.grpc.submit(run, group("c"))) == ["accepted"] * 2
        eventually(lambda: far.trouble == "", "it is ready again")
        assert far.grpc.get(run) == near.grpc.get(run)

    def test_a_network_that_goes_silent_is_answered_within_seconds_and_never_takes_the_probes_down(
        self, near_and_far: tuple[Service, Service], proxy: Proxy, run: str
    ) -> None:
        near, far = near_and_far
        proxy.freeze()
        slowest, codes, lock = 0.0, list[str](), threading.Lock()

        def call(api: Api) -> None:
            nonlocal slowest
            begun = time.monotonic()
            with pytest.raises(Refused) as refused:
                api.submit(run, group("a"))
            with lock:
                codes.append(refused.value.code)
                slowest = max(slowest, time.monotonic() - begun)

        with ThreadPoolExecutor(10) as pool:
            calls = [pool.submit(call, api) for api in (far.grpc, far.http) for _ in range(5)]
            while not all(each.done() for each in calls):
                assert far.probe("/healthz", timeout_s=4.5).status_code == 200
                time.sleep(0.1)
            for each in calls:
                each.result()
        assert set(codes) == {"UNAVAILABLE"}
        assert slowest < 20
        assert "Redis at" in far.trouble
        assert patiently(lambda: near.grpc.submit(run, group("b"))) == ["accepted"] * 2
        proxy.thaw()
        assert patiently(lambda: far.grpc.submit(run, group("a"))) == ["accepted"] * 2
        assert sorted(set(uids_of(train(far.http, run, 0)))) == ["a", "b"]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_one_that_listens_everywhere_reports_to_the_others_where_or_does_not_start(
    shared_redis: RedisServer, address: str
) -> None:
    command = [
        *COMMAND,
        *on_redis(shared_redis.url),
        "--grpc-address",
        address,
        "--http-address",
        "127.0.0.1:0",
        "--insecure",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == ""
            assert process.wait(30) == 2
            assert "advertise_grpc_address" in process.stderr.read()
        finally:
            process.kill()


def test_all_of_them_ended_and_started_again_the_run_goes_on(
    services: Services, shared_redis: RedisServer, run: str
) -> None:
    first, second = services.start(2, *on_redis(shared_redis.url, LEASE_S, run))
    first.grpc.create(run, CONFIG)
    first.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
    first.grpc.batch(run, 0, wait_s=20)
    data = first.grpc.read(run, 0, 0, 0)
    for one in (first, second):
        one.terminate()
    assert [one.process.wait(30) for one in (first, second)] == [0, 0]
    [third] = services.start(1, *on_redis(shared_redis.url, LEASE_S, run))
    assert patiently(lambda: third.grpc.submit(run, group("d"))) == ["accepted"] * 2
    assert train(third.grpc, run, 0) == data
    assert sorted(set(uids_of(train(third.grpc, run, 1)))) == ["c", "d"]
