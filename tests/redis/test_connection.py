"""The connection to Redis: every way to reach one, no command sent twice, and errors that say what to do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import redis
import trustme
from redis import exceptions
from redis.cluster import NodesManager

from gristmill.errors import FailedPreconditionError, UnavailableError
from gristmill_service.storage.redis import connection
from gristmill_service.storage.redis.connection import (
    Client,
    RedisAddress,
    Sentinels,
    connect,
    outcome_unknown,
    translated,
)
from tests.redis.cluster import RedisCluster
from tests.redis.opening import Open, failure
from tests.redis.proxy import Proxy
from tests.redis.servers import HOST, RedisServer, Sentinel, StartRedis, free_port


class TestReaching:
    def exercise(self, client: Client) -> None:
        client.set("a", b"\xff\x00")
        assert client.get("a") == b"\xff\x00"
        with client.pipeline(transaction=True) as pipeline:
            pipeline.incr("n").incr("n")  # type: ignore[union-attr]
            assert pipeline.execute() == [1, 2]
        with client.pipeline(transaction=False) as pipeline:
            for number in range(20):
                pipeline.incr(f"n-{number}")
            assert pipeline.execute() == [1] * 20
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda _: client.incr("count"), range(400)))
        assert client.get("count") == b"400"

    def test_one_server(self, redis_server: RedisServer, opened: Open) -> None:
        self.exercise(opened(redis_server.url))

    def test_a_database_of_a_server(self, redis_server: RedisServer, opened: Open) -> None:
        opened(f"{redis_server.url}/3").set("a", "b")
        assert opened(redis_server.url).dbsize() == 0
        assert opened(f"{redis_server.url}/3").dbsize() == 1

    def test_a_server_with_a_password(self, start_redis: StartRedis, opened: Open) -> None:
        server = start_redis(appendonly="no", password="pass/word?")
        self.exercise(opened(server.url))
        opened(f"redis://{server.address}", password="pass/word?").ping()
        opened(f"redis://:pass/word?@{server.address}").ping()

    def test_a_server_with_users(self, start_redis: StartRedis, opened: Open) -> None:
        server = start_redis(appendonly="no", username="gristmill", password="secret")
        self.exercise(opened(server.url))
        opened(f"redis://{server.address}", username="gristmill", password="secret").ping()
        opened(f"redis://other:wrong@{server.address}", username="gristmill", password="secret").ping()

    def test_a_server_over_tls(self, tls: Proxy, ca_file: Path, opened: Open) -> None:
        self.exercise(opened(tls.url, ca_file=ca_file))

    @pytest.mark.parametrize("password", [None, "secret"])
    def test_a_master_of_sentinels_before_and_after_a_failover(
        self, tmp_path: Path, opened: Open, password: str | None
    ) -> None:
        with Sentinel(tmp_path, password=password) as sentinel:
            client = opened(sentinel.url)
            self.exercise(client)
            assert client.wait(1, 5000) == 1
            with ThreadPoolExecutor(1) as threads:
                promoted = threads.submit(sentinel.kill_master)
                while not promoted.done():
                    with suppress(UnavailableError), translated(client):  # and nothing else
                        client.incr("tries")
                    time.sleep(0.01)
                promoted.result()
            assert client.get("a") == b"\xff\x00"
            client.set("a", "c")
            assert sentinel.master.client().get("a") == b"c"

    def test_a_cluster(self, redis_cluster: RedisCluster, opened: Open) -> None:
        self.exercise(opened(redis_cluster.url))
        assert all(node.client().dbsize() for node in redis_cluster.nodes)

    def test_a_cluster_over_tls(
        self,
        redis_cluster: RedisCluster,
        authority: trustme.CA,
        ca_file: Path,
        opened: Open,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with ExitStack() as stack:
            proxies = {
                node.port: stack.enter_context(Proxy(node.port, certificate=authority.issue_cert(HOST)))
                for node in redis_cluster.nodes
            }
            # Nodes announce their own ports, which do not speak TLS.
            monkeypatch.setattr(NodesManager, "remap_host_port", lambda _, host, port: (host, proxies[port].port))
            url = f"rediss+cluster://{HOST}:{proxies[redis_cluster.nodes[2].port].port}"
            with closing(connect(RedisAddress(url=url, ca_file=ca_file))) as client:
                self.exercise(client)

    def test_sentinels_over_tls(
        self, tmp_path: Path, authority: trustme.CA, ca_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        certificate = authority.issue_cert(HOST)
        with Sentinel(tmp_path, password="secret") as sentinel:
            assert sentinel.sentinel is not None
            with (
                Proxy(sentinel.master.port, certificate=certificate) as master,
                Proxy(sentinel.sentinel.port, certificate=certificate) as watching,
            ):
                ask = Sentinels.discover_master
                asked = []

                def discover(manager: Sentinels, name: str) -> tuple[str, int]:
                    asked.append(ask(manager, name))
                    return HOST, master.port  # the sentinel announces a port that does not speak TLS

                monkeypatch.setattr(Sentinels, "discover_master", discover)
                address = RedisAddress(
                    url=f"rediss+sentinel://{HOST}:{watching.port}/mymaster", password="secret", ca_file=ca_file
                )
                with closing(connect(address)) as client:
                    self.exercise(client)
                assert set(asked) == {(HOST, sentinel.master.port)}

    def test_through_any_host_that_is_there(self, redis_cluster: RedisCluster, tmp_path: Path, opened: Open) -> None:
        down = f"{HOST}:{free_port()}"
        opened(f"redis+cluster://{down},{redis_cluster.nodes[1].address}").set("a", "b")
        with Sentinel(tmp_path) as sentinel:
            assert sentinel.sentinel is not None
            opened(f"redis+sentinel://{down},{sentinel.sentinel.address}/mymaster").set("a", "b")


class TestOneTry:
    def test_a_command_whose_answer_was_lost_is_carried_out_once(
        self, proxy: Proxy, through: Client, redis_server: RedisServer
    ) -> None:
        proxy.lose_next_reply()
        with pytest.raises(UnavailableError, match=f"Redis at {HOST}:{proxy.port}: .*; retry") as caught:
            self.count(through)
        assert outcome_unknown(caught.value)
        assert redis_server.client().get("n") == b"1"
        self.count(through)

    def test_nor_in_a_cluster(self, redis_cluster: RedisCluster, opened: Open) -> None:
        client = opened(redis_cluster.url)
        assert isinstance(client, redis.RedisCluster)
        with ExitStack() as proxies:
            ports = {node.port: proxies.enter_context(Proxy(node.port)) for node in redis_cluster.nodes}
            client.nodes_manager.address_remap = lambda address: (HOST, ports[address[1]].port)
            client.nodes_manager.initialize()
            self.count(client)
            ports[redis_cluster.node_of(b"n").port].lose_next_reply()
            with pytest.raises(UnavailableError) as caught:
                self.count(client)
            assert outcome_unknown(caught.value)
            assert redis_cluster.node_of(b"n").client().get("n") == b"2"
            self.count(client)
            client.close()

    def count(self, client: Client) -> None:
        with translated(client):
            client.incr("n")

    def test_one_that_could_not_be_sent_is_known_to_have_no_effect(self, proxy: Proxy, through: Client) -> None:
        proxy.refuse()
        proxy.cut()
        error = failure(through, "INCR", "n")
        assert isinstance(error, UnavailableError)
        assert not outcome_unknown(error)
        proxy.accept()
        assert through.incr("n") == 1

    def test_a_silent_server_is_given_up_in_time(
        self, redis_server: RedisServer, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usually_s = connection.SOCKET_TIMEOUT_S
        monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 1.5)
        client = opened(redis_server.url)
        redis_server.pause()
        try:
            started = time.monotonic()
            error = failure(client, "INCR", "n")
            assert time.monotonic() - started < usually_s
        finally:
            redis_server.resume()
        assert isinstance(error, UnavailableError)
        assert outcome_unknown(error)
        assert client.incr("n") == 2

    @pytest.mark.parametrize(
        ("error", "unknown"),
        [
            (exceptions.ConnectionError("Error 111 connecting to host:1. Connection refused."), False),
            (exceptions.ConnectionError("Error -2 connecting to host:1. Name or service not known."), False),
            (exceptions.TimeoutError("Timeout connecting to server"), False),
            (exceptions.MaxConnectionsError("Too many connections"), False),
            (exceptions.TimeoutError("Timeout reading from host:1"), True),
            (exceptions.ConnectionError("Connection closed by server."), True),
            (exceptions.RedisClusterException("Redis Cluster cannot be connected: Error 1 connecting to host:1"), True),
        ],
    )
    def test_an_error_says_whether_the_command_may_have_been_sent(self, error: Exception, unknown: bool) -> None:
        assert outcome_unknown(error) is unknown
        with pytest.raises(UnavailableError) as caught, translated("host:1"):
            raise error
        assert outcome_unknown(caught.value) is unknown

    def test_what_the_server_refused_is_known(self, through: Client) -> None:
        with pytest.raises(FailedPreconditionError, match="refuses a command") as caught, translated(through):
            through.execute_command("INCR")  # type: ignore[no-untyped-call]
        assert not outcome_unknown(caught.value)


class TestRedirects:
    def test_a_moved_key_is_followed(self, redis_cluster: RedisCluster, opened: Open) -> None:
        client = opened(redis_cluster.url)
        client.set("a", "b")
        target = redis_cluster.move(b"a")
        assert client.incr("{a}n") == 1
        redis_cluster.move(b"a")
        with client.pipeline(transaction=False) as pipeline:
            assert pipeline.incr("{a}n").get("a").execute() == [2, b"b"]  # type: ignore[union-attr]
        assert target.client().dbsize() == 0

    def test_a_key_that_is_about_to_move_is_asked_for(self, redis_cluster: RedisCluster, opened: Open) -> None:
        client = opened(redis_cluster.url)
        client.set("a", "b")
        target = redis_cluster.begin_move(b"a")
        try:
            assert client.get("a") == b"b"
            assert client.incr("{a}n") == 1
        finally:
            redis_cluster.move(b"a")
        assert target.client().get("{a}n") == b"1"
