"""A run in Redis of the format before is converted when it is opened: nothing of it is lost but its shards."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill._wire.rows import to_rows
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.storage import row_tables
from gristmill_service.storage.redis import keys as redis_keys
from gristmill_service.storage.redis import old_format
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.row_tables import steps_of
from tests.formats import kept
from tests.redis.run_logs import PREFIX, Join, any_table, keys, same, started
from tests.redis.servers import RedisServer

FIXTURE = Path(__file__).parents[1] / "formats" / "fixtures" / "redis-1.1.2.2.json"
TAG = f"{{{PREFIX}:run}}"


@pytest.fixture
def old(store: RedisRunStore) -> Any:
    """A client of a Redis with a run as the older version kept it: a snapshot, two records, tables, shards."""
    client: Any = store._client
    description = {"format": 1, "nonce": "nonce", "config": '{"dp_size":2}'}
    client.sadd(f"{PREFIX}:runs", "run")
    client.set(f"{TAG}:config", json.dumps(description))
    for name, value in {"fence": b"token", "claims": b"5", "acknowledged": b"[]", "batch:0": b"\2index"}.items():
        client.set(f"{TAG}:{name}", value)
    snapshot = f"{TAG}:snapshot:token:7"
    described = {"format": 1, "name": snapshot, "number": 7, "size": 11}
    client.set(f"{TAG}:snapshot", msgspec.msgpack.encode(described))
    for index, piece in enumerate((b"all ", b"before ")):
        client.set(f"{snapshot}:{index}", piece)
    for number, record in ((7, b"in the snapshot"), (8, b"one"), (9, b"two")):
        client.xadd(f"{TAG}:log", {b"e": record}, id=f"{number}-0")
    for number, tokens in ((1, 2), (2, 200)):
        table = row_tables.encode(any_table(number, tokens)).joined()
        for index in range(-(-len(table) // 300)):
            client.set(f"{PREFIX}:run:rows:nonce:{number}:{index}", table[300 * index : 300 * index + 300])
    client.set(f"{PREFIX}:run:rows:nonce:3:0", (1000).to_bytes(8, "little") + b"cut")
    client.set(f"{PREFIX}:run:rows:other:1:0", b"of a run of this name before")
    client.set(f"{PREFIX}:run:shard:5-abc:plan", b"plan")
    return client


def check(store: RedisRunStore) -> None:
    log = store.open("run")
    assert (log.config, log.run_id) == (b'{"dp_size":2}', "nonce")
    replay = log.replay()
    assert (replay.snapshot, list(replay.records), replay.is_short()) == (b"all before ", [b"one", b"two"], False)
    assert log.retain({1, 2, 3}) == {3}
    assert same(log.get(1), any_table(1, 2))
    assert same(log.get(2), any_table(2, 200))
    log.append(b"three", {log.first_number: any_table()})
    log.close()


def test_it_is_converted_once(store: RedisRunStore, old: Any) -> None:
    check(store)
    log = store.open("run")
    store.sweep(["run"])
    assert started(log) == [b"one", b"two", b"three"]
    assert log.retain({1, 2, 5}) == {5}
    store.sweep(["run"])
    parts = {key.removeprefix(f"{TAG}:") for key in keys(store)} - {f"{PREFIX}:runs"}
    assert {part.partition(":")[0] for part in parts} == {"config", "head", "log", "owner", "snapshot", "rows"}
    assert {part for part in parts if part.startswith("rows:")} == {"rows:nonce:1", "rows:nonce:2"}


@pytest.mark.usefixtures("small_values")
def test_large_tables_are_cut_again(store: RedisRunStore, old: Any) -> None:
    check(store)
    check_again = store.open("run")
    assert started(check_again) == [b"one", b"two", b"three"]
    assert check_again.retain({1, 2}) == set()


@pytest.mark.parametrize("step", ["_move_rows", "delete_old"])
def test_a_conversion_that_ended_halfway_is_repeated(
    store: RedisRunStore, old: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*_: object) -> None:
        raise UnavailableError("died")

    with monkeypatch.context() as patched:
        patched.setattr(old_format, step, die)
        with pytest.raises(UnavailableError, match="died"):
            store.open("run")
    check(store)


def test_what_its_owner_still_sends_is_refused(store: RedisRunStore, old: Any) -> None:
    store.open("run")
    assert not old.exists(f"{TAG}:fence"), "the older version compares its token with it"


def test_numbers_of_tables_are_not_used_again_though_clocks_differ(store: RedisRunStore, old: Any) -> None:
    claims = 2_000_000_000
    old.set(f"{TAG}:claims", claims)
    with pytest.raises(UnavailableError, match="retry"):
        store.open("run")
    assert store.open("run").first_number > claims << 32


@pytest.mark.parametrize("name", ["snapshot", "claims", "log"])
def test_what_is_damaged_sets_it_aside(store: RedisRunStore, old: Any, name: str) -> None:
    old.unlink(f"{TAG}:{name}")
    old.sadd(f"{TAG}:{name}", "another type")
    with pytest.raises(InvalidArgumentError, match="is damaged: it is of another type; restore it, or delete the run"):
        store.open("run")
    store.delete("run")
    assert keys(store) == set()


def test_it_is_deleted_whole(store: RedisRunStore, old: Any) -> None:
    store.delete("run")
    assert keys(store) == set()


def test_what_the_version_before_kept_is_read(redis_server: RedisServer, join: Join) -> None:
    fixture = json.loads(FIXTURE.read_text())
    client = redis_server.client()
    kept.put_keys(fixture["kept"], client)
    store = join(redis_server.url)
    store._prefix = "gristmill"
    log = store.open("kept")
    assert not log.replay().is_short()
    numbers = {int(redis_keys.tag_and_parts(key)[1][2]) for key in log.keys.scan(client, "rows:")}
    old_names = [b64decode(name) for name in fixture["kept"]]
    assert numbers == {int(name.split(b":")[-2]) for name in old_names if b":rows:" in name}
    assert log.retain(numbers) == set()
    assert all(to_rows(steps_of(table)) for table in log.get_all(numbers).values())
    assert client.keys("gristmill:kept*") == []
    assert redis_keys.RunKeys("gristmill", "kept").config.encode() in client.keys("*")
