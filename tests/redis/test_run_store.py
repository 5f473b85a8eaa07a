"""The runs in Redis, for one process and for several: records, rows, leases, and what stays certain when it fails."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from urllib.parse import quote

import numpy as np
import pytest
import redis
from structlog.testing import capture_logs

from gristmill._wire.columns import Ragged
from gristmill._wire.rows import to_rows
from gristmill._wire.steps import Steps
from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.storage.redis import row_values, run_tables
from gristmill_service.storage.redis.connection import Client, RedisAddress, connect
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.shard_store import RedisShardStore
from gristmill_service.storage.run_store import LogLostError, OwnedElsewhereError
from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer, StartRedis, wait_until
from tests.run.harness import row, table
from tests.storage.test_stores import sources

PREFIX = "test"
SHORT_S = 0.5

Join = Callable[..., RedisRunStore]


def any_table(number: int = 0, tokens: int = 20):
    return table(*(row(f"u{number}-{index}", response=range(number, number + tokens)) for index in range(3)))


def same(one, other) -> bool:
    return list(to_rows(one)) == list(to_rows(other))


def whole(number, steps) -> bool:
    return True


@pytest.fixture(params=["alone", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Of one server, and of three that share the keys."""
    return request.getfixturevalue("redis_server" if request.param == "alone" else "redis_cluster").url


@pytest.fixture
def join() -> Iterator[Join]:
    """A store as a process of its own has it, closed with the test."""
    with ExitStack() as opened:

        def start(url: str, number: int = 0, lease_s: float = 30.0) -> RedisRunStore:
            client = opened.enter_context(closing(connect(RedisAddress(url=url))))
            store = RedisRunStore(client, PREFIX, lease_s)
            opened.callback(store.close)
            store.advertise(f"grpc-{number}", f"http-{number}")
            return store

        yield start


@pytest.fixture
def store(url: str, join: Join) -> RedisRunStore:
    return join(url)


@pytest.fixture
def small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_values, "VALUE_BYTES", 300)
    monkeypatch.setattr(run_tables, "_HELD_BYTES", 300)


def keys(store: RedisRunStore) -> set[str]:
    client: Client = store._client
    return {key.decode() for key in client.scan_iter(match="*") if b":probe" not in key}


def row_keys(store: RedisRunStore) -> set[str]:
    return {key for key in keys(store) if ":rows:" in key}


def expire(store: RedisRunStore, name: str = "run") -> None:
    """As if the owner's lease had run out."""
    store._client.delete(store._keys(name).owner)


def started(log: RedisRunLog) -> list[bytes]:
    """Its records, read as whoever opens a run does first."""
    return list(log.replay().records)


def stored(log: RedisRunLog, rows: Steps) -> int:
    """The number of a table that a record of the log refers to."""
    number, _ = log.put(rows)
    log.append(b"rows", [number])
    return number


class TestRunStore:
    def test_a_run_is_there_again_with_its_configuration_records_and_rows(self, url, join):
        first = join(url)
        log = first.create("a/run {x}", b'{"dp_size":2}')
        assert (log.replay().snapshot, started(log)) == (None, [])
        number, kept = log.put(any_table())
        log.append(b"one", [number])
        log.append(b"two")
        expire(first, "a/run {x}")

        again = join(url, 1)
        assert again.names() == ["a/run {x}"]
        log = again.open("a/run {x}")
        assert log.config == b'{"dp_size":2}'
        assert started(log) == [b"one", b"two"]
        assert log.retain({number}, whole) == set()
        assert same(log.get(number), any_table())
        assert same(kept, any_table())

    def test_a_snapshot_stands_for_what_was_before_it(self, store):
        log = store.create("run", b"{}")
        started(log)
        log.append(b"before")
        log.compact(b"first")
        log.append(b"between")
        log.compact(b"all before")
        log.append(b"after")
        log.close()
        log = store.open("run")
        replay = log.replay()
        assert (replay.snapshot, list(replay.records)) == (b"all before", [b"after"])
        log.append(b"more")
        log.close()
        assert started(store.open("run")) == [b"after", b"more"]
        assert len([key for key in keys(store) if ":snapshot:" in key]) == 1, "earlier snapshots are gone"
        length = store._client.xlen(store._keys("run").log)
        assert length == 3, "the log begins with the last record that the snapshot stands for"

    @pytest.mark.usefixtures("small_values")
    def test_a_snapshot_may_be_larger_than_a_value(self, store):
        log = store.create("run", b"{}")
        started(log)
        snapshot = bytes(range(256)) * 10
        log.compact(snapshot)
        log.close()
        assert store.open("run").replay().snapshot == snapshot
        store.delete("run")
        assert keys(store) == set()

    def test_a_log_of_many_records_is_read_in_order(self, store):
        log = store.create("run", b"{}")
        started(log)
        for number in range(2500):
            log.append(b"%d" % number)
        log.close()
        assert started(store.open("run")) == [b"%d" % number for number in range(2500)]

    def test_a_log_is_long_once_it_is_much_longer_than_its_snapshot(self, store):
        log = store.create("run", b"{}")
        started(log)
        while not log.is_long:
            log.append(bytes(4 << 20))
        log.compact(bytes(10 << 20))
        for _ in range(6):
            assert not log.is_long
            log.append(bytes(4 << 20))
        assert log.is_long
        log.close()
        log = store.open("run")
        started(log)
        assert log.is_long, "whoever opens it next knows, too"

    def test_runs_are_created_once_and_deleted_whole(self, store):
        log = store.create("run", b"{}")
        with pytest.raises(AlreadyExistsError):
            store.create("run", b"{}")
        started(log)
        log.append(b"one", [log.put(any_table())[0]])
        log.compact(b"one")
        store.delete("run")
        log.close()
        store.delete("run")
        assert store.names() == []
        assert keys(store) == set()
        with pytest.raises(NotFoundError):
            store.open("run")

    def test_a_run_of_the_same_name_meets_nothing_of_the_one_before(self, store):
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        store.delete("run")
        log.close()
        again = store.create("run", b'{"new":1}')
        assert (again.config, started(again)) == (b'{"new":1}', [])
        assert again.retain({number}, whole) == {number}

    def test_runs_whose_names_look_alike_are_apart(self, store):
        names = ["run", "run:rows", "run*", "run[ab]", "RUN", "{run}", "run "]
        for name in names:
            log = store.create(name, json.dumps(name).encode())
            started(log)
            log.append(name.encode(), [log.put(any_table())[0]])
        store.delete("run*")
        assert set(store.names()) == set(names) - {"run*"}
        for name in store.names():
            log = store.open(name)
            assert (log.config, started(log)) == (json.dumps(name).encode(), [name.encode()])
            numbers = {int(key.split(":")[-2]) for key in row_keys(store) if f":{quote(name, safe='')}:rows" in key}
            assert len(numbers) == 1
            assert log.retain(numbers, whole) == set()

    def test_a_newer_format_is_refused_with_the_remedy_and_left_to_a_newer_process(self, url, join):
        store, other = join(url), join(url, 1)
        store.create("run", b"{}").close()
        config = store._keys("run").config
        described = store._client.get(config)
        store._client.set(config, described.replace(b'"format":1', b'"format":2'))
        for each in (store, other):
            with pytest.raises(InvalidArgumentError, match="has format 2 in Redis and this version reads up to 1"):
                each.open("run")

    def test_a_snapshot_of_a_newer_format_is_refused(self, store):
        log = store.create("run", b"{}")
        started(log)
        log.compact(b"all")
        snapshot = store._keys("run").snapshot
        described = store._client.get(snapshot)
        store._client.set(snapshot, described.replace(b"format\x01", b"format\x02"))
        log.close()
        with pytest.raises(InvalidArgumentError, match="format 2 and this version reads up to 1"):
            store.open("run").replay()

    def test_a_process_that_is_not_introduced_yet_claims_nothing(self, url, join):
        join(url).create("run", b"{}").close()
        with closing(connect(RedisAddress(url=url))) as client:
            silent = RedisRunStore(client, PREFIX, 30.0)
            try:
                assert silent.names() == []
                with pytest.raises(UnavailableError, match="is starting"):
                    silent.open("run")
            finally:
                silent.close()


class TestRows:
    @pytest.fixture
    def log(self, store: RedisRunStore) -> RedisRunLog:
        log = store.create("run", b"{}")
        started(log)
        return log

    def test_tables_have_numbers_that_are_never_given_again(self, log, store):
        numbers = [log.put(any_table(index))[0] for index in range(5)]
        log.remove(numbers)
        log.close()
        again = store.open("run")
        started(again)
        assert not {again.put(any_table())[0] for _ in range(5)} & set(numbers)

    def test_a_removed_table_is_gone_and_may_be_removed_again(self, log, store):
        number, kept = stored(log, any_table()), stored(log, any_table(1))
        log.remove([number])
        log.remove([number, 12345])
        with pytest.raises(NotFoundError):
            log.get(number)
        assert same(log.get(kept), any_table(1))
        assert len(row_keys(store)) == 1

    @pytest.mark.usefixtures("small_values")
    def test_a_large_table_lies_in_pieces_and_goes_whole(self, log, store):
        number, _ = log.put(any_table(tokens=200))
        assert len(row_keys(store)) > 5
        assert same(log.get(number), any_table(tokens=200))
        log.remove([number])
        assert row_keys(store) == set()

    @pytest.mark.usefixtures("small_values")
    def test_after_a_takeover_large_tables_are_removed_whole(self, log, store):
        number, _ = log.put(any_table(tokens=200))
        log.close()
        again = store.open("run")
        started(again)
        assert again.retain({number}, whole) == set()
        again.remove([number])
        assert row_keys(store) == set()

    def test_a_table_of_more_than_8_mib_comes_back(self, log, store):
        tokens = np.arange(3_000_000, dtype=np.int32)
        large = replace(
            table(row("a")),
            tokens=Ragged.from_arrays([tokens], np.int32),
            loss_mask=Ragged.from_arrays([np.ones(3_000_000, np.uint8)], np.uint8),
        )
        number, _ = log.put(large)
        assert len(row_keys(store)) == 2
        read = log.get(number)
        assert np.array_equal(read.tokens[0], tokens)
        assert read.tokens[0].ctypes.data % 8 == 0, "columns stand at multiples of eight bytes"

    @pytest.mark.usefixtures("small_values")
    def test_a_table_that_lost_a_piece_is_not_found(self, log, store):
        number, _ = log.put(any_table(tokens=200))
        lost = next(key for key in row_keys(store) if key.endswith(":1"))
        store._client.delete(lost)
        with pytest.raises(NotFoundError):
            log.get(number)

    def test_what_nothing_refers_to_is_swept_when_the_run_is_claimed_again(self, log, store):
        wanted = stored(log, any_table(0))
        # More than are removed at once.
        log.append(b"orphans", [log.put(any_table(index, tokens=2))[0] for index in range(700)])
        log.close()
        again = store.open("run")
        started(again)
        fresh, absent = stored(again, any_table(2)), 99 << 32
        assert again.retain({wanted, absent}, whole) == {absent}
        wait_until(lambda: len(row_keys(store)) <= 2, "orphans are swept")
        assert same(again.get(wanted), any_table(0))
        assert same(again.get(fresh), any_table(2)), "what came after the claim is not looked at"

    def test_tables_are_put_and_got_by_many_threads_at_once(self, log):
        numbers, errors = {}, []

        def work(index):
            try:
                for turn in range(10):
                    number, _ = log.put(any_table(100 * index + turn))
                    assert numbers.setdefault(number, index) == index
                    assert same(log.get(number), any_table(100 * index + turn))
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors
        assert len(numbers) == 80


class TestRowsTravelWithTheirRecord:
    @pytest.fixture
    def log(self, store: RedisRunStore) -> RedisRunLog:
        log = store.create("run", b"{}")
        started(log)
        return log

    def test_a_small_table_is_written_with_the_record_that_refers_to_it(self, log, store):
        numbers = [log.put(any_table(index))[0] for index in range(5)]
        assert row_keys(store) == set()
        assert same(log.get(numbers[2]), any_table(2)), "it is read all the same"
        log.append(b"three of them", numbers[:3])
        assert len(row_keys(store)) == 3
        log.append(b"the others", numbers[3:])
        expire(store)
        again = store.open("run")
        assert started(again) == [b"three of them", b"the others"]
        assert again.retain(set(numbers), whole) == set()
        assert all(same(again.get(number), any_table(index)) for index, number in enumerate(numbers))

    def test_a_table_that_is_removed_before_any_record_refers_to_it_is_never_written(self, log, store):
        unwanted, wanted = (log.put(any_table(index))[0] for index in range(2))
        log.remove([unwanted])
        with pytest.raises(NotFoundError):
            log.get(unwanted)
        log.append(b"one", [wanted])
        assert len(row_keys(store)) == 1

    def test_a_large_table_is_written_at_once(self, log, store):
        number, _ = log.put(any_table(tokens=50_000))
        assert len(row_keys(store)) == 1
        log.append(b"one", [number])
        assert same(log.get(number), any_table(tokens=50_000))

    @pytest.mark.usefixtures("small_values")
    def test_tables_that_are_too_much_for_one_append_are_written_before_it(self, url, join, monkeypatch):
        monkeypatch.setattr(row_values, "VALUE_BYTES", 2000)
        monkeypatch.setattr(run_tables, "_HELD_BYTES", 2000)
        store = join(url)
        log = store.create("run", b"{}")
        started(log)
        numbers = [log.put(any_table(index))[0] for index in range(10)]
        log.append(b"one", numbers)
        assert len(row_keys(store)) == 10
        assert all(same(log.get(number), any_table(index)) for index, number in enumerate(numbers))

    def test_tables_of_an_append_that_had_no_effect_may_be_named_again(self, redis_server, join):
        with Proxy(redis_server.port) as proxy:
            store = join(proxy.url)
            log = store.create("run", b"{}")
            started(log)
            number, _ = log.put(any_table())
            proxy.refuse()
            store._client.connection_pool.disconnect()
            with pytest.raises(UnavailableError) as refused:
                log.append(b"one", [number])
            assert not isinstance(refused.value, LogLostError)
            proxy.accept()
            log.append(b"one", [number])
            log.close()
            again = store.open("run")
            assert started(again) == [b"one"]
            assert same(again.get(number), any_table())

    def test_an_append_whose_answer_is_lost_has_its_rows(self, redis_server, join):
        with Proxy(redis_server.port) as proxy:
            store = join(proxy.url)
            log = store.create("run", b"{}")
            started(log)
            number, _ = log.put(any_table())
            proxy.lose_next_reply()
            log.append(b"one", [number])
            log.close()
            again = store.open("run")
            assert started(again) == [b"one"]
            assert same(again.get(number), any_table())

    def test_rows_and_record_take_one_round_trip(self, redis_server, join):
        with Proxy(redis_server.port) as proxy:
            log = join(proxy.url).create("run", b"{}")
            started(log)
            log.append(b"one", [log.put(any_table())[0]])
            numbers = [log.put(any_table(index))[0] for index in range(64)]
            proxy.delay(0.1)
            begun = time.monotonic()
            log.append(b"two", numbers)
            assert 0.2 <= time.monotonic() - begun < 0.39

    def test_a_former_owner_writes_no_rows_either(self, redis_server, join):
        first, second = join(redis_server.url, 1), join(redis_server.url, 2)
        before = first.create("run", b"{}")
        started(before)
        number, _ = before.put(any_table())
        expire(first)
        second.open("run")
        with pytest.raises(LogLostError):
            before.append(b"of the former", [number])
        assert row_keys(first) == set()

    def test_a_record_never_refers_to_rows_that_redis_has_lost(self, redis_server, join):
        store = join(redis_server.url)
        log = store.create("run", b"{}")
        started(log)
        number, _ = log.put(any_table(tokens=50_000))
        redis_server.client().delete(*row_keys(store))
        with pytest.raises(LogLostError):
            log.append(b"one", [number])
        log.close()
        assert started(store.open("run")) == []


class TestIdentity:
    def test_a_run_has_the_same_identity_wherever_it_is_opened(self, url, join):
        log = join(url).create("run", b"{}")
        log.close()
        assert log.run_id
        assert join(url, 1).open("run").run_id == log.run_id

    def test_a_run_made_again_under_its_name_is_another_one(self, store):
        log = store.create("run", b"{}")
        store.delete("run")
        log.close()
        assert store.create("run", b"{}").run_id != log.run_id

    def test_claims_have_other_numbers_though_redis_forgot_the_last_of_them(self, store):
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        log.close()
        time.sleep(1.1)
        store._client.delete(store._keys("run").claims)
        again = store.open("run")
        started(again)
        assert again.put(any_table())[0] > number


class TestRollback:
    """A server that forgot what it had confirmed, as the new master may after a failover."""

    @pytest.fixture
    def store(self, redis_server: RedisServer, join: Join) -> RedisRunStore:
        return join(redis_server.url, lease_s=SHORT_S)

    @pytest.fixture
    def log(self, store: RedisRunStore) -> RedisRunLog:
        log = store.create("run", b"{}")
        started(log)
        for record in (b"one", b"two", b"three"):
            log.append(record)
        return log

    def forget(self, server: RedisServer, count: int) -> None:
        """The last records of the log."""
        key = f"{{{PREFIX}:run}}:log"
        entries = server.client().xrevrange(key, count=count + 1)
        server.client().xdel(key, *(name for name, _ in entries[:count]))
        server.client().execute_command("XSETID", key, entries[count][0])

    def test_whoever_was_told_more_learns_it_when_the_log_is_opened_anew(self, redis_server, store, log):
        self.forget(redis_server, 2)
        with pytest.raises(LogLostError, match="has forgotten a part"):
            log.append(b"four")
        log.close()
        with capture_logs() as said:
            again = store.open("run")
            replay = again.replay()
        assert list(replay.records) == [b"one"]
        assert replay.is_short()
        [entry] = [entry for entry in said if entry["event"] == "log rolled back"]
        assert (entry["log_level"], entry["records_lost"], entry["records_left"]) == ("error", 2, 1)

    def test_it_is_told_until_the_log_goes_on(self, redis_server, store, log):
        self.forget(redis_server, 1)
        for _ in range(2):
            log.close()
            log = store.open("run")
            assert log.replay().is_short()
        log.append(b"goes on")
        log.close()
        assert not store.open("run").replay().is_short()

    def test_an_idle_owner_learns_it_when_it_renews_its_lease(self, redis_server, log):
        self.forget(redis_server, 1)
        wait_until(lambda: log.is_lost, "it learns", 5)
        wait_until(lambda: log.lease == 0, "and stays lost", 1)

    def test_a_log_that_another_process_has_written_on_since_is_found_out(self, redis_server, join, store, log):
        self.forget(redis_server, 2)
        log.close()
        other = join(redis_server.url, 1).open("run")
        assert started(other) == [b"one"]
        for record in (b"another two", b"another three", b"another four"):
            other.append(record)
        other.close()
        replay = store.open("run").replay()
        assert list(replay.records)[-1] == b"another four"
        assert replay.is_short()

    def test_a_log_that_another_process_has_gone_on_with_is_whole(self, redis_server, join, store, log):
        log.close()
        other = join(redis_server.url, 1).open("run")
        started(other)
        other.append(b"four")
        other.compact(b"all")
        other.append(b"five")
        other.close()
        assert not store.open("run").replay().is_short()

    def test_a_run_of_the_same_name_is_not_taken_for_one_that_was_rolled_back(self, store, log):
        store.delete("run")
        log.close()
        again = store.create("run", b"{}")
        assert not again.replay().is_short()


class TestOwnership:
    def test_another_process_learns_where_the_owner_is(self, url, join):
        join(url, 1).create("run", b"{}")
        for _ in range(2):
            with pytest.raises(OwnedElsewhereError, match="is decided by the process at grpc-1") as caught:
                join(url, 2).open("run")
            assert (caught.value.grpc_address, caught.value.http_url) == ("grpc-1", "http-1")

    def test_a_run_given_back_is_anyones_at_once(self, url, join):
        first, second = join(url, 1), join(url, 2)
        first.create("run", b"{}").close()
        log = second.open("run")
        assert not log.is_lost
        with pytest.raises(OwnedElsewhereError):
            first.open("run")

    def test_its_lease_lasts_while_its_process_lives(self, url, join):
        first, second = join(url, 1, SHORT_S), join(url, 2)
        log = first.create("run", b"{}")
        started(log)
        threading.Event().wait(3 * SHORT_S)
        assert not log.is_lost
        log.append(b"one")
        with pytest.raises(OwnedElsewhereError):
            second.open("run")

    def test_when_the_lease_has_run_out_another_process_takes_the_run_over(self, url, join):
        first, second = join(url, 1, SHORT_S), join(url, 2)
        log = first.create("run", b"{}")
        started(log)
        log.append(b"one")
        first.close()  # as its death: it renews no more

        def taken():
            try:
                return second.open("run")
            except OwnedElsewhereError:
                return None

        found = []
        wait_until(lambda: found or found.extend(filter(None, [taken()])), "the run is taken over", 10)
        assert started(found[0]) == [b"one"]
        assert log.is_lost, "the former owner knows by its own clock"

    def test_nothing_of_a_former_owner_changes_the_run(self, url, join):
        first, second = join(url, 1), join(url, 2)
        before = first.create("run", b"{}")
        started(before)
        before.append(b"one")
        shards = RedisShardStore(first._client, first, PREFIX)
        shards.publish("run", 0, b"{}", sources(first=b"kept"))
        expire(first)
        log = second.open("run")
        started(log)
        log.append(b"two")

        with pytest.raises(LogLostError, match="another replica decides"):
            before.append(b"of the former")
        assert before.is_lost
        with pytest.raises(LogLostError):
            before.compact(b"of the former")
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
        log.append(b"three")
        log.close()
        assert started(second.open("run")) == [b"one", b"two", b"three"]

    def test_a_former_owner_learns_it_when_it_renews(self, url, join):
        first, second = join(url, 1, SHORT_S), join(url, 2)
        log = first.create("run", b"{}")
        expire(first)
        second.open("run")
        wait_until(lambda: log.is_lost, "it learns", 5)

    def test_a_process_may_open_its_own_run_anew_and_what_it_sent_before_counts_no_more(self, store):
        before = store.create("run", b"{}")
        started(before)
        before.append(b"one")
        again = store.open("run")
        assert started(again) == [b"one"]
        again.append(b"two")
        with pytest.raises(LogLostError):
            before.append(b"late")
        again.append(b"three")

    def test_of_many_that_claim_at_once_one_succeeds(self, url, join):
        stores = [join(url, number) for number in range(6)]
        stores[0].create("run", b"{}").close()
        won, lost = [], []
        barrier = threading.Barrier(len(stores))

        def claim(store):
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

    def test_of_many_that_create_at_once_one_succeeds(self, url, join):
        stores = [join(url, number) for number in range(4)]
        created, others = [], []
        barrier = threading.Barrier(len(stores))

        def create(number):
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

    def test_being_refused_again_and_again_holds_on_to_nothing(self, url, join):
        first, second = join(url, 1), join(url, 2)
        first.create("run", b"{}")

        def refused(request):
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


class TestDoubt:
    """One server, behind a network that fails."""

    @pytest.fixture
    def proxy(self, redis_server: RedisServer) -> Iterator[Proxy]:
        with Proxy(redis_server.port) as running:
            yield running

    def test_an_append_whose_answer_is_lost_is_appended_once(self, redis_server, proxy, join):
        store = join(proxy.url)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one")
        for record in (b"two", b"three"):
            proxy.lose_next_reply()
            log.append(record)
        log.append(b"four")
        expire(store)
        assert started(join(redis_server.url, 1).open("run")) == [b"one", b"two", b"three", b"four"]

    def test_an_append_that_never_arrived_had_no_effect_and_may_be_told_again(self, proxy, join):
        log = join(proxy.url).create("run", b"{}")
        started(log)
        proxy.refuse()
        proxy.cut()
        # The first finds its connection broken, so that nobody knows; from then on none is open to send it over.
        with pytest.raises(UnavailableError):
            log.append(b"lost")
        proxy.accept()

    def test_an_append_of_unknown_outcome_loses_the_book_which_is_opened_anew(
        self, redis_server, proxy, join, monkeypatch
    ):
        monkeypatch.setattr("gristmill_service.storage.redis.run_log._RETRY_S", 0.3)
        store = join(proxy.url)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one")
        proxy.lose_next_reply()
        proxy.refuse()
        with pytest.raises(LogLostError, match="whether the last change was made is not known"):
            log.append(b"two")
        assert log.is_lost
        proxy.accept()
        again = store.open("run")
        records = started(again)
        assert records in ([b"one"], [b"one", b"two"])
        again.append(b"three")
        expire(store)
        assert started(join(redis_server.url, 1).open("run")) == [*records, b"three"]

    @pytest.mark.parametrize("step", ["create", "claim", "compact", "publish", "release", "delete"])
    def test_every_step_may_be_told_again_when_its_answer_is_lost(self, redis_server, proxy, join, step):
        store = join(proxy.url)
        shards = RedisShardStore(store._client, store, PREFIX)

        def doubtful(call, *arguments):
            if step != call.__name__.strip("_"):
                return call(*arguments)
            proxy.lose_next_reply()
            with pytest.raises(UnavailableError):
                call(*arguments)
            return call(*arguments)

        def create():
            try:
                return store.create("run", b"{}")
            except AlreadyExistsError:
                return store.open("run")

        def claim():
            return store.open("run")

        def compact():
            log.compact(b"all")

        def publish():
            shards.publish("run", 0, b"{}", sources(first=b"x"))

        def delete():
            store.delete("run")

        doubtful(create).close()
        log = doubtful(claim)
        started(log)
        log.append(b"one")
        doubtful(compact)
        doubtful(publish)
        assert shards.plan("run", 0) == b"{}"
        shards.delete_run("run")
        if step == "release":
            proxy.lose_next_reply()
            log.close()
            log = store.open("run")
        doubtful(delete)
        log.close()
        wait_until(lambda: not redis_server.client().exists(f"{{{PREFIX}:run}}:owner"), "nothing is left", 5)
        assert {key for key in redis_server.client().keys("*") if b":snapshot:" not in key} <= {b"test:probe"}

    def test_a_silent_server_refuses_rows_and_is_told_as_trouble_until_it_answers(self, redis_server, proxy, join):
        store = join(proxy.url, lease_s=SHORT_S)
        log = store.create("run", b"{}")
        started(log)
        proxy.refuse()
        proxy.cut()
        number, _ = log.put(any_table())
        with pytest.raises(UnavailableError):
            log.append(b"rows", [number])
        wait_until(lambda: store.unhealthy_reason(), "it is told", 5)
        proxy.accept()
        wait_until(lambda: not store.unhealthy_reason(), "it is well again", 5)

    def test_a_server_without_room_refuses_rows_and_takes_what_makes_room(self, redis_server, join):
        store = join(redis_server.url, lease_s=SHORT_S)
        admin = redis_server.client()
        log = store.create("run", b"{}")
        started(log)
        number = stored(log, any_table())
        try:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", int(admin.info("memory")["used_memory"] / 0.95))
            wait_until(lambda: "maxmemory" in store.unhealthy_reason(), "it is told", 5)
            with pytest.raises(UnavailableError, match="maxmemory"):
                log.put(any_table())
            log.append(b"acknowledged")
            log.remove([number])
            admin.config_set("maxmemory", 0)
            wait_until(lambda: not store.unhealthy_reason(), "it is well again", 5)
            log.put(any_table())
        finally:
            admin.config_set("maxmemory", 0)


class TestForgetfulServer:
    def test_a_lost_tail_is_noticed_by_the_next_append_and_nothing_diverges(self, start_redis: StartRedis, join):
        server = start_redis(appendonly="always")
        log = join(server.url).create("run", b"{}")
        started(log)
        log.append(b"one")
        saved = server.directory.with_name("saved")
        shutil.copytree(server.directory, saved)
        log.append(b"two")
        log.append(b"three")
        server.kill()
        for old in saved.iterdir():  # as a disk that had not written the end
            target = server.directory / old.name
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            shutil.copytree(old, target) if old.is_dir() else shutil.copy(old, target)
        server.start()
        with pytest.raises(UnavailableError):
            log.append(b"four")
        with pytest.raises(LogLostError, match=r"has forgotten a part|not known"):
            log.append(b"four")
        assert log.is_lost
        again = join(server.url, 1)
        expire(again)
        log = again.open("run")
        assert started(log) == [b"one"]
        log.append(b"another")
        log.close()
        assert started(again.open("run")) == [b"one", b"another"]

    def test_a_server_that_forgot_everything_has_no_run_any_more(self, start_redis: StartRedis, join):
        server = start_redis(appendonly="no")
        store = join(server.url)
        log = store.create("run", b"{}")
        started(log)
        log.append(b"one")
        server.kill()
        server.start()
        for _ in range(2):
            with pytest.raises(UnavailableError):
                log.append(b"two")
        assert log.is_lost
        with pytest.raises(NotFoundError):
            store.open("run")
        assert store.names() == []

    def test_a_server_that_keeps_its_log_forgets_nothing_when_it_is_killed(self, start_redis: StartRedis, join):
        server = start_redis(appendonly="always")
        store = join(server.url)
        log = store.create("run", b"{}")
        started(log)
        number, _ = log.put(any_table())
        log.append(b"one", [number])
        server.kill()
        server.start()
        log.append(b"two")
        assert same(log.get(number), any_table())
        log.close()
        assert started(store.open("run")) == [b"one", b"two"]


def test_a_former_owner_deletes_nothing(redis_server: RedisServer, join: Join):
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
    log.append(b"goes on")


def test_errors_of_redis_never_leave_as_such(redis_server: RedisServer, join: Join):
    store = join(redis_server.url)
    log = store.create("run", b"{}")
    started(log)
    for key in (store._keys("run").snapshot, store._keys("run").log):
        redis_server.client().delete(key)
    with pytest.raises(LogLostError):
        log.append(b"one")
    assert not issubclass(LogLostError, redis.RedisError)
