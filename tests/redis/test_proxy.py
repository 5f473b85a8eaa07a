"""The bad network that other tests use does what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.redis.proxy import Proxy
from tests.redis.servers import HOST, RedisServer, StartRedis


def client_of(server: RedisServer | Proxy, **options: Any) -> redis.Redis:
    """One that never tries again."""
    options = {"socket_timeout": 30, "protocol": 2} | options
    return redis.Redis(host=HOST, port=server.port, retry=Retry(NoBackoff(), 0), **options)


@pytest.fixture
def through(proxy: Proxy) -> Iterator[redis.Redis]:
    with client_of(proxy) as client:
        client.ping()
        yield client


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
