"""A Redis that cannot be reached, or that refuses: errors that say what to do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trustme
from redis import exceptions

from gristmill.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from gristmill_service.storage.redis import connection, servers
from gristmill_service.storage.redis.connection import (
    RedisAddress,
    connect,
    outcome_unknown,
    translated,
)
from gristmill_service.storage.redis.scripts import SERVER_ALONE
from gristmill_service.storage.redis.servers import check_server
from tests.redis.cluster import RedisCluster
from tests.redis.opening import SECRET, Open, failure
from tests.redis.proxy import Proxy
from tests.redis.servers import HOST, RedisServer, Sentinel, StartRedis, free_port


class TestWrongAddress:
    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("", "has no known scheme"),
            ("localhost:6379", "has no known scheme"),
            (f"user:{SECRET}@host:6379", "has no known scheme"),
            (f"http://user:{SECRET}@host:6379", "has no known scheme"),
            (f"redis+other://user:{SECRET}@host", "has no known scheme"),
            (f"redis://user:{SECRET}@", "'' is not HOST:PORT"),
            (f"redis://user:{SECRET}@host:none", "'host:none' is not HOST:PORT"),
            (f"redis://user:{SECRET}@host:0", "'host:0' is not HOST:PORT"),
            (f"redis://user:{SECRET}@host:1,host:2", "several hosts"),
            (f"redis://user:{SECRET}@host/x", "'x' is not the number"),
            (f"redis://user:{SECRET}@host?db=1", "options after ? or # are not supported"),
            (f"redis+sentinel://user:{SECRET}@host:1,host:2", "the NAME"),
            (f"redis+sentinel://user:{SECRET}@host:1/name/x", "'x' is not the number"),
            (f"redis+cluster://user:{SECRET}@host:1/1", "only database 0"),
            (f"redis+cluster://user:{SECRET}@host:1,,host:2", "'' is not HOST:PORT"),
        ],
    )
    def test_is_refused_with_the_reason_and_without_the_password(self, url: str, reason: str) -> None:
        with pytest.raises(InvalidArgumentError, match="redis_url") as caught:
            connect(RedisAddress(url=url))
        assert reason in str(caught.value)
        assert "rediss instead of redis" in str(caught.value)
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
        with pytest.raises(InvalidArgumentError, match=r"redis_ca_file .* does not exist"):
            connect(RedisAddress(url="rediss://host", ca_file=tmp_path / "missing"))

    @pytest.mark.parametrize("form", ["redis://{}", "rediss://{}", "redis+sentinel://{}/name", "redis+cluster://{}"])
    def test_where_nothing_listens_it_names_the_place_at_once(self, form: str) -> None:
        place = f"{HOST}:{free_port()}"
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=f"{place}.*check redis_url, or retry"):
            connect(RedisAddress(url=form.format(place), password=SECRET))
        assert time.monotonic() - started < connection.SOCKET_TIMEOUT_S

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

    def test_a_wrong_password_is_not_tried_again_nor_shown(self, start_redis: StartRedis) -> None:
        server = start_redis(appendonly="no", password="right")
        for address in (
            RedisAddress(url=f"redis://:{SECRET}@{server.address}"),
            RedisAddress(url=f"redis://{server.address}"),
            RedisAddress(url=f"redis+cluster://{server.address}", password=SECRET),
        ):
            with pytest.raises(
                FailedPreconditionError, match="check redis_url, or redis_username and redis_password"
            ) as caught:
                connect(address)
            assert "s3cret" not in str(caught.value)

    def test_a_cluster_and_a_lone_server_are_distinguished(
        self, redis_cluster: RedisCluster, redis_server: RedisServer, opened: Open
    ) -> None:
        with pytest.raises(FailedPreconditionError, match="not a cluster; start redis_url with redis://"):
            connect(RedisAddress(url=f"redis+cluster://{redis_server.address}"))
        other = next(node for node in redis_cluster.nodes if node is not redis_cluster.node_of(b"a"))
        error = failure(opened(f"redis://{other.address}"), "GET", "a")
        assert isinstance(error, FailedPreconditionError)
        assert "start redis_url with redis+cluster://" in str(error)

    def test_a_certificate_that_is_not_trusted_names_the_setting(self, tls: Proxy, authority: trustme.CA) -> None:
        with pytest.raises(FailedPreconditionError, match="redis_ca_file"):
            connect(RedisAddress(url=tls.url))

    def test_a_certificate_of_another_host_is_refused(
        self, redis_server: RedisServer, authority: trustme.CA, ca_file: Path
    ) -> None:
        with (
            Proxy(redis_server.port, certificate=authority.issue_cert("redis.example")) as proxy,
            pytest.raises(FailedPreconditionError, match="certificate's host name"),
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
        with pytest.raises(UnavailableError, match=r"Redis at host:1: .*; retry$") as caught, translated("host:1"):
            raise error
        assert caught.value.__cause__ is error
        assert not outcome_unknown(caught.value)

    @pytest.mark.parametrize(
        "error",
        [
            exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
            exceptions.NoScriptError("No matching script. Please use EVAL."),
            exceptions.WatchError("Watched variable changed."),
        ],
    )
    def test_whatever_else_redis_refuses_is_said_with_its_words(self, error: Exception) -> None:
        refused = pytest.raises(FailedPreconditionError, match=r"refuses a command: .*; check the keys")
        with refused as caught, translated("host:1"):
            raise error
        assert caught.value.__cause__ is error

    def test_mistakes_of_ours_pass(self) -> None:
        with pytest.raises(ValueError, match="ours"), translated("host:1"):
            raise ValueError("ours")


class TestCheck:
    def test_a_server_that_keeps_all_gives_no_warning(self, start_redis: StartRedis, opened: Open) -> None:
        assert check_server(opened(start_redis(appendonly="always").url), SERVER_ALONE) == []

    def test_what_would_be_lost_is_said(self, start_redis: StartRedis, opened: Open) -> None:
        (warning,) = check_server(opened(start_redis(appendonly="no").url), SERVER_ALONE)
        assert "appendonly is no" in warning
        server = start_redis(appendonly="everysec", arguments=["maxmemory-policy allkeys-lru"])
        policy, everysec = check_server(opened(server.url), SERVER_ALONE)
        assert f"Redis at {server.address}: maxmemory-policy is allkeys-lru" in policy
        assert "appendfsync is everysec" in everysec
        server.client().config_set("appendfsync", "no")
        assert "appendfsync is no" in check_server(opened(server.url), SERVER_ALONE)[1]

    def test_replicas_follow_later_and_refuse_writes(self, tmp_path: Path, opened: Open) -> None:
        with Sentinel(tmp_path, appendonly="always") as sentinel:
            (warning,) = check_server(opened(sentinel.url), SERVER_ALONE)
            assert "it has 1 replica," in warning
            assert sentinel.replica is not None
            assert "this is a replica" in check_server(opened(sentinel.replica.url), SERVER_ALONE)[0]

    def test_nodes_of_a_cluster_share_a_warning(self, redis_cluster: RedisCluster, opened: Open) -> None:
        (warning,) = check_server(opened(redis_cluster.url), SERVER_ALONE)
        assert all(node.address in warning for node in redis_cluster.nodes)

    def test_what_may_not_be_seen_is_not_judged(self, redis_server: RedisServer, opened: Open) -> None:
        redis_server.client().execute_command("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-config", "-info")
        assert check_server(opened(redis_server.url, username="blind", password="pw"), SERVER_ALONE) == []

    def test_a_server_that_is_too_old_is_refused(
        self, redis_server: RedisServer, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(servers, "MIN_VERSION", (99, 0))
        with pytest.raises(FailedPreconditionError, match=r"needs 99\.0 or later"):
            check_server(opened(redis_server.url), SERVER_ALONE)
