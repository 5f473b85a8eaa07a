"""A service on a Redis that dies, hangs, is slow, full or forgetful: it refuses, says why, and goes on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import redis
import trustme

from tests.api.apis import Refused
from tests.faults.services import (
    CONFIG,
    Services,
    eventually,
    group,
    on_redis,
    patiently,
    train,
    uids_of,
)
from tests.redis.cluster import RedisCluster
from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer, Sentinel, StartRedis, free_port


def refused(call: Callable[[], object], within_s: float = 20) -> Refused:
    """What the call is refused with, soon."""
    begun = time.monotonic()
    with pytest.raises(Refused) as caught:
        call()
    assert time.monotonic() - begun < within_s
    return caught.value


def fill(admin: redis.Redis) -> None:
    """Stores values until there is no room, also after the server has shrunk the buffers of its connections."""
    numbers, before = itertools.count(), -1
    while True:
        with suppress(redis.exceptions.OutOfMemoryError):
            for filler in numbers:
                admin.set(f"filler-{filler}", bytes(4096))
        if filler - before <= 1:
            return
        before = filler
        time.sleep(3)


class TestItDies:
    def test_unreachable_for_longer_than_the_lease_it_is_refused_and_goes_on(
        self, services: Services, start_redis: StartRedis, run: str
    ) -> None:
        server = start_redis(appendonly="always")
        [service] = services.start(1, *on_redis(server.url, lease_s := 3.0))
        service.grpc.create(run, CONFIG)
        service.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
        service.grpc.batch(run, 0, wait_s=20)
        data = service.grpc.read(run, 0, 0, 0)
        server.stop()
        assert "Redis at" in eventually(lambda: service.trouble, "it is reported")
        time.sleep(lease_s)
        for api in (service.grpc, service.http):
            for call in (
                lambda api=api: api.submit(run, group("d")),
                lambda api=api: api.create(f"{run}-new", CONFIG),
            ):
                error = refused(call)
                assert error.code == "UNAVAILABLE"
                assert error.retry_after_s
                assert "Redis" in error.message
        assert service.probe("/healthz").status_code == 200
        server.start()
        assert patiently(lambda: service.grpc.submit(run, group("d"))) == ["accepted"] * 2
        assert train(service.grpc, run, 0) == data
        assert sorted(set(uids_of(train(service.grpc, run, 1)))) == ["c", "d"]

    def test_without_a_log_on_disk_all_is_lost_cleanly_and_the_service_goes_on(
        self, services: Services, start_redis: StartRedis, run: str
    ) -> None:
        """The truth of `appendonly no`: the run is unknown afterwards, its rows have to be sent again."""
        server = start_redis(appendonly="no")
        [service] = services.start(1, *on_redis(server.url))
        assert "appendonly is no" in service.log
        service.grpc.create(run, CONFIG)
        service.grpc.submit(run, [*group("a"), *group("b")])
        service.grpc.batch(run, 0, wait_s=20)
        server.kill()
        server.start()
        for api in (service.grpc, service.http):
            eventually(lambda api=api: _is_unknown(lambda: api.submit(run, group("c"))), "the run is not known")  # type: ignore[misc]
        assert service.grpc.names() == []
        assert patiently(lambda: service.grpc.create(run, CONFIG))["created"]
        service.grpc.submit(run, [*group("a"), *group("b")])
        assert sorted(set(uids_of(train(service.grpc, run, 0)))) == ["a", "b"]
        eventually(lambda: service.trouble == "", "it is ready")

    def test_while_it_is_unreachable_the_service_ends_within_its_grace(
        self, services: Services, start_redis: StartRedis, run: str
    ) -> None:
        server = start_redis(appendonly="always")
        gone, silent = services.begin(*on_redis(server.url)), Proxy(server.port)
        with silent:
            hanging = services.begin(*on_redis(silent.url))
            for one in (gone.ready(), hanging.ready()):
                for number in range(4):
                    one.grpc.create(f"{run}-{one.process.pid}-{number}", CONFIG)
            silent.freeze()
            server.pause()
            begun = time.monotonic()
            hanging.terminate()
            server.resume()
            server.stop()
            gone.terminate()
            assert gone.process.wait(30) == 0
            assert hanging.process.wait(30) == 0
            # The grace is 5 s, and a command that is under way has 5 s.
            assert time.monotonic() - begun < 20


def _is_unknown(call: Callable[[], object]) -> bool:
    try:
        call()
    except Refused as error:
        return error.code == "NOT_FOUND"
    return False


class TestItIsAwayWhenTheServiceStarts:
    def test_the_service_waits_for_it(self, services: Services, start_redis: StartRedis, run: str) -> None:
        server = start_redis(appendonly="always")
        server.stop()
        address = f"127.0.0.1:{free_port()}"
        service = services.begin(*on_redis(server.url), "--http-address", address)
        waiting = eventually(lambda: httpx.get(f"http://{address}/readyz", trust_env=False), "probes are answered")
        assert waiting.status_code == 503
        assert "Redis at" in waiting.json()["error"]["message"]
        assert httpx.get(f"http://{address}/healthz", trust_env=False).json() == {"status": "alive"}
        assert "waiting for the store" in service.log
        server.start()
        service.ready().grpc.create(run, CONFIG)
        assert service.trouble == ""

    def test_the_service_waits_for_sentinels_to_name_a_master(
        self, services: Services, tmp_path: Path, run: str
    ) -> None:
        with Sentinel(tmp_path / "sentinel") as sentinel:
            assert sentinel.replica is not None
            sentinel.replica.stop()
            dead = sentinel.master
            dead.kill()
            service = services.begin(*on_redis(sentinel.url))
            eventually(lambda: "waiting for the store" in service.log, "it says so")
            dead.start()
            service.ready().grpc.create(run, CONFIG)

    def test_who_waits_may_be_asked_to_stop(self, services: Services, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no")
        server.stop()
        service = services.begin(*on_redis(server.url))
        eventually(lambda: "waiting for the store" in service.log, "it waits")
        begun = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - begun < 15

    def test_a_wrong_password_is_refused_at_once(self, services: Services, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no", password="right")
        service = services.begin(*on_redis(f"redis://:wrong@{server.address}"))
        assert service.process.wait(30) == 2
        assert "refused the login" in service.log


class TestItIsSlowOrSilent:
    def test_slow_it_works(self, services: Services, shared_redis: RedisServer, proxy: Proxy, run: str) -> None:
        [service] = services.start(1, *on_redis(proxy.url, lease_s := 3.0))
        service.grpc.create(run, CONFIG)
        proxy.delay(0.05)
        try:
            assert service.grpc.submit(run, [*group("a"), *group("b")]) == ["accepted"] * 4
            assert service.http.batch(run, 0, wait_s=20)["state"] == "published"
            assert sorted(set(uids_of(train(service.http, run, 0)))) == ["a", "b"]
            time.sleep(1.2 * lease_s)
            assert service.grpc.get(run)["batches_freed"] == 1
            assert service.trouble == ""
        finally:
            proxy.delay(0)

    def test_silent_it_is_refused_soon_and_goes_on_when_it_answers(
        self, services: Services, start_redis: StartRedis, run: str
    ) -> None:
        server = start_redis(appendonly="always")
        [service] = services.start(1, *on_redis(server.url))
        service.grpc.create(run, CONFIG)
        service.grpc.submit(run, group("a"))
        server.pause()
        try:
            error = refused(lambda: service.grpc.submit(run, group("b")))
            assert error.code == "UNAVAILABLE"
            assert error.retry_after_s
            eventually(lambda: service.trouble, "it is reported")
            assert refused(lambda: service.http.get(run)).code == "UNAVAILABLE"
            assert service.probe("/healthz").status_code == 200
            assert service.probe("/metrics", timeout_s=10).status_code == 200
        finally:
            server.resume()
        # The call that got no answer may have been carried out when the server woke up.
        assert set(patiently(lambda: service.grpc.submit(run, group("b")))) <= {"accepted", "duplicate", "sealed"}
        assert sorted(set(uids_of(train(service.grpc, run, 0)))) == ["a", "b"]
        assert service.grpc.get(run)["rows_accepted"] == 4


class TestItIsFull:
    @pytest.fixture
    def server(self, start_redis: StartRedis) -> RedisServer:
        server = start_redis(appendonly="no", maxmemory="1gb")
        # Of a small server connections alone take a twentieth.
        server.client().set("ballast", bytes(64 << 20))
        return server

    def test_rows_wait_acknowledgements_do_not_and_it_goes_on_by_itself(
        self, services: Services, server: RedisServer, run: str
    ) -> None:
        admin = server.client()
        [service] = services.start(1, *on_redis(server.url))
        service.grpc.create(run, CONFIG)
        service.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
        service.grpc.batch(run, 0, wait_s=20)
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] / 0.95))
        assert "maxmemory" in eventually(lambda: service.trouble, "it is reported")
        for api in (service.grpc, service.http):
            error = refused(lambda api=api: api.submit(run, group("d")))  # type: ignore[misc]
            assert error.code == "UNAVAILABLE"
            assert "maxmemory" in error.message
        assert sorted(set(uids_of(train(service.http, run, 0)))) == ["a", "b"]
        assert service.grpc.get(run)["batches_freed"] == 1
        admin.config_set("maxmemory", 0)
        assert patiently(lambda: service.grpc.submit(run, group("d"))) == ["accepted"] * 2
        eventually(lambda: service.trouble == "", "it is ready again")
        assert sorted(set(uids_of(train(service.grpc, run, 1)))) == ["c", "d"]

    def test_full_it_can_still_be_taken_over_so_that_acknowledgements_make_room(
        self, services: Services, server: RedisServer, run: str
    ) -> None:
        admin = server.client()
        first, second = services.start(2, *on_redis(server.url))
        first.grpc.create(run, CONFIG)
        first.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
        first.grpc.batch(run, 0, wait_s=20)
        admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] / 0.95))
        eventually(lambda: "maxmemory" in first.trouble and "maxmemory" in second.trouble, "both report it")
        assert second.grpc.get(run)["batches_published"] == 1, "what is passed on needs no room"
        first.kill()
        assert sorted(set(uids_of(train(second.grpc, run, 0)))) == ["a", "b"]

    def test_a_batch_that_found_no_room_is_stored_once_there_is_some(
        self, services: Services, server: RedisServer, run: str
    ) -> None:
        admin = server.client()
        [service] = services.start(1, *on_redis(server.url))
        service.grpc.create(run, CONFIG)
        service.grpc.submit(run, [*group("a"), *group("b")])
        service.grpc.batch(run, 0, wait_s=20)
        # The rows of the second batch fit, its shards do not.
        long = list(range(50_000))
        late = [each | {"response_ids": long, "loss_mask": [1] * len(long)} for each in group("d", reward=None)]
        service.grpc.submit(run, [*group("c"), *late])
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + (1 << 20))
        fill(admin)
        admin.delete(*(f"filler-{number}" for number in range(32)))  # room for a few records of the log
        rewards = [{"uid": "d", "sample": sample, "reward": float(sample)} for sample in range(2)]
        patiently(lambda: service.grpc.set_rewards(run, rewards))
        assert service.grpc.batch(run, 1, wait_s=1)["state"] == "pending"
        admin.config_set("maxmemory", 0)
        assert service.grpc.batch(run, 1, wait_s=9)["state"] == "published", "it is tried each second"


class TestOtherForms:
    def test_a_failover_by_sentinel_is_no_more_than_a_retry(self, services: Services, tmp_path: Path, run: str) -> None:
        with Sentinel(tmp_path / "sentinel") as sentinel:
            [service] = services.start(1, *on_redis(sentinel.url))
            service.grpc.create(run, CONFIG)
            service.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
            service.grpc.batch(run, 0, wait_s=20)
            data = service.grpc.read(run, 0, 0, 0)
            sentinel.master.wait_for_replica()
            sentinel.kill_master()
            assert patiently(lambda: service.grpc.submit(run, group("d"))) == ["accepted"] * 2
            assert train(service.grpc, run, 0) == data
            assert sorted(set(uids_of(train(service.grpc, run, 1)))) == ["c", "d"]
            eventually(lambda: service.trouble == "", "it is ready again")

    def test_over_tls(self, services: Services, shared_redis: RedisServer, tmp_path: Path, run: str) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        with Proxy(shared_redis.port, certificate=authority.issue_cert("127.0.0.1")) as tls:
            [service] = services.start(1, *on_redis(tls.url), "--redis-ca-file", str(tmp_path / "ca.pem"))
            service.grpc.create(run, CONFIG)
            service.grpc.submit(run, [*group("a"), *group("b")])
            assert sorted(set(uids_of(train(service.http, run, 0)))) == ["a", "b"]

    def test_on_a_cluster_a_whole_run_and_a_takeover(self, services: Services, tmp_path: Path, run: str) -> None:
        with RedisCluster(tmp_path / "cluster") as cluster:
            first, second = services.start(2, *on_redis(cluster.url))
            first.grpc.create(run, CONFIG)
            second.grpc.submit(run, [*group("a"), *group("b"), *group("c")])
            data = train(second.http, run, 0)
            assert sorted(set(uids_of(data))) == ["a", "b"]
            first.kill()
            assert patiently(lambda: second.grpc.submit(run, group("d"))) == ["accepted"] * 2
            assert sorted(set(uids_of(train(second.grpc, run, 1)))) == ["c", "d"]
            second.grpc.finish(run)
            status = second.grpc.get(run)
            assert (status["batches_freed"], status["row_bytes"]) == (2, 0)
            second.grpc.delete(run)
            left = [key for node in cluster.nodes for key in node.client().keys("*") if run.encode() in key]
            assert left == []
