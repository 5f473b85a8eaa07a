"""A run whose master of Redis fails or is deposed: its owner leaves that soon, and nothing is lost silently."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gristmill.errors import FailedPreconditionError, UnavailableError
from gristmill_service.storage.redis import keys, tables
from gristmill_service.storage.redis.connection import Client, RedisAddress, connect, watched_master
from gristmill_service.storage.redis.keys import CRC_BYTES
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.scripts import SERVER_ALONE, Durability
from gristmill_service.storage.redis.servers import check_server
from gristmill_service.storage.run_store import LogLostError
from tests.redis.cluster import RedisCluster
from tests.redis.servers import HOST, RedisServer, Sentinel, SentinelServer, StartRedis, free_port, wait_until
from tests.run.harness import row, table

pytestmark = pytest.mark.slow

PREFIX = "test"
LEASE_S = 1.5

Join = Callable[..., RedisRunStore]


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[Sentinel]:
    with Sentinel(tmp_path / "sentinel") as running:
        yield running


@pytest.fixture
def join() -> Iterator[Join]:
    """A store as a process of its own has it, closed with the test."""
    with ExitStack() as opened:

        def start(url: str, durability: Durability = SERVER_ALONE, lease_s: float = LEASE_S) -> RedisRunStore:
            client = opened.enter_context(closing(connect(RedisAddress(url=url))))
            store = RedisRunStore(client, PREFIX, lease_s, durability)
            opened.callback(store.close)
            store.advertise("grpc", "http")
            return store

        yield start


def records(server: RedisServer) -> list[bytes]:
    """Of the log of `run`, as the server has it."""
    entries: Any = server.client().xrange(f"{{{PREFIX}:run}}:log")
    return [fields[b"r"][:-CRC_BYTES] for _, fields in entries[1:]]


class Writer:
    """Appends to a run as its owner does: again while it is unavailable, and to a log opened again where it is lost.

    acknowledged: what it believes to be in the log. reported: how many acknowledged records are gone, as was said.
    """

    def __init__(self, store: RedisRunStore) -> None:
        self.acknowledged: list[bytes] = []
        self.reported = 0
        self.errors: list[BaseException] = []
        self._tables: dict[bytes, int] = {}
        self._store, self._stopped = store, threading.Event()
        self._log = store.create("run", b"{}")
        self._log.replay()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            try:
                try:
                    self._append(b"%d" % number)
                except LogLostError:
                    self._reopen()
            except UnavailableError:
                time.sleep(0.02)
            except BaseException as error:  # noqa: BLE001
                self.errors.append(error)
                return

    def _append(self, record: bytes) -> None:
        if self._log.is_lost:
            raise LogLostError("the lease has run out")
        number = self._log.first_number + int(record)
        try:
            self._log.append(record, {number: table(row(record.decode()))})
        except UnavailableError:
            # Whatever it was, the run is opened again.
            self._log.lose()
            raise
        self._tables[record] = number
        self.acknowledged.append(record)
        time.sleep(0.002)

    def _reopen(self) -> None:
        self._log.close()
        while not self._stopped.is_set():
            with suppress(UnavailableError), capture_logs() as said:
                self._log = self._store.open("run")
                replay = self._log.replay()
                # Records of unknown outcome may be there, too.
                replayed = list(replay.records)
                lost = [record for record in self.acknowledged if record not in set(replayed)]
                reported = sum(entry["records_lost"] for entry in said if entry["event"] == "log rolled back")
                assert replay.is_short() == bool(reported)
                assert reported <= len(lost) if reported else not lost, "all that is lost is reported"
                self.reported += len(lost)
                self.acknowledged = [record for record in self.acknowledged if record in set(replayed)]
                return
            time.sleep(0.05)

    def wait_for(self, count: int) -> None:
        """Until that many more are acknowledged."""
        least = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= least or self.errors, "the writer goes on")
        assert not self.errors, self.errors

    def lost_tables(self) -> set[int]:
        """The rows that acknowledged records refer to, when it is stopped."""
        self._log.close()
        again = reopened(self._store)
        again.replay()
        return again.retain({self._tables[record] for record in self.acknowledged})

    def stop(self) -> list[bytes]:
        self._stopped.set()
        self._thread.join(30)
        assert not self.errors, self.errors
        return self.acknowledged


def test_the_owner_leaves_a_deposed_master_within_seconds_and_reports_what_is_lost(
    sentinel: Sentinel, join: Join
) -> None:
    writer = Writer(join(sentinel.url))
    writer.wait_for(50)
    deposed = sentinel.depose_master()
    begun = time.monotonic()
    wait_until(lambda: len(records(sentinel.master)) > 0 and writer.reported, "what is lost is reported")
    left_after = time.monotonic() - begun
    writer.wait_for(20)
    on_the_deposed = len(records(deposed))
    writer.wait_for(20)
    # Two, where the machine has time; ten until the socket would have reported it.
    assert left_after < 9
    assert len(records(deposed)) == on_the_deposed, "nothing is written there any more"
    acknowledged = writer.stop()
    assert set(acknowledged) <= set(records(sentinel.master))
    assert writer.lost_tables() == set()


def test_an_idle_owner_learns_that_its_log_was_rolled_back(sentinel: Sentinel, join: Join) -> None:
    store = join(sentinel.url, lease_s=3.0)
    log = store.create("run", b"{}")
    log.replay()
    log.append(b"one", {})
    part_from_master(sentinel)
    log.append(b"two", {})
    log.append(b"three", {})
    sentinel.kill_master()
    wait_until(lambda: log.is_lost, "it learns")
    log.close()
    with capture_logs() as said:
        again = reopened(store)
        replay = again.replay()
    assert list(replay.records) == [b"one"]
    assert replay.is_short()
    [entry] = [entry for entry in said if entry["event"] == "log rolled back"]
    assert (entry["log_level"], entry["records_lost"], entry["records_left"]) == ("error", 2, 1)
    assert reopened_short(store, again), "until the log goes on, every process that opens it learns that"
    last = store._leases.get("run")
    assert last is not None
    last.append(b"goes on", {})
    assert not reopened_short(store, last)


def part_from_master(sentinel: Sentinel) -> None:
    """The replica has all that was written so far, and gets nothing any more."""
    assert sentinel.replica is not None
    sentinel.master.wait_for_replica()
    sentinel.replica.client().replicaof(HOST, free_port())


def reopened(store: RedisRunStore) -> RedisRunLog:
    deadline = time.monotonic() + 60
    while True:
        try:
            return store.open("run")
        except UnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def reopened_short(store: RedisRunStore, log: RedisRunLog) -> bool:
    log.close()
    return store.open("run").replay().is_short()


@pytest.mark.parametrize("way", ["killed", "deposed"])
def test_with_a_replica_that_confirms_nothing_acknowledged_is_lost(sentinel: Sentinel, join: Join, way: str) -> None:
    writer = Writer(join(sentinel.url, Durability(replicas=1)))
    for _ in range(4):
        writer.wait_for(20)
        if way == "killed":
            sentinel.kill_master().start()
        else:
            sentinel.depose_master()
            time.sleep(0.5)
        sentinel.follow()
    writer.wait_for(21)
    acknowledged = writer.stop()
    assert writer.reported == 0
    assert set(acknowledged) <= set(records(sentinel.master))
    assert len(acknowledged) > 100
    assert writer.lost_tables() == set()


def test_without_the_replicas_that_are_asked_for_nothing_is_acknowledged(sentinel: Sentinel, join: Join) -> None:
    store = join(sentinel.url, Durability(replicas=1))
    log = store.create("run", b"{}")
    log.replay()
    log.append(b"one", {})
    assert sentinel.replica is not None
    sentinel.replica.stop()
    wait_until(lambda: store.unhealthy_reason(), "it is reported")
    assert "redis_min_replicas is 1" in store.unhealthy_reason()
    begun = time.monotonic()
    calls: list[Callable[[], None]] = [lambda: log.append(b"two", {}), log.check, lambda: log.check(has_rows=False)]
    for call in calls:
        with pytest.raises(UnavailableError, match="0 replicas") as refused:
            call()
        assert not isinstance(refused.value, LogLostError), "it had no effect"
    assert time.monotonic() - begun < 5
    sentinel.replica.start()
    wait_until(lambda: not store.unhealthy_reason(), "it is well again")
    log.append(b"two", {})
    assert records(sentinel.master) == [b"one", b"two"]


def test_a_replica_that_does_not_confirm_in_time_loses_the_log(
    sentinel: Sentinel, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_service.storage.redis.run_log._RETRY_S", 0.3)
    store = join(sentinel.url, Durability(replicas=1))
    log = store.create("run", b"{}")
    log.replay()
    log.append(b"one", {log.first_number: table(row("a"))})
    assert sentinel.replica is not None
    sentinel.replica.pause()
    try:
        with monkeypatch.context() as hasty:
            hasty.setattr("gristmill_service.storage.redis.scripts._CONFIRM_MS", 100)
            with pytest.raises(LogLostError, match="did not confirm in time that the last change is on 1 replica"):
                log.append(b"two", {})
    finally:
        sentinel.replica.resume()
    log.close()
    again = store.open("run")
    assert list(again.replay().records) == [b"one", b"two"]
    again.append(b"three", {})


def test_an_append_that_was_confirmed_late_is_appended_once(sentinel: Sentinel, join: Join) -> None:
    store = join(sentinel.url, Durability(replicas=1))
    log = store.create("run", b"{}")
    log.replay()
    assert sentinel.replica is not None
    replica = sentinel.replica
    replica.pause()
    resume = threading.Timer(1.3, replica.resume)
    resume.start()
    log.append(b"one", {})
    resume.join()
    assert records(sentinel.master) == records(replica) == [b"one"]


def test_confirmation_travels_with_the_append(sentinel: Sentinel, join: Join) -> None:
    store = join(sentinel.url, Durability(replicas=1), 60.0)
    log = store.create("run", b"{}")
    log.replay()
    log.append(b"one", {})
    sent = {log.first_number + number: table(row(f"u{number}")) for number in range(20)}
    master = sentinel.master.client()
    before = master.info("commandstats")
    log.append(b"two", sent)
    after = master.info("commandstats")

    def calls(name: str) -> int:
        return int(after[f"cmdstat_{name}"]["calls"]) - int(before[f"cmdstat_{name}"]["calls"])

    assert (calls("evalsha"), calls("wait"), calls("set")) == (1, 1, 20)


def test_a_server_that_cannot_wait_for_disks_is_refused_when_the_service_starts(
    start_redis: StartRedis, join: Join
) -> None:
    server = start_redis(appendonly="always")
    with closing(connect(RedisAddress(url=server.url))) as client:
        version = tuple(map(int, client.info()["redis_version"].split(".")[:2]))
        if version < (7, 2):
            with pytest.raises(FailedPreconditionError, match=r"redis_wait_aof needs 7\.2 or later"):
                check_server(client, Durability(on_disk=True))
            return
        assert check_server(client, Durability(on_disk=True)) == []
    log = join(server.url, Durability(on_disk=True)).create("run", b"{}")
    log.replay()
    log.append(b"one", {})


def test_too_few_replicas_are_reported_when_the_service_starts(redis_server: RedisServer) -> None:
    with closing(connect(RedisAddress(url=redis_server.url))) as client:
        warnings = check_server(client, Durability(replicas=2))
    assert any("it has 0 replicas, and redis_min_replicas is 2" in warning for warning in warnings)


def test_a_sentinel_that_is_cut_off_does_not_lead_back_to_the_master_before(sentinel: Sentinel, tmp_path: Path) -> None:
    deposed = sentinel.depose_master()
    # What the other sentinel announces is published on the servers.
    deposed.client().execute_command("ACL", "SETUSER", "default", "-subscribe")
    with SentinelServer(tmp_path / "stale", deposed) as stale:
        assert sentinel.sentinel is not None
        [_, port] = stale.client().execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", Sentinel.NAME)
        assert int(port) == deposed.port, "it is asked first, and names the former master"
        url = f"redis+sentinel://{stale.address},{sentinel.sentinel.address}/{Sentinel.NAME}"
        with closing(connect(RedisAddress(url=url))) as client:
            assert watched_master(client) == (HOST, sentinel.master.port)
            assert client.info("server")["tcp_port"] == sentinel.master.port


def test_rows_that_a_failover_lost_before_their_record_are_not_referred_to(
    sentinel: Sentinel, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new master has the whole log, but not the large table that was written last."""
    store = join(sentinel.url)
    log = store.create("run", b"{}")
    log.replay()
    log.append(b"one", {})
    part_from_master(sentinel)
    write = keys.write_value

    def die_then(client: Client, key: str, value: bytes) -> Sequence[str]:
        names = write(client, key, value)
        sentinel.kill_master()
        return names

    monkeypatch.setattr(tables, "write_value", die_then)
    with pytest.raises(LogLostError):
        log.append(b"two", {log.first_number: table(row("large", response=range(100_000)))})
    log.close()
    assert list(reopened(store).replay().records) == [b"one"]


@pytest.mark.parametrize("way", ["killed", "deposed"])
def test_in_a_cluster_nothing_that_a_replica_confirmed_is_lost(tmp_path: Path, join: Join, way: str) -> None:
    log_key = f"{{{PREFIX}:run}}:log".encode()
    with RedisCluster(tmp_path / "cluster", with_replicas=True) as cluster:
        store = join(cluster.url, Durability(replicas=1))
        writer = Writer(store)
        for _ in range(3):
            writer.wait_for(20)
            if way == "killed":
                cluster.kill_node_of(log_key).start()
            else:
                cluster.depose_node_of(log_key)
            cluster.wait_for_replicas()
        writer.wait_for(20)
        acknowledged = writer.stop()
        assert writer.reported == 0
        assert set(acknowledged) <= set(records(cluster.node_of(log_key)))
        assert writer.lost_tables() == set()


def test_in_a_cluster_a_node_without_keys_of_the_service_neither_fails_over_unseen_nor_stops_the_other_nodes(
    tmp_path: Path, join: Join
) -> None:
    cluster = RedisCluster(tmp_path, with_replicas=True, arguments=["cluster-require-full-coverage no"])
    with cluster:
        used = {cluster.node_of(f"{PREFIX}:{name}".encode()).port for name in ("runs", "probe")}
        keys = [f"{{{PREFIX}:run-{number}}}:log".encode() for number in range(100)]
        ours = next(number for number, key in enumerate(keys) if cluster.node_of(key).port in used)
        spare = next(key for key in keys if cluster.node_of(key).port not in used)
        url = f"redis+cluster://{','.join(node.address for node in cluster.nodes)}"
        store = join(url, Durability(replicas=1))
        log = store.create(f"run-{ours}", b"{}")
        log.replay()
        dead = cluster.kill_node_of(spare)
        dead.start()
        cluster.wait_for_replicas()

        def accepts() -> bool:
            with suppress(UnavailableError):
                log.check()
                return True
            return False

        # Reasons from before the replica was back may last for one check.
        time.sleep(2)
        wait_until(accepts, "the owner asks the new primary", 10)
        log.append(b"one", {})
        # Now the whole shard fails.
        node = cluster.node_of(spare)
        for half in (dead, node):
            half.kill()
        wait_until(lambda: store._health._silent != "", "it is seen", 10)
        wait_until(accepts, "the other nodes are served", 10)
        log.append(b"two", {})
        assert (store.unhealthy_reason(), store.unreachable_reason()) == ("", "")
        log.close()
        with closing(connect(RedisAddress(url=url))) as client:
            (warning,) = [line for line in check_server(client, SERVER_ALONE) if "does not answer" in line]
            assert str(node.port) in warning
        again = join(url, Durability(replicas=1))
        assert list(again.open(f"run-{ours}").replay().records) == [b"one", b"two"]
