"""The servers and the bad network that other tests use do what they say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis.cluster import RedisCluster
from tests.redis.proxy import Proxy
from tests.redis.servers import HOST, RedisServer, Sentinel, StartRedis


def client_of(server: RedisServer | Proxy, **options: Any) -> redis.Redis:
    """One that never tries again."""
    options = {"socket_timeout": 30, "protocol": 2} | options
    return redis.Redis(host=HOST, port=server.port, retry=Retry(NoBackoff(), 0), **options)


@pytest.fixture
def through(proxy: Proxy) -> Iterator[redis.Redis]:
    with client_of(proxy) as client:
        client.ping()
        yield client


class TestServer:
    def test_each_test_begins_with_an_empty_server(self, redis_server: RedisServer) -> None:
        client = redis_server.client()
        assert client.dbsize() == 0
        client.set("left", "over")

    test_as_does_the_next_one = test_each_test_begins_with_an_empty_server

    def test_a_killed_one_that_always_flushes_keeps_what_it_acknowledged(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="always")
        client = server.client()
        for number in range(50):
            client.rpush("log", number)
        port = server.port
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert server.port == port
        assert client.llen("log") == 50

    def test_one_without_a_log_comes_back_empty(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no")
        client = server.client()
        client.set("a", "b")
        server.restart()
        assert client.dbsize() == 0

    def test_a_restart_in_order_keeps_what_was_written(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="everysec")
        client = server.client()
        client.set("a", "b")
        server.restart()
        assert client.get("a") == b"b"

    def test_a_paused_one_answers_once_it_is_resumed(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no")
        client, hasty = server.client(), server.client(socket_timeout=0.2)
        client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            hasty.ping()
        server.resume()
        assert client.ping()

    def test_a_password_lets_only_those_in_who_know_it(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no", password="s3/cret?")
        assert server.client().ping()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with client_of(server) as client, pytest.raises(redis.AuthenticationError):
            client.ping()

    def test_with_a_username_only_that_user_enters(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no", username="gristmill", password="secret")
        assert server.client().acl_whoami() == "gristmill"
        with client_of(server, password="secret") as client, pytest.raises(redis.AuthenticationError):
            client.ping()

    def test_a_full_one_refuses_writes(self, start_redis: StartRedis) -> None:
        client = start_redis(appendonly="no", maxmemory="16mb").client()
        client.set("fits", b"x" * 1_000_000)
        with pytest.raises(redis.OutOfMemoryError):
            client.set("does not", b"x" * 16_000_000)

    def test_a_port_that_is_taken_meanwhile_is_replaced(
        self, start_redis: StartRedis, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ports = iter([redis_server.port, redis_server.port, redis_server.port + 1])
        monkeypatch.setattr("tests.redis.servers.free_port", lambda: next(ports))
        assert start_redis(appendonly="no").port == redis_server.port + 1


class TestProxy:
    def test_it_forwards_large_values_whole(self, through: redis.Redis) -> None:
        value = bytes(range(256)) * 40_000
        through.set("large", value)
        assert through.get("large") == value

    def test_a_delay_is_added_each_way_and_costs_no_throughput(self, proxy: Proxy, through: redis.Redis) -> None:
        proxy.delay(0.05)
        started = time.monotonic()
        through.set("large", b"x" * 16_000_000)
        # One delay for each piece that is read would be 12 s.
        assert 0.1 <= time.monotonic() - started < 11

    def test_a_throttled_one_carries_no_more_than_said(self, proxy: Proxy, through: redis.Redis) -> None:
        proxy.throttle(1_000_000)
        started = time.monotonic()
        through.set("large", b"x" * 300_000)
        assert time.monotonic() - started >= 0.28

    def test_a_cut_breaks_open_connections_and_takes_new_ones(self, proxy: Proxy, through: redis.Redis) -> None:
        assert proxy.open_connections == 1
        proxy.cut()
        assert proxy.open_connections == 0
        assert through.ping()

    def test_a_cut_reaches_the_one_who_waits(self, proxy: Proxy, through: redis.Redis) -> None:
        threading.Timer(0.1, proxy.cut).start()
        with pytest.raises(redis.ConnectionError):
            through.blpop(["nothing"], timeout=20)

    def test_a_lost_reply_hides_what_was_carried_out(self, proxy: Proxy, through: redis.Redis) -> None:
        proxy.lose_next_reply()
        with pytest.raises(redis.ConnectionError):
            through.incr("count")
        assert through.get("count") == b"1"

    def test_refusing_spares_open_connections(self, proxy: Proxy, through: redis.Redis) -> None:
        proxy.refuse()
        assert through.ping()
        with client_of(proxy) as other:
            with pytest.raises(redis.ConnectionError):
                other.ping()
            proxy.accept()
            assert other.ping()

    def test_a_frozen_one_is_silent_until_it_thaws(self, proxy: Proxy) -> None:
        with client_of(proxy) as client, client_of(proxy, socket_timeout=0.2) as hasty:
            client.ping()
            proxy.freeze()
            with pytest.raises(redis.TimeoutError):
                hasty.ping()
            proxy.thaw()
            assert client.ping()

    def test_a_server_that_is_down_closes_the_connection(self, proxy: Proxy, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no")
        proxy.target_port = server.port
        with client_of(proxy) as client:
            assert client.ping()
            server.kill()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            with pytest.raises(redis.ConnectionError):
                client.ping()
            server.start()
            assert client.ping()

    def test_closing_leaves_no_thread(self, redis_server: RedisServer) -> None:
        before = set(threading.enumerate())
        with Proxy(redis_server.port) as proxy, client_of(proxy) as client:
            client.ping()
            proxy.freeze()
            proxy.close()
        # Services of other tests may start threads of theirs meanwhile.
        begun = [one.name for one in threading.enumerate() if one not in before]
        assert not [name for name in begun if name.startswith(("proxy", "asyncio"))]

    def test_it_speaks_tls_with_the_certificate_it_was_given(self, redis_server: RedisServer) -> None:
        authority = trustme.CA()
        with Proxy(redis_server.port, certificate=authority.issue_cert(HOST)) as proxy:
            with (
                authority.cert_pem.tempfile() as trusted,
                client_of(proxy, ssl=True, ssl_ca_certs=trusted) as client,
            ):
                client.set("large", b"x" * 1_000_000)
                assert client.strlen("large") == 1_000_000
                proxy.cut()
                assert client.ping()
            with client_of(proxy, ssl=True) as stranger, pytest.raises(redis.ConnectionError):
                stranger.ping()
            with client_of(proxy) as plain, pytest.raises(redis.ConnectionError):
                plain.ping()


def test_a_cluster_spreads_keys_over_its_nodes_and_moves_them(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:
        first, *_ = (node.client() for node in cluster.nodes)
        assert {cluster.node_of(b"%d" % number) for number in range(20)} == set(cluster.nodes)
        key = next(key for key in (b"%d" % number for number in range(20)) if cluster.node_of(key) is cluster.nodes[0])
        first.set(key, "here")
        target = cluster.begin_move(key)
        assert first.get(key) == b"here"
        first.delete(key)
        with pytest.raises(redis.exceptions.AskError):
            first.get(key)
        assert cluster.move(key) is target is cluster.node_of(key)
        with pytest.raises(redis.exceptions.MovedError):
            first.get(key)
        target.client().set(key, "there")


@pytest.mark.parametrize("password", [None, "secret"])
def test_a_sentinel_promotes_the_replica_of_a_master_that_was_killed(tmp_path: Path, password: str | None) -> None:
    with Sentinel(tmp_path, password=password) as sentinel:
        client = sentinel.master.client()
        client.set("a", "b")
        assert client.wait(1, 5000) == 1
        replica = sentinel.replica
        dead = sentinel.kill_master()
        assert sentinel.master is replica
        assert sentinel.master.client().get("a") == b"b"
        assert dead.process is None
