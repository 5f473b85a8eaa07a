"""The runs in Redis, for one process and for several: configurations, records, identity, leases and fences."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import quote

import pytest

from gristmill.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service.storage.redis.connection import RedisAddress, connect
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.scripts import COMPACT, Script
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.run_store import LogLostError, OwnedElsewhereError
from tests.redis.run_logs import PREFIX, SHORT_S, Join, any_table, expire, keys, row_keys, same, started, stored
from tests.redis.servers import RedisServer, StartRedis, wait_until
from tests.storage.tables import compact, snapshot_in
from tests.storage.test_stores import sources


def die_at(number: int, store: RedisRunStore, patched: pytest.MonkeyPatch) -> None:
    """Ends the process before its command of that number from now on."""
    execute: Any = store._client.execute_command
    left = [number]

    def execute_or_die(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return execute(*arguments, **more)

    patched.setattr(store._client, "execute_command", execute_or_die)


class TestRunStore:
    def test_a_snapshot_stands_for_what_was_before_it(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        log.append(b"before", {})
        compact(log, b"first")
        log.append(b"between", {})
        compact(log, b"all before")
        log.append(b"after", {})
        log.close()
        log = store.open("run")
        replay = log.replay()
        assert (snapshot_in(replay), list(replay.records)) == (b"all before", [b"after"])
        log.append(b"more", {})
        log.close()
        assert started(store.open("run")) == [b"after", b"more"]
        assert len([key for key in keys(store) if ":snapshot:" in key]) == 1, "earlier snapshots are gone"
        length = store._client.xlen(store._keys("run").log)
        assert length == 3, "the log begins with the last record that the snapshot includes"

    def test_a_snapshot_is_in_pieces_and_begun_ones_are_removed(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        log.append(b"before", {})
        log.compact(log.end, [b"one", b"", b"three"])

        def broken() -> Iterator[bytes]:
            yield b"four"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            log.compact(log.end, broken())
        assert len([key for key in keys(store) if ":snapshot:" in key]) == 3
        log.append(b"after", {})
        log.close()
        replay = store.open("run").replay()
        assert replay.snapshot is not None
        assert ([*replay.snapshot], list(replay.records)) == ([b"one", b"", b"three"], [b"after"])
        store.delete("run")
        assert keys(store) == set()

    def test_a_process_that_dies_while_it_writes_a_snapshot_leaves_the_one_before_or_the_new_one(
        self, url: str, join: Join
    ) -> None:
        store, other, outcomes = join(url), join(url, 1), list[bytes]()
        names = [f"run-{number}" for number in range(12)]
        for number, name in enumerate(names):
            log = store.create(name, b"{}")
            started(log)
            log.append(b"one", {})
            log.compact(log.end, [b"be", b"fore"])
            log.append(b"two", {})
            with pytest.MonkeyPatch.context() as patched, suppress(KeyboardInterrupt):
                die_at(number, store, patched)
                log.compact(log.end, [b"af", b"ter"])
            expire(store, name)
            replay = other.open(name).replay()
            snapshot = snapshot_in(replay)
            assert (snapshot, replay.records) in ((b"before", [b"two"]), (b"after", []))
            outcomes.append(snapshot or b"")
        assert outcomes == sorted(outcomes, reverse=True), "before the switch, or after it"
        assert {*outcomes} == {b"before", b"after"}
        other.sweep(names)
        assert len([key for key in keys(store) if ":snapshot:" in key]) == 2 * len(names)

    @pytest.mark.parametrize("lost", ["a piece", "the snapshot"])
    def test_nothing_is_removed_for_a_snapshot_of_which_a_failover_loses_a_part(
        self, store: RedisRunStore, monkeypatch: pytest.MonkeyPatch, lost: str
    ) -> None:
        log = store.create("run", b"{}")
        started(log)
        log.append(b"before", {})
        compact(log, b"first")
        log.append(b"between", {})
        head, step = store._keys("run").head, store._scripts.step
        earlier = keys(store)
        [snapshot] = store._client.hmget(head, "snapshot")

        def pieces() -> Iterator[bytes]:
            yield b"all "
            if lost == "a piece":
                store._client.delete(*keys(store) - earlier)
            yield b"before"

        def fail_over(script: Script, *arguments: Any, **more: Any) -> Any:
            outcome = step(script, *arguments, **more)
            if script is COMPACT and lost == "the snapshot":
                store._client.hset(head, "snapshot", snapshot)
            return outcome

        monkeypatch.setattr(store._scripts, "step", fail_over)
        with pytest.raises(LogLostError, match="Redis has lost a part of"):
            log.compact(log.end, pieces())
        assert log.is_lost
        log.close()
        replay = store.open("run").replay()
        assert (snapshot_in(replay), list(replay.records), replay.is_short()) == (b"first", [b"between"], False)

    def test_a_log_of_many_records_is_read_in_order(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        for number in range(2500):
            log.append(b"%d" % number, {})
        log.close()
        assert started(store.open("run")) == [b"%d" % number for number in range(2500)]

    def test_a_log_is_long_once_it_is_much_longer_than_its_snapshot(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        while not log.is_long:
            log.append(bytes(4 << 20), {})
        compact(log, bytes(10 << 20))
        for _ in range(6):
            assert not log.is_long
            log.append(bytes(4 << 20), {})
        assert log.is_long
        log.close()
        log = store.open("run")
        started(log)
        assert log.is_long, "the process that opens it next knows, too"

    def test_runs_are_created_once_and_deleted_whole(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        with pytest.raises(AlreadyExistsError):
            store.create("run", b"{}")
        started(log)
        stored(log, any_table())
        compact(log, b"one")
        store.delete("run")
        log.close()
        store.delete("run")
        assert store.names() == []
        assert keys(store) == set()
        with pytest.raises(NotFoundError):
            store.open("run")

    def test_a_run_of_the_same_name_meets_nothing_of_the_one_before(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        store.delete("run")
        log.close()
        again = store.create("run", b'{"new":1}')
        assert (again.config, started(again)) == (b'{"new":1}', [])
        assert again.retain({number}) == {number}

    def test_runs_whose_names_look_alike_are_apart(self, store: RedisRunStore) -> None:
        names = ["run", "run:rows", "run*", "run[ab]", "RUN", "{run}", "run "]
        for name in names:
            log = store.create(name, json.dumps(name).encode())
            started(log)
            log.append(name.encode(), {log.first_number: any_table()})
        store.delete("run*")
        assert set(store.names()) == set(names) - {"run*"}
        for name in store.names():
            log = store.open(name)
            assert (log.config, started(log)) == (json.dumps(name).encode(), [name.encode()])
            numbers = {int(key.split(":")[-1]) for key in row_keys(store) if f":{quote(name, safe='')}}}:rows" in key}
            assert len(numbers) == 1
            assert log.retain(numbers) == set()

    def test_a_newer_format_is_refused_with_the_remedy_and_left_to_a_newer_process(self, url: str, join: Join) -> None:
        store, other = join(url), join(url, 1)
        store.create("run", b"{}").close()
        config = store._keys("run").config
        described = store._client.get(config)
        assert isinstance(described, bytes)
        store._client.set(config, described.replace(b'"format":3', b'"format":4'))
        for each in (store, other):
            with pytest.raises(InvalidArgumentError, match="has format 4 in Redis and this version reads 3"):
                each.open("run")

    def test_a_process_that_is_not_introduced_yet_claims_nothing(self, url: str, join: Join) -> None:
        join(url).create("run", b"{}").close()
        with closing(connect(RedisAddress(url=url))) as client:
            silent = RedisRunStore(client, PREFIX, 30.0)
            try:
                assert silent.names() == []
                with pytest.raises(UnavailableError, match="is starting"):
                    silent.open("run")
            finally:
                silent.close()


class TestIdentity:
    def test_claims_have_other_numbers_though_redis_forgot_the_last_of_them(self, store: RedisRunStore) -> None:
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        log.close()
        time.sleep(1.1)
        store._client.hdel(store._keys("run").head, "claim")
        again = store.open("run")
        started(again)
        assert again.first_number > number


class TestOwnership:
    def test_another_process_learns_where_the_owner_is(self, url: str, join: Join) -> None:
        join(url, 1).create("run", b"{}")
        for _ in range(2):
            with pytest.raises(OwnedElsewhereError, match="is owned by the process at grpc-1") as caught:
                join(url, 2).open("run")
            assert (caught.value.grpc_address, caught.value.http_url) == ("grpc-1", "http-1")

    def test_a_run_given_back_is_anyones_at_once(self, url: str, join: Join) -> None:
        first, second = join(url, 1), join(url, 2)
        first.create("run", b"{}").close()
        log = second.open("run")
        assert not log.is_lost
        with pytest.raises(OwnedElsewhereError):
            first.open("run")

    def test_its_lease_lasts_while_its_process_lives(self, url: str, join: Join) -> None:
        first, second = join(url, 1, SHORT_S), join(url, 2)
        log = first.create("run", b"{}")
        started(log)
        threading.Event().wait(1.5 * SHORT_S)
        assert not log.is_lost
        log.append(b"one", {})
        with pytest.raises(OwnedElsewhereError):
            second.open("run")

    def test_when_the_lease_has_run_out_another_process_takes_the_run_over(self, url: str, join: Join) -> None:
        first, second = join(url, 1, SHORT_S), join(url, 2)
        log = first.create("run", b"{}")
        started(log)
        log.append(b"one", {})
        first.close()  # as its death: it renews no more

        def taken() -> RedisRunLog | None:
            try:
                return second.open("run")
            except OwnedElsewhereError:
                return None

        logs: list[RedisRunLog] = []

        def is_taken_over() -> bool:
            logs.extend(filter(None, [taken()]))
            return bool(logs)

        wait_until(is_taken_over, "the run is taken over")
        assert started(logs[0]) == [b"one"]
        assert log.is_lost, "the former owner knows by its own clock"

    def test_nothing_of_a_former_owner_changes_the_run(self, url: str, join: Join) -> None:
        first, second = join(url, 1), join(url, 2)
        before = first.create("run", b"{}")
        started(before)
        before.append(b"one", {})
        shards = RedisShardStore(first._client, first, PREFIX)
        shards.publish("run", 0, b"{}", sources(first=b"kept"))
        expire(first)
        log = second.open("run")
        started(log)
        log.append(b"two", {})

        with pytest.raises(LogLostError, match="another replica now owns"):
            before.append(b"of the former", {})
        assert before.is_lost
        with pytest.raises(LogLostError):
            compact(before, b"of the former")
        with pytest.raises(LogLostError):
            shards.publish("run", 0, b"other", sources(first=b"other"))
        with pytest.raises(LogLostError):
            shards.publish("run", 1, b"other", sources(first=b"other"))
        with pytest.raises(LogLostError):
            shards.free("run", 0)
        before.close()
        assert shards.plan("run", 0) == b"{}"
        with pytest.raises(NotFoundError):
            shards.plan("run", 1)
        with pytest.raises(OwnedElsewhereError):
            join(url, 3).open("run")
        log.append(b"three", {})
        log.close()
        assert started(second.open("run")) == [b"one", b"two", b"three"]

    def test_a_former_owner_learns_it_when_it_renews(self, url: str, join: Join) -> None:
        first, second = join(url, 1, SHORT_S), join(url, 2)
        log = first.create("run", b"{}")
        expire(first)
        second.open("run")
        wait_until(lambda: log.is_lost, "it learns")

    def test_a_process_may_open_its_own_run_again_and_what_it_sent_before_counts_no_more(
        self, store: RedisRunStore
    ) -> None:
        before = store.create("run", b"{}")
        started(before)
        before.append(b"one", {})
        again = store.open("run")
        assert started(again) == [b"one"]
        again.append(b"two", {})
        with pytest.raises(LogLostError):
            before.append(b"late", {})
        again.append(b"three", {})

    def test_of_many_that_claim_at_once_one_succeeds(self, url: str, join: Join) -> None:
        stores = [join(url, number) for number in range(6)]
        stores[0].create("run", b"{}").close()
        won, lost = [], []
        barrier = threading.Barrier(len(stores))

        def claim(store: RedisRunStore) -> None:
            barrier.wait()
            try:
                won.append(store.open("run"))
            except OwnedElsewhereError as error:
                lost.append(error)

        threads = [threading.Thread(target=claim, args=(each,)) for each in stores]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert (len(won), len(lost)) == (1, len(stores) - 1)

    def test_of_many_that_create_at_once_one_succeeds(self, url: str, join: Join) -> None:
        stores = [join(url, number) for number in range(4)]
        created, others = [], []
        barrier = threading.Barrier(len(stores))

        def create(number: int) -> None:
            barrier.wait()
            try:
                created.append(stores[number].create("run", b"%d" % number))
            except AlreadyExistsError as error:
                others.append(error)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(len(stores))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert (len(created), len(others)) == (1, len(stores) - 1)

    def test_being_refused_again_and_again_holds_on_to_nothing(self, url: str, join: Join) -> None:
        first, second = join(url, 1), join(url, 2)
        first.create("run", b"{}")

        def refused(request: bytes) -> Exception:
            with pytest.raises(OwnedElsewhereError) as caught:
                second.open("run")
            return caught.value

        refused(b"")
        for _ in range(50):
            error = refused(bytes(100))
        frames, traceback = 0, error.__traceback__
        while traceback is not None:
            frames, traceback = frames + 1, traceback.tb_next
        assert frames < 10, "each caller's frames would keep its request alive"


def test_a_former_owner_deletes_nothing(redis_server: RedisServer, join: Join) -> None:
    first, second = join(redis_server.url, 1), join(redis_server.url, 2)
    started(first.create("run", b"{}"))
    expire(first)
    log = second.open("run")
    started(log)
    number = stored(log, any_table())
    with pytest.raises(LogLostError):
        first.delete("run")
    assert second.names() == ["run"]
    assert same(log.get(number), any_table())
    log.append(b"goes on", {})


def test_a_process_that_does_not_own_a_run_deletes_nothing_of_it(redis_server: RedisServer, join: Join) -> None:
    first, second = join(redis_server.url, 1), join(redis_server.url, 2)
    log = second.create("run", b"{}")
    started(log)
    number = stored(log, any_table())
    with pytest.raises(OwnedElsewhereError, match="owned by the process at grpc-2"):
        first.delete("run")
    assert same(log.get(number), any_table())
    log.append(b"goes on", {})


def test_a_run_that_cannot_be_read_is_deleted_whole(redis_server: RedisServer, join: Join) -> None:
    store = join(redis_server.url)
    log = store.create("run", b"{}")
    started(log)
    stored(log, any_table())
    log.close()
    config = store._keys("run").config
    described = store._client.get(config)
    assert isinstance(described, bytes)
    store._client.set(config, described.replace(b'"format":3', b'"format":9'))
    with pytest.raises(InvalidArgumentError, match="use the version that wrote it"):
        store.open("run")
    store.delete("run")
    assert (store.names(), keys(store)) == ([], set())
    assert started(store.create("run", b"{}")) == []


def test_a_snapshot_that_does_not_fit_leaves_nothing_in_a_server_that_is_full(
    start_redis: StartRedis, join: Join
) -> None:
    server = start_redis(appendonly="no")
    store = join(server.url)
    log = store.create("run", b"{}")
    started(log)
    server.client().config_set("maxmemory", 40 << 20)
    with pytest.raises(UnavailableError, match="out of memory"):
        compact(log, bytes(60 << 20))
    assert [key for key in keys(store) if ":snapshot:" in key] == []
    log.append(b"goes on", {})


@pytest.mark.parametrize("is_slow", [False, True], ids=["in time", "after its lease"])
def test_a_run_that_is_being_created_counts_whatever_other_processes_do(
    url: str, join: Join, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    first, second = join(url), join(url, 1)
    confirmed, full = first._scripts.confirmed, ResourceExhaustedError("full")

    def meanwhile(*arguments: Any) -> Any:
        if is_slow:
            expire(first)
        with pytest.raises(NotFoundError if is_slow else OwnedElsewhereError):
            second.open("run")
        assert second.names() == ([] if is_slow else ["run"])
        return confirmed(*arguments)

    def refuse(names: Collection[str]) -> None:
        if names:
            raise full

    monkeypatch.setattr(first._scripts, "confirmed", meanwhile)
    if is_slow:
        with pytest.raises(UnavailableError, match="longer than lease_s to create it; retry"):
            first.create("run", b"{}", refuse)
        second.create("other", b"{}", refuse)
    else:
        first.create("run", b"{}", refuse)
        with pytest.raises(ResourceExhaustedError):
            second.create("other", b"{}", refuse)
    assert first.names() == ["other" if is_slow else "run"]
