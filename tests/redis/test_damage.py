"""Values in Redis that are not what was written: the run is set aside with the key, the reason and the remedy, or what
is lost is reported; it can be deleted, and other runs go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gristmill.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, UnavailableError
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.run_store import LogLostError, Replay
from tests.redis.run_logs import SHORT_S, Join, any_table, keys, started, stored
from tests.redis.servers import RedisServer, wait_until
from tests.storage.tables import compact, snapshot_in

Spoil = Callable[[Any, Any], object]
REMEDY = "restore it, or delete the run"


@pytest.fixture
def log(store: RedisRunStore) -> RedisRunLog:
    """Of a run that has a snapshot and three records after it."""
    other = store.create("other", b"{}")
    started(other)
    other.append(b"one", {})
    log = store.create("run", b'{"dp_size":2}')
    started(log)
    log.note_generation(3)
    stored(log, any_table())
    log.append(b"snapshot follows", {})
    compact(log, b"all before")
    for record in (b"one", b"two", b"three"):
        log.append(record, {})
    return log


def replayed(store: RedisRunStore) -> Replay:
    return store.open("run").replay()


def entry(client: Any, name: str, index: int) -> bytes:
    """The number of an entry of the log; the first is the one with which it begins."""
    return bytes(client.xrange(name)[index][0])


def other_type(client: Any, key: str) -> None:
    client.unlink(key)
    client.sadd(key, "another type")


def flip(field: str | None, at: int) -> Spoil:
    """Flips a bit of a value, or of a field of a hash."""

    def spoil(client: Any, key: str) -> None:
        value = bytearray(client.get(key) if field is None else client.hget(key, field))
        value[at] ^= 1
        if field is None:
            client.set(key, bytes(value))
        else:
            client.hset(key, field, bytes(value))

    return spoil


def replace_entry(fields: dict[bytes, bytes] | None) -> Spoil:
    """Puts another one in place of the last entry of the log, or none in place of the one before it."""

    def spoil(client: Any, key: str) -> None:
        if fields is None:
            client.xdel(key, entry(client, key, 2))
            return
        last = entry(client, key, 3)
        client.xdel(key, last)
        client.xtrim(key, maxlen=10)
        client.execute_command("XSETID", key, entry(client, key, 2))
        client.xadd(key, fields, id=last)

    return spoil


SET_ASIDE: dict[str, tuple[str, Spoil]] = {
    "config flipped in what JSON is made of": ("config", flip(None, 0)),
    "config flipped in a number": ("config", flip(None, -3)),
    "config has another value": (
        "config",
        lambda client, key: client.set(key, client.get(key).replace(b"dp_size", b"dp_sizf")),
    ),
    "config empty": ("config", lambda client, key: client.set(key, b"")),
    "config of another type": ("config", other_type),
    "config gone": ("config", lambda client, key: client.unlink(key)),
    "head of another type": ("head", other_type),
    "head empty": ("head", lambda client, key: client.set(key, b"")),
    "head gone, and with it what says of the snapshot": ("log", lambda client, key: client.unlink(key[:-3] + "head")),
    "last record flipped": ("head", lambda client, key: client.hset(key, "last", b"x-0")),
    "last record empty": ("head", lambda client, key: client.hset(key, "last", b"")),
    "generation flipped": ("head", lambda client, key: client.hset(key, "generation", b"s")),
    "snapshot's description flipped": ("head", flip("snapshot", 10)),
    "snapshot's description empty": ("head", lambda client, key: client.hset(key, "snapshot", b"")),
    "snapshot's description gone": ("log", lambda client, key: client.hdel(key[:-3] + "head", "snapshot")),
    "log of another type": ("log", other_type),
    "log with garbage": ("log", replace_entry({b"r": b"garbage"})),
    "log with an empty record": ("log", replace_entry({b"r": b""})),
    "log with an entry of another": ("log", replace_entry({b"x": b"y"})),
    "log without an entry": ("log", replace_entry(None)),
    "log that another program has written to": ("log", lambda client, key: client.xadd(key, {b"x": b"y"})),
}


@pytest.mark.parametrize("what", SET_ASIDE)
def test_the_run_is_set_aside_and_can_be_deleted(store: RedisRunStore, log: RedisRunLog, what: str) -> None:
    name, spoil = SET_ASIDE[what]
    log.close()
    key = f"{store._keys('run').tag}:{name}"
    spoil(store._client, key)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=REMEDY) as caught:
            replayed(store)
        assert f"{key} in Redis is damaged: " in str(caught.value)
    assert store.names() == ["other", "run"]
    with pytest.raises(AlreadyExistsError):
        store.create("run", b"{}")
    assert started(store.open("other")) == [b"one"]
    store.delete("run")
    assert store.names() == ["other"]
    assert [key for key in keys(store) if ":run}" in key] == []
    assert started(store.create("run", b"{}")) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client, key: client.unlink(key),
        lambda client, key: client.set(key, b""),
        other_type,
        flip(None, 3),
        lambda client, key: client.set(key, client.get(key)[:-1]),
    ],
    ids=["gone", "empty", "type", "flipped", "cut"],
)
def test_a_damaged_snapshot_sets_the_run_aside(store: RedisRunStore, log: RedisRunLog, spoil: Spoil) -> None:
    log.close()
    [key] = [key for key in keys(store) if ":snapshot:" in key]
    spoil(store._client, key)
    with pytest.raises(InvalidArgumentError, match="a piece of the run's snapshot is missing or incomplete"):
        snapshot_in(replayed(store))
    store.delete("run")


@pytest.mark.parametrize("lease", [b"", b"garbage", b"null", b"[1]", b'{"process":"other"}', None])
def test_a_damaged_lease_is_nobodys(store: RedisRunStore, log: RedisRunLog, lease: bytes | None) -> None:
    log.close()
    owner = store._keys("run").owner
    if lease is None:
        store._client.sadd(owner, "another type")
    else:
        store._client.set(owner, lease)
    assert replayed(store).records == [b"one", b"two", b"three"]


def test_an_owner_whose_lease_is_damaged_renews_it(redis_server: RedisServer, join: Join) -> None:
    store, other = join(redis_server.url, lease_s=SHORT_S), join(redis_server.url)
    log = store.create("run", b"{}")
    started(log)
    owner = store._keys("run").owner
    store._client.set(owner, b"garbage")
    wait_until(lambda: store._client.get(owner) != b"garbage", "it is renewed")
    with pytest.raises(UnavailableError, match="is owned by the process at"):
        other.open("run")


@pytest.mark.parametrize(("field", "value"), [("token", b"x"), ("claim", b"x"), ("claim", b"9000000000")])
def test_a_damaged_claim_is_rebuilt(store: RedisRunStore, log: RedisRunLog, field: str, value: bytes) -> None:
    store._client.hset(store._keys("run").head, field, value)
    if field == "token":
        with pytest.raises(LogLostError, match="another replica now owns"):
            log.append(b"lost", {})
    log.close()
    again = store.open("run")
    assert list(again.replay().records) == [b"one", b"two", b"three"]
    assert log.first_number <= again.first_number < 1 << 63


def test_a_report_that_is_garbage_is_not_heeded(redis_server: RedisServer, join: Join) -> None:
    store = join(redis_server.url, lease_s=SHORT_S)
    log = store.create("run", b"{}")
    started(log)
    head = store._keys("run").head
    store._client.hset(head, "reported", b"garbage")
    wait_until(lambda: not store._client.hexists(head, "reported"), "it is read")
    log.append(b"goes on", {})


@pytest.mark.parametrize(("name", "spoil"), [("head", other_type), ("log", other_type)])
def test_an_owner_whose_run_is_damaged_under_it_loses_it(
    store: RedisRunStore, log: RedisRunLog, name: str, spoil: Spoil
) -> None:
    spoil(store._client, f"{store._keys('run').tag}:{name}")
    with pytest.raises(FailedPreconditionError, match="refuses a command"):
        log.append(b"lost", {})
    log.close()
    with pytest.raises(InvalidArgumentError, match=REMEDY):
        replayed(store)


class TestRollback:
    """What the log has lost is reported, also to a process that never had the run."""

    @pytest.fixture(params=["the same process", "another process"])
    def reader(self, request: pytest.FixtureRequest, store: RedisRunStore, url: str, join: Join) -> RedisRunStore:
        return store if request.param == "the same process" else join(url, 1)

    def test_a_log_that_is_gone(self, reader: RedisRunStore, store: RedisRunStore, log: RedisRunLog) -> None:
        log.close()
        store._client.unlink(store._keys("run").log)
        self.check(reader, [])

    def test_a_log_that_is_shorter(self, reader: RedisRunStore, store: RedisRunStore, log: RedisRunLog) -> None:
        log.close()
        name = store._keys("run").log
        store._client.xdel(name, entry(store._client, name, 3), entry(store._client, name, 2))
        self.check(reader, [b"one"])

    def test_a_log_that_is_empty(self, reader: RedisRunStore, store: RedisRunStore, log: RedisRunLog) -> None:
        log.close()
        store._client.xtrim(store._keys("run").log, maxlen=0, approximate=False)
        self.check(reader, [])

    def check(self, reader: RedisRunStore, records: list[bytes]) -> None:
        log = reader.open("run")
        replay = log.replay()
        assert (snapshot_in(replay), list(replay.records)) == (b"all before", records)
        assert (replay.is_short(), replay.generation) == (True, 3)
        log.close()
        log = reader.open("run")
        assert log.replay().is_short(), "until the log goes on"
        assert log.retain(set()) == set()
        log.append(b"goes on", {})
        log.note_generation(4)
        log.flush()
        log.append(b"and on", {})
        log.close()
        replay = reader.open("run").replay()
        assert (list(replay.records), replay.is_short(), replay.generation) == (
            [*records, b"goes on", b"and on"],
            False,
            4,
        )

    def test_a_run_without_a_snapshot_whose_log_is_gone(self, reader: RedisRunStore, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        log.close()
        store._client.unlink(store._keys("run").log)
        again = reader.open("run")
        replay = again.replay()
        assert (snapshot_in(replay), list(replay.records), replay.is_short()) == (None, [], True)
        again.append(b"goes on", {})
        again.close()
        assert started(reader.open("run")) == [b"goes on"]

    def test_a_run_whose_head_is_gone_may_have_lost_records(self, reader: RedisRunStore, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        log.close()
        store._client.unlink(store._keys("run").head)
        again = reader.open("run")
        replay = again.replay()
        assert (list(replay.records), replay.is_short()) == ([b"one"], True)
        again.append(b"goes on", {})
        again.close()
        replay = reader.open("run").replay()
        assert (list(replay.records), replay.is_short()) == ([b"one", b"goes on"], False)

    def test_nothing_is_lost_where_the_snapshot_has_all(
        self, reader: RedisRunStore, store: RedisRunStore, log: RedisRunLog
    ) -> None:
        compact(log, b"all")
        log.close()
        store._client.unlink(store._keys("run").log)
        again = reader.open("run")
        replay = again.replay()
        assert (snapshot_in(replay), list(replay.records), replay.is_short()) == (b"all", [], False)
        again.append(b"goes on", {})
        again.close()
        assert started(reader.open("run")) == [b"goes on"]

    def test_an_idle_owner_learns_that_its_log_is_gone(self, redis_server: RedisServer, join: Join) -> None:
        store = join(redis_server.url, lease_s=SHORT_S)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        store._client.unlink(store._keys("run").log)
        wait_until(lambda: log.is_lost, "it learns")
        log.close()
        again = store.open("run")
        assert again.replay().is_short()
        store._leases._renew_all()
        store._leases._pool.submit(lambda: None).result()
        assert not again.is_lost, "it is opened again once"
