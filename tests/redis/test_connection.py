"""The connection to Redis: every way to reach one, no command sent twice, and errors that say what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import redis
import trustme
from redis import exceptions
from redis.cluster import NodesManager

from gristmill.errors import FailedPreconditionError, GristmillError, InvalidArgumentError, UnavailableError
from gristmill_service.storage.redis import connection, server_check
from gristmill_service.storage.redis.connection import (
    Client,
    RedisAddress,
    Translated,
    connect,
    outcome_unknown,
    translated,
)
from gristmill_service.storage.redis.durability import pipelined
from gristmill_service.storage.redis.sentinels import Sentinels
from gristmill_service.storage.redis.server_check import check_server
from tests.redis.cluster import RedisCluster
from tests.redis.proxy import Proxy
from tests.redis.servers import HOST, RedisServer, Sentinel, StartRedis, free_port

Open = Callable[..., Client]
SECRET = "s3cret/?#@ %41"


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connects to a URL; closed with the test."""
    with ExitStack() as clients:
        yield lambda url, **rest: clients.enter_context(closing(connect(RedisAddress(url=url, **rest))))


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as running:
        yield running


@pytest.fixture
def through(proxy: Proxy, opened: Open) -> Client:
    return opened(proxy.url)


def failure(client: Client, *command: str | int) -> GristmillError:
    """What a command raises, translated."""
    with pytest.raises(GristmillError) as caught, translated(client):
        client.execute_command(*command)  # type: ignore[no-untyped-call]
    return caught.value


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@pytest.fixture
def tls(redis_server: RedisServer, authority: trustme.CA) -> Iterator[Proxy]:
    with Proxy(redis_server.port, certificate=authority.issue_cert(HOST)) as running:
        yield running


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
        with ExitStack() as proxies:
            doors = {
                node.port: proxies.enter_context(Proxy(node.port, certificate=authority.issue_cert(HOST)))
                for node in redis_cluster.nodes
            }
            # Nodes tell their own ports, which do not speak TLS.
            monkeypatch.setattr(NodesManager, "remap_host_port", lambda _, host, port: (host, doors[port].port))
            url = f"rediss+cluster://{HOST}:{doors[redis_cluster.nodes[2].port].port}"
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
                    return HOST, master.port  # the sentinel tells a port that does not speak TLS

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
    @pytest.mark.parametrize("transaction", [None, False, True])
    def test_a_command_whose_answer_was_lost_is_carried_out_once(
        self, proxy: Proxy, through: Client, redis_server: RedisServer, transaction: bool | None
    ) -> None:
        proxy.lose_next_reply()
        with pytest.raises(UnavailableError, match=f"Redis at {HOST}:{proxy.port}: .*; retry") as caught:
            self.count(through, transaction)
        assert outcome_unknown(caught.value)
        assert redis_server.client().get("n") == b"1"
        self.count(through, transaction)

    @pytest.mark.parametrize("transaction", [None, False, True])
    def test_nor_in_a_cluster(self, redis_cluster: RedisCluster, opened: Open, transaction: bool | None) -> None:
        client = opened(redis_cluster.url)
        assert isinstance(client, redis.RedisCluster)
        with ExitStack() as proxies:
            ports = {node.port: proxies.enter_context(Proxy(node.port)) for node in redis_cluster.nodes}
            client.nodes_manager.address_remap = lambda address: (HOST, ports[address[1]].port)
            client.nodes_manager.initialize()
            self.count(client, transaction)
            ports[redis_cluster.node_of(b"n").port].lose_next_reply()
            with pytest.raises(UnavailableError) as caught:
                self.count(client, transaction)
            assert outcome_unknown(caught.value)
            assert redis_cluster.node_of(b"n").client().get("n") == b"2"
            self.count(client, transaction)
            client.close()

    def count(self, client: Client, transaction: bool | None) -> None:
        with translated(client):
            if transaction is None:
                client.incr("n")
            elif not transaction:
                pipelined(client, {"n": ("INCR", "n")})
            else:
                with client.pipeline(transaction=transaction) as pipeline:
                    pipeline.incr("n").execute()  # type: ignore[union-attr]

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
        monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 0.2)
        client = opened(redis_server.url)
        redis_server.pause()
        try:
            started = time.monotonic()
            error = failure(client, "INCR", "n")
            assert time.monotonic() - started < 2
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
            (
                exceptions.ConnectionError("Command # 1 (SET a Error 1 connecting to b) of pipeline caused error: x"),
                True,
            ),
            (exceptions.RedisClusterException("Redis Cluster cannot be connected: Error 1 connecting to host:1"), True),
        ],
    )
    def test_an_error_tells_whether_the_command_may_have_been_sent(self, error: Exception, unknown: bool) -> None:
        assert outcome_unknown(error) is unknown
        with pytest.raises(UnavailableError) as caught, Translated("host:1"):
            raise error
        assert outcome_unknown(caught.value) is unknown

    def test_what_the_server_refused_is_known(self, through: Client) -> None:
        with pytest.raises(exceptions.ResponseError) as caught, translated(through):
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

    def test_a_transaction_works_at_its_second_try(self, redis_cluster: RedisCluster, opened: Open) -> None:
        client = opened(redis_cluster.url)
        client.set("a", "b")
        redis_cluster.move(b"a")
        with client.pipeline(transaction=True) as pipeline:
            pipeline.incr("{a}n")
            with pytest.raises(UnavailableError) as caught, translated(client):
                pipeline.execute()
        assert not outcome_unknown(caught.value)
        with client.pipeline(transaction=True) as pipeline:
            assert pipeline.incr("{a}n").execute() == [1]  # type: ignore[union-attr]

    def test_one_who_only_makes_transactions_learns_that_a_node_is_gone(self, tmp_path: Path, opened: Open) -> None:
        with RedisCluster(tmp_path, arguments=["cluster-require-full-coverage no"]) as cluster:
            client = opened(cluster.url)
            gone = cluster.node_of(b"a")
            assert cluster.move(b"a") is not gone
            gone.kill()
            with client.pipeline(transaction=True) as pipeline, pytest.raises(UnavailableError), translated(client):
                pipeline.incr("a").execute()  # type: ignore[union-attr]
            with client.pipeline(transaction=True) as pipeline:
                assert pipeline.incr("a").execute() == [1]  # type: ignore[union-attr]


class TestWrongAddress:
    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("", "no scheme"),
            ("localhost:6379", "no scheme"),
            (f"user:{SECRET}@host:6379", "no scheme"),
            (f"http://user:{SECRET}@host:6379", "no scheme"),
            (f"redis+other://user:{SECRET}@host", "no scheme"),
            (f"redis://user:{SECRET}@", "'' is no HOST:PORT"),
            (f"redis://user:{SECRET}@host:none", "'host:none' is no HOST:PORT"),
            (f"redis://user:{SECRET}@host:0", "'host:0' is no HOST:PORT"),
            (f"redis://user:{SECRET}@host:1,host:2", "several hosts"),
            (f"redis://user:{SECRET}@host/x", "'x' is no number"),
            (f"redis://user:{SECRET}@host?db=1", "no options"),
            (f"redis+sentinel://user:{SECRET}@host:1,host:2", "the NAME"),
            (f"redis+sentinel://user:{SECRET}@host:1/name/x", "'x' is no number"),
            (f"redis+cluster://user:{SECRET}@host:1/1", "only database 0"),
            (f"redis+cluster://user:{SECRET}@host:1,,host:2", "'' is no HOST:PORT"),
        ],
    )
    def test_is_refused_with_the_reason_and_without_the_password(self, url: str, reason: str) -> None:
        with pytest.raises(InvalidArgumentError, match="redis_url") as caught:
            connect(RedisAddress(url=url))
        assert reason in str(caught.value)
        assert "rediss in place of redis" in str(caught.value)
        assert "s3cret" not in str(caught.value)

    def test_is_shown_without_its_secrets(self) -> None:
        address = RedisAddress(url=f"redis://user:{SECRET}://@host:1/2", password="more secret")
        assert repr(address) == "RedisAddress(redis://host:1/2)"

    def test_a_host_may_be_an_ipv6_address_and_the_port_left_out(self) -> None:
        for url, hosts in [
            ("redis://[::1]", [("::1", 6379)]),
            ("redis://[::1]:70", [("::1", 70)]),
            ("redis+sentinel://one,two:7/name", [("one", 26379), ("two", 7)]),
        ]:
            assert connection._parse(RedisAddress(url=url)).nodes == hosts

    def test_an_authority_needs_tls_and_its_file(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgumentError, match=r"redis_ca_file .* rediss"):
            connect(RedisAddress(url="redis://host", ca_file=tmp_path))
        with pytest.raises(InvalidArgumentError, match=r"redis_ca_file is .* no file"):
            connect(RedisAddress(url="rediss://host", ca_file=tmp_path / "missing"))

    @pytest.mark.parametrize("form", ["redis://{}", "rediss://{}", "redis+sentinel://{}/name", "redis+cluster://{}"])
    def test_where_nothing_listens_it_names_the_place_at_once(self, form: str) -> None:
        place = f"{HOST}:{free_port()}"
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=f"{place}.*check redis_url, or retry"):
            connect(RedisAddress(url=form.format(place), password=SECRET))
        assert time.monotonic() - started < 2

    def test_a_name_that_is_unknown_is_said(self) -> None:
        with pytest.raises(UnavailableError, match=r"nowhere\.invalid"):
            connect(RedisAddress(url="redis://nowhere.invalid"))

    def test_sentinels_that_refuse_the_login_are_a_wrong_setting(self, tmp_path: Path) -> None:
        with Sentinel(tmp_path) as sentinel:
            assert sentinel.sentinel is not None
            sentinel.sentinel.client().execute_command("ACL", "SETUSER", "default", "resetpass", ">theirs")
            for password in (None, "ours"):
                with pytest.raises(FailedPreconditionError, match="refused the login: by its sentinels"):
                    connect(RedisAddress(url=sentinel.url, password=password))

    def test_a_master_that_sentinels_do_not_know_is_named(self, tmp_path: Path) -> None:
        with Sentinel(tmp_path) as sentinel, pytest.raises(UnavailableError, match="No master found for 'other'"):
            connect(RedisAddress(url=sentinel.url.replace("mymaster", "other")))

    def test_a_wrong_password_is_not_tried_again_nor_told(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no", password="right")
        for address in (
            RedisAddress(url=f"redis://:{SECRET}@{server.address}"),
            RedisAddress(url=f"redis://{server.address}"),
            RedisAddress(url=f"redis+cluster://{server.address}", password=SECRET),
        ):
            with pytest.raises(FailedPreconditionError, match="username and password of redis_url") as caught:
                connect(address)
            assert "s3cret" not in str(caught.value)

    def test_a_cluster_and_a_lone_server_are_told_apart(
        self, redis_cluster: RedisCluster, redis_server: RedisServer, opened: Open
    ) -> None:
        with pytest.raises(FailedPreconditionError, match="no cluster; let redis_url begin with redis://"):
            connect(RedisAddress(url=f"redis+cluster://{redis_server.address}"))
        other = next(node for node in redis_cluster.nodes if node is not redis_cluster.node_of(b"a"))
        error = failure(opened(f"redis://{other.address}"), "GET", "a")
        assert isinstance(error, FailedPreconditionError)
        assert "let redis_url begin with redis+cluster://" in str(error)

    def test_a_certificate_that_is_not_trusted_names_the_setting(self, tls: Proxy, authority: trustme.CA) -> None:
        with pytest.raises(FailedPreconditionError, match="redis_ca_file"):
            connect(RedisAddress(url=tls.url))

    def test_a_certificate_of_another_host_is_refused(
        self, redis_server: RedisServer, authority: trustme.CA, ca_file: Path
    ) -> None:
        with (
            Proxy(redis_server.port, certificate=authority.issue_cert("redis.example")) as proxy,
            pytest.raises(FailedPreconditionError, match="host name that the certificate is for"),
        ):
            connect(RedisAddress(url=proxy.url, ca_file=ca_file))


class TestErrors:
    @pytest.mark.parametrize("script", [False, True])
    def test_a_full_server_says_how_to_make_room(self, start_redis: StartRedis, opened: Open, script: bool) -> None:
        server = start_redis(appendonly="no", maxmemory="64mb")
        client = opened(server.url)
        client.set("a", b"x" * 8_000_000)
        server.client().config_set("maxmemory", "4mb")
        command = ("EVAL", "return redis.call('set', KEYS[1], 1)", 1, "b") if script else ("SET", "b", "c")
        error = failure(client, *command)
        assert isinstance(error, UnavailableError)
        assert "out of memory" in str(error)
        assert "raise its maxmemory" in str(error)
        assert not outcome_unknown(error)

    @pytest.mark.parametrize("script", [False, True])
    def test_what_a_user_may_not_do_names_the_remedy(
        self, redis_server: RedisServer, opened: Open, script: bool
    ) -> None:
        redis_server.client().execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@all", "-set")
        client = opened(redis_server.url, username="reader", password="pw")
        command = ("EVAL", "return redis.call('set', KEYS[1], 1)", 1, "b") if script else ("SET", "b", "c")
        error = failure(client, *command)
        assert isinstance(error, FailedPreconditionError)
        assert "ACL SETUSER" in str(error)

    @pytest.mark.parametrize("script", [False, True])
    def test_a_server_that_takes_no_writes_for_now_may_be_tried_again(
        self, start_redis: StartRedis, opened: Open, script: bool
    ) -> None:
        client = opened(start_redis(appendonly="no", arguments=["min-replicas-to-write 1"]).url)
        command = ("EVAL", "return redis.call('set', KEYS[1], 1)", 1, "b") if script else ("SET", "b", "c")
        error = failure(client, *command)
        assert isinstance(error, UnavailableError)
        assert not outcome_unknown(error)

    @pytest.mark.parametrize(
        "error",
        [
            exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
            exceptions.ReadOnlyError("You can't write against a read only replica."),
            exceptions.ClusterDownError("The cluster is down"),
            exceptions.MasterDownError("Link with MASTER is down"),
            exceptions.TryAgainError("Multiple keys request during rehashing of slot"),
            exceptions.SlotNotCoveredError('Slot "1" is not covered by the cluster.'),
            exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        ],
    )
    def test_what_passes_may_be_tried_again(self, error: Exception) -> None:
        with pytest.raises(UnavailableError, match=r"Redis at host:1: .*; retry$") as caught, Translated("host:1"):
            raise error
        assert caught.value.__cause__ is error
        assert not outcome_unknown(caught.value)

    @pytest.mark.parametrize(
        "error",
        [
            exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
            exceptions.NoScriptError("No matching script. Please use EVAL."),
            exceptions.WatchError("Watched variable changed."),
            exceptions.CrossSlotTransactionError("All keys involved must map to the same slot"),
            ValueError("ours"),
        ],
    )
    def test_mistakes_of_ours_pass(self, error: Exception) -> None:
        with pytest.raises(type(error)) as caught, Translated("host:1"):
            raise error
        assert caught.value is error


class TestCheck:
    def test_a_server_that_keeps_all_gives_no_warning(self, start_redis: StartRedis, opened: Open) -> None:
        assert check_server(opened(start_redis(appendonly="always").url)) == []

    def test_what_would_be_lost_is_said(self, start_redis: StartRedis, opened: Open) -> None:
        (warning,) = check_server(opened(start_redis(appendonly="no").url))
        assert "appendonly is no" in warning
        server = start_redis(appendonly="everysec", arguments=["maxmemory-policy allkeys-lru"])
        policy, everysec = check_server(opened(server.url))
        assert f"Redis at {server.address}: maxmemory-policy is allkeys-lru" in policy
        assert "appendfsync is everysec" in everysec
        server.client().config_set("appendfsync", "no")
        assert "appendfsync is no" in check_server(opened(server.url))[1]

    def test_replicas_follow_later_and_refuse_writes(self, tmp_path: Path, opened: Open) -> None:
        with Sentinel(tmp_path, appendonly="always") as sentinel:
            (warning,) = check_server(opened(sentinel.url))
            assert "it has 1 replica," in warning
            assert sentinel.replica is not None
            assert "this is a replica" in check_server(opened(sentinel.replica.url))[0]

    def test_nodes_of_a_cluster_share_a_warning(self, redis_cluster: RedisCluster, opened: Open) -> None:
        (warning,) = check_server(opened(redis_cluster.url))
        assert all(node.address in warning for node in redis_cluster.nodes)

    def test_what_may_not_be_seen_is_not_judged(self, redis_server: RedisServer, opened: Open) -> None:
        redis_server.client().execute_command("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-config", "-info")
        assert check_server(opened(redis_server.url, username="blind", password="pw")) == []

    def test_a_server_that_is_too_old_is_refused(
        self, redis_server: RedisServer, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_check, "MIN_VERSION", (99, 0))
        with pytest.raises(FailedPreconditionError, match=r"needs 99\.0 or later"):
            check_server(opened(redis_server.url))
