"""Shards in Redis: what is kept, what is left behind, and what goes wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from gristmill._wire.codecs.zstd_frames import compressed, decompressed
from gristmill.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError, UnavailableError
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import Iovec
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage.redis import shard_store
from gristmill_service.storage.redis.keys import RunKeys
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.run_store import LogLostError
from gristmill_service.storage.shard_store import ShardsLostError
from tests import naive
from tests.redis.cluster import RedisCluster
from tests.redis.fence import OpenFence
from tests.redis.servers import RedisServer
from tests.storage.test_stores import FIRST, SECOND, Source, sources
from tests.tools.bench.workloads import workload

BATCH = "{gristmill:run}:batch:0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as started:
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def cluster_client(cluster: RedisCluster) -> redis.RedisCluster:
    return redis.cluster.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, protocol=2)


@pytest.fixture
def client(server: RedisServer) -> redis.Redis:
    made = server.client()
    made.flushall()
    return made


@pytest.fixture
def store(client: redis.Redis) -> RedisShardStore:
    return RedisShardStore(client, OpenFence(client))


@pytest.fixture
def small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_store, "FRAME_BYTES", 100)


def read_shard(store: RedisShardStore, address: ShardAddress = FIRST, batch: int = 0) -> bytes:
    return b"".join(store.read("run", batch, address))


def test_real_shards_come_back_as_their_files_and_rest_in_a_fraction(
    store: RedisShardStore, client: redis.Redis
) -> None:
    work = workload("short")
    batch = build_batch(work.steps, work.config("prefix"), run="run", batch=0)
    nbytes = store.publish("run", 0, b"{}", batch.shards)
    some = batch.shards[:3]
    for shard in some:
        assert read_shard(store, shard.address) == naive.shard_bytes(shard)
        frames = store.read_frames("run", 0, shard.address)
        assert b"".join(decompressed(frame, 1 << 30) for frame in frames) == naive.shard_bytes(shard)
    values: Any = client.hvals(BATCH)
    kept = sum(map(len, values))
    assert kept < 0.3 * sum(shard.size for shard in batch.shards)
    assert nbytes < kept < nbytes + 20 * len(values), "and checksums"


def test_a_batch_that_is_published_again_is_replaced_and_the_old_one_leaves_nothing(
    store: RedisShardStore, client: redis.Redis
) -> None:
    store.publish("run", 0, b"{}", sources(first=b"x" * 50))
    before = len(client.keys())
    store.publish("run", 0, b"new", sources(first=b"another", second=b"one"))
    assert store.plan("run", 0) == b"new"
    assert read_shard(store) == b"another"
    assert store.locate("run", 0, SECOND).size == 3
    assert len(client.keys()) == before


@pytest.mark.usefixtures("small_values")
def test_large_shards_stand_in_several_values(store: RedisShardStore, client: redis.Redis) -> None:
    data = bytes(range(250)) * 2
    store.publish("run", 0, b"{}", sources(first=data))
    assert list(store.read_frames("run", 0, FIRST)) == [compressed(data[at : at + 100]) for at in range(0, 500, 100)]
    assert read_shard(store) == data


@pytest.mark.usefixtures("small_values")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: b"",
        lambda value: value[:-1],
        lambda value: value + b"x",
        lambda value: value[:-5] + bytes([value[-5] ^ 1]) + value[-4:],
        lambda value: value[:2] + b"\xff" * 12 + value[14:],
        lambda value: b"of a compact form of before",
    ],
    ids=["empty", "cut", "longer", "flipped", "head", "other"],
)
@pytest.mark.parametrize("part", ["policy/0/0", "policy/0/0/0", "policy/0/0/2", "plan"])
def test_a_damaged_value_is_lost(
    store: RedisShardStore, client: redis.Redis, part: str, spoil: Callable[[bytes], bytes]
) -> None:
    store.publish("run", 0, bytes(range(100)), sources(first=bytes(range(250)) * 2))
    value: Any = client.hget(BATCH, part)
    client.hset(BATCH, part, spoil(value))
    reads: list[Callable[[], object]] = [lambda: read_shard(store), lambda: list(store.read_frames("run", 0, FIRST))]
    for read in [lambda: store.plan("run", 0)] if part == "plan" else reads:
        with pytest.raises(ShardsLostError, match="Redis has lost a part of batch 0"):
            read()
    assert b"".join(store.read("run", 0, SECOND)) == b"second"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client: client.hset(BATCH, "format", "x"),
        lambda client: client.hset(BATCH, "format", "2"),
        lambda client: client.hdel(BATCH, "format"),
        lambda client: client.hdel(BATCH, "nonce"),
        lambda client: (client.delete(BATCH), client.set(BATCH, b"another type")),
        lambda client: (client.delete(BATCH), client.hset(BATCH, "of", "another program")),
    ],
    ids=["format flipped", "format before", "no format", "no nonce", "type", "other"],
)
def test_a_damaged_batch_is_lost_and_may_be_published_again(
    store: RedisShardStore, client: redis.Redis, spoil: Callable[[redis.Redis], object]
) -> None:
    store.publish("run", 0, b"{}", sources())
    spoil(client)
    for read in (
        lambda: store.plan("run", 0),
        lambda: store.locate("run", 0, FIRST),
        lambda: read_shard(store),
        lambda: store.read_frames("run", 0, FIRST),
    ):
        with pytest.raises((ShardsLostError, NotFoundError)):
            read()
    store.publish("run", 0, b"{}", sources())
    assert read_shard(store) == b"first shard"
    spoil(client)
    store.free("run", 0)
    assert client.keys() == []


@pytest.mark.usefixtures("small_values")
@pytest.mark.parametrize("run", ["run", "{brace} and\nspace", "a*[b]?"])
def test_freed_batches_and_deleted_runs_leave_no_key(store: RedisShardStore, client: redis.Redis, run: str) -> None:
    for batch in range(3):
        store.publish(run, batch, b"{}", sources(first=b"x" * 1000))
    store.free(run, 1)
    with pytest.raises(NotFoundError):
        store.plan(run, 1)
    assert store.plan(run, 2) == b"{}"
    tag = RunKeys("gristmill", run).tag
    assert all(key.decode().startswith(tag) for key in client.scan_iter("*"))
    store.delete_run(run)
    assert client.keys() == []


def test_a_run_that_looks_like_a_pattern_deletes_itself_alone(store: RedisShardStore) -> None:
    store.publish("run", 0, b"{}", sources())
    for other in ("r*", "ru?", "[r]un", "*"):
        store.publish(other, 0, b"other", sources())
        store.delete_run(other)
    assert store.plan("run", 0) == b"{}"


def test_stores_with_prefixes_of_their_own_share_a_server(client: redis.Redis) -> None:
    one, other = (RedisShardStore(client, OpenFence(client), prefix) for prefix in ("gm*", "gmx"))
    for store in (one, other):
        store.publish("run", 0, store._prefix.encode(), sources())
    one.delete_run("run")
    assert other.plan("run", 0) == b"gmx"


def test_a_publication_that_died_half_way_goes_with_its_run(store: RedisShardStore, client: redis.Redis) -> None:
    client.hset("{gristmill:run}:staged:1:0123", "policy/0/0/0", b"left behind")
    store.publish("run", 0, b"{}", sources())
    store.delete_run("run")
    assert client.keys() == []


def test_a_batch_that_fails_half_way_leaves_no_key(store: RedisShardStore, client: redis.Redis) -> None:
    with pytest.raises(ValueError, match="no rows"):
        store.publish("run", 0, b"{}", [Source(b"good", FIRST), Source(b"bad!", SECOND, fails=ValueError("no rows"))])
    assert client.keys() == []


def test_a_full_redis_refuses_the_batch_and_keeps_nothing_of_it_but_the_one_before(
    store: RedisShardStore, client: redis.Redis
) -> None:
    store.publish("run", 0, b"old", sources())
    before = set(client.keys())
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
    try:
        with pytest.raises(ResourceExhaustedError, match=r"batch 0 does not fit into Redis.*maxmemory"):
            store.publish(
                "run",
                0,
                b"{}",
                [Source(random.Random(i).randbytes(1 << 20), ShardAddress("policy", 0, i)) for i in range(8)],
            )
    finally:
        client.config_set("maxmemory", 0)
    assert set(client.keys()) == before
    assert store.plan("run", 0) == b"old"


def test_a_shard_that_is_freed_or_replaced_while_it_is_read_is_said_to_be_gone_or_has_to_be_read_again(
    store: RedisShardStore, small_values: None
) -> None:
    store.publish("run", 0, b"{}", sources(first=b"x" * 1000))
    freed, replaced = (store.read_frames("run", 0, FIRST) for _ in range(2))
    assert next(freed) == next(replaced)
    store.free("run", 0)
    with pytest.raises(NotFoundError, match="batch 0 is not published, or already freed"):
        next(freed)
    store.publish("run", 0, b"{}", sources(first=b"y" * 1000))
    with pytest.raises(UnavailableError, match="republished while it was read"):
        next(replaced)


def test_readers_see_one_publication_or_the_next(store: RedisShardStore, small_values: None) -> None:
    problems = []
    done = threading.Event()

    def keep_reading() -> None:
        while not done.is_set():
            seen = read_shard(store)
            if len(seen) != 1000 or len(set(seen)) != 1:
                problems.append(seen)

    store.publish("run", 0, b"{}", sources(first=b"x" * 1000))
    readers = [threading.Thread(target=keep_reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    for index in range(30):
        store.publish("run", 0, b"{}", sources(first=bytes([index]) * 1000))
    done.set()
    for reader in readers:
        reader.join()
    assert problems == []


def test_a_part_that_is_gone_is_said_to_be_lost(store: RedisShardStore, client: redis.Redis) -> None:
    store.publish("run", 0, b"{}", sources())
    client.hdel(BATCH, "policy/0/0/0", "plan")
    reads: list[Callable[[], bytes]] = [lambda: read_shard(store), lambda: store.plan("run", 0)]
    for read in reads:
        with pytest.raises(ShardsLostError, match="set maxmemory-policy to noeviction"):
            read()


def test_a_batch_of_a_newer_format_is_refused(store: RedisShardStore, client: redis.Redis) -> None:
    store.publish("run", 0, b"{}", sources())
    client.hset(BATCH, "format", "4")
    with pytest.raises(FailedPreconditionError, match="has format 4 and this version reads 3; use the gristmill"):
        store.plan("run", 0)


def test_nothing_expires(store: RedisShardStore, client: redis.Redis) -> None:
    store.publish("run", 0, b"{}", sources())
    assert {client.ttl(key) for key in client.keys("*")} == {-1}


def test_a_redis_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "gone", appendonly="no") as server:
        store = RedisShardStore(client := server.client(), OpenFence(client))
        store.publish("run", 0, b"{}", sources())
    for call in (
        lambda: store.publish("run", 1, b"{}", sources()),
        lambda: store.plan("run", 0),
        lambda: store.free("run", 0),
        lambda: store.delete_run("run"),
        lambda: read_shard(store),
    ):
        with pytest.raises(UnavailableError, match=r"Redis at .* refused; retry"):
            call()


def test_a_publication_whose_answer_is_lost_is_asked_for_again(
    store: RedisShardStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, is_lost = OpenFence.publish, [True]

    def publish_and_lose(fence: OpenFence, staged: str, batch: str, nonce: str) -> None:
        if is_lost.pop():
            publish(fence, staged, batch, nonce)
            is_lost.append(False)
            raise UnavailableError("answer lost") from redis.ConnectionError("answer lost")

    monkeypatch.setattr(OpenFence, "publish", publish_and_lose)
    store.publish("run", 0, b"{}", sources())
    assert is_lost == []
    assert read_shard(store) == b"first shard"


def test_a_publication_of_unknown_outcome_leaves_nothing_visible(
    store: RedisShardStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(fence: OpenFence, staged: str, batch: str, nonce: str) -> None:
        with suppress(redis.ResponseError):
            client.rename(staged, batch)
        raise UnavailableError("answer lost") from redis.ConnectionError("answer lost")

    monkeypatch.setattr(OpenFence, "publish", lose)
    with pytest.raises(UnavailableError, match="answer lost"):
        store.publish("run", 0, b"{}", sources())
    assert client.keys() == []


def test_a_cluster_has_a_run_on_one_of_its_nodes(cluster: RedisCluster, small_values: None) -> None:
    store = RedisShardStore(client := cluster_client(cluster), OpenFence(client))
    data = bytes(range(250)) * 20
    store.publish("run", 0, b"{}", sources(first=data))
    store.publish("run", 1, b"{}", sources())
    assert read_shard(store) == data
    assert store.plan("run", 0) == b"{}"
    assert sorted(client.dbsize(target_nodes=node) for node in client.get_primaries()) == [0, 0, 2]
    store.free("run", 0)
    with pytest.raises(NotFoundError):
        store.plan("run", 0)
    store.delete_run("run")
    assert client.dbsize(target_nodes="primaries") == 0


class TestLeftovers:
    def test_what_could_not_be_removed_is_removed_by_the_next_call(
        self, store: RedisShardStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*keys: str) -> None:
            raise redis.ConnectionError("connection lost")

        broken = [Source(b"good", FIRST), Source(b"bad!", SECOND, fails=ValueError("no rows"))]
        with monkeypatch.context() as patched:
            patched.setattr(client, "unlink", fail)
            with pytest.raises(ValueError, match="no rows"):
                store.publish("run", 0, b"{}", broken)
        assert len(client.keys("*:staged:*")) == 1
        store.publish("other", 0, b"{}", sources())
        assert client.keys("*:staged:*") == []

    def test_publications_that_fail_next_to_others_leave_no_key(
        self, store: RedisShardStore, client: redis.Redis
    ) -> None:
        done, problems = threading.Event(), []

        def publish_and_free(run: str) -> None:
            try:
                batch = 0
                while not done.is_set():
                    store.publish(run, batch, b"{}", sources())
                    store.free(run, batch)
                    batch += 1
            except Exception as error:  # noqa: BLE001
                problems.append(error)

        others = [threading.Thread(target=publish_and_free, args=(f"other-{number}",)) for number in range(3)]
        for thread in others:
            thread.start()
        good = [Source(b"good", ShardAddress("policy", 0, rank)) for rank in range(8)]
        for _ in range(30):
            with pytest.raises(ValueError, match="no rows"):
                store.publish("run", 0, b"{}", [*good, Source(b"bad!", SECOND, fails=ValueError("no rows"))])
        done.set()
        for thread in others:
            thread.join()
        store.free("run", 0)
        assert problems == []
        assert client.keys() == []


class TestSweep:
    @pytest.fixture
    def owners(self, client: redis.Redis) -> Iterator[list[RedisRunStore]]:
        with ExitStack() as running:
            owners = [RedisRunStore(client, "gristmill", 30.0) for _ in range(2)]
            for number, owner in enumerate(owners):
                running.callback(owner.close)
                owner.advertise(f"grpc-{number}", f"http-{number}")
            yield owners

    def die_publishing(self, store: RedisShardStore, batch: int) -> None:
        """Leaves what a process leaves that is killed before its batch is visible."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(shard_store, "_put_in_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            patched.setattr(shard_store, "unlink", lambda *_: 0)
            with pytest.raises(KeyboardInterrupt):
                store.publish("run", batch, b"{}", sources())

    def test_the_next_owner_removes_what_a_killed_publication_left(
        self, owners: list[RedisRunStore], client: redis.Redis
    ) -> None:
        dead, living = (RedisShardStore(client, owner) for owner in owners)
        log = owners[0].create("run", b"{}")
        dead.publish("run", 0, b"{}", sources())
        self.die_publishing(dead, 1)
        dead.sweep(["run"])
        living.sweep(["run"])
        assert len(client.keys("*:staged:*")) == 1, "only the next owner knows that nobody is at it"
        log.close()
        owners[1].open("run")
        living.sweep(["run"])
        assert client.keys("*:staged:*") == []
        assert read_shard(living) == b"first shard"

    def test_who_does_not_own_the_run_writes_nothing(self, owners: list[RedisRunStore], client: redis.Redis) -> None:
        owners[1].create("run", b"{}")
        before = set(client.keys())
        with pytest.raises(UnavailableError, match="this process no longer owns run 'run'; retry"):
            RedisShardStore(client, owners[0]).publish("run", 0, b"{}", sources())
        assert set(client.keys()) == before

    def test_a_publication_of_before_never_becomes_visible(
        self, owners: list[RedisRunStore], client: redis.Redis
    ) -> None:
        is_writing, goes_on = threading.Event(), threading.Event()

        class Slow(Source):
            def iovec(self) -> Iovec:
                is_writing.set()
                assert goes_on.wait(30)
                return super().iovec()

        owners[0].create("run", b"{}")
        store = RedisShardStore(client, owners[0])
        errors: list[Exception] = []

        def publish() -> None:
            try:
                store.publish("run", 0, b"{}", [Source(b"first shard", FIRST), Slow(b"slow", SECOND)])
            except UnavailableError as error:
                errors.append(error)

        publishing = threading.Thread(target=publish)
        publishing.start()
        assert is_writing.wait(30)
        owners[0].open("run")
        store.sweep(["run"])
        goes_on.set()
        publishing.join()
        assert isinstance(errors[0], LogLostError)
        assert client.keys("*:staged:*") == []
        with pytest.raises(NotFoundError):
            store.plan("run", 0)

    def test_keys_of_another_program_are_left_alone(self, owners: list[RedisRunStore], client: redis.Redis) -> None:
        owners[0].create("run", b"{}")
        store = RedisShardStore(client, owners[0])
        strange = ["rows:x", "rows:x:y", "staged", "staged:x:y", "snapshot", "snapshot:a", "snapshot:a:b", "strange"]
        for name in strange:
            client.set(f"{{gristmill:run}}:{name}", b"")
        store.sweep(["run"])
        assert len(client.keys("{gristmill:run}:*")) == 4 + len(strange)
