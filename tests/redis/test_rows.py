"""Tables of rows in Redis: written with the record that refers to them, read, removed and swept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gristmill._wire.columns import Ragged
from gristmill.errors import NotFoundError
from gristmill_service.storage.redis import keys, tables
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.row_tables import steps_of
from gristmill_service.storage.run_store import LogLostError
from tests.redis.proxy import Proxy
from tests.redis.run_logs import Join, any_table, expire, row_keys, same, started, stored
from tests.redis.servers import RedisServer
from tests.run.harness import row, table


@pytest.fixture
def log(store: RedisRunStore) -> RedisRunLog:
    log = store.create("run", b"{}")
    started(log)
    return log


class TestRows:
    @pytest.mark.usefixtures("small_values")
    def test_a_large_table_is_cut_into_pieces_and_goes_whole(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number = stored(log, any_table(tokens=200))
        assert len(row_keys(store)) > 5
        assert same(log.get(number), any_table(tokens=200))
        log.remove([number])
        assert row_keys(store) == set()

    @pytest.mark.usefixtures("small_values")
    def test_after_a_takeover_large_tables_are_removed_whole(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number = stored(log, any_table(tokens=200))
        log.close()
        again = store.open("run")
        started(again)
        assert again.retain({number}) == set()
        again.remove([number])
        assert row_keys(store) == set()

    def test_a_table_of_more_than_8_mib_comes_back(self, log: RedisRunLog, store: RedisRunStore) -> None:
        tokens = np.arange(3_000_000, dtype=np.int32)
        large = replace(
            table(row("a")),
            tokens=Ragged.from_arrays([tokens], np.int32),
            prompt_lengths=np.zeros(1, np.int64),
            loss_mask=Ragged.from_arrays([np.ones(3_000_000, np.uint8)], np.uint8),
        )
        number = stored(log, large)
        assert len(row_keys(store)) == 2
        read = steps_of(log.get(number))
        assert np.array_equal(read.tokens[0], tokens)
        assert read.tokens[0].ctypes.data % 8 == 0, "columns are at multiples of eight bytes"

    @pytest.mark.usefixtures("small_values")
    def test_many_tables_come_back_at_once_whatever_their_sizes(self, log: RedisRunLog, store: RedisRunStore) -> None:
        sent = {
            stored(log, any_table(index, tokens=size)): (index, size) for index, size in enumerate([2, 200, 2, 9, 2])
        }
        log.close()
        again = store.open("run")
        started(again)
        assert again.retain(sent.keys()) == set()
        fresh = stored(again, any_table(7))
        tables = again.get_all([*sent, fresh])
        assert tables.keys() == {*sent, fresh}
        assert same(tables[fresh], any_table(7))
        for number, (index, size) in sent.items():
            assert same(tables[number], any_table(index, tokens=size))
        with pytest.raises(NotFoundError):
            again.get_all([*sent, 99 << 32])
        again.remove([next(iter(sent))])
        with pytest.raises(NotFoundError):
            again.get_all(sent)

    def test_what_nothing_refers_to_is_swept_when_the_run_is_claimed_again(
        self, log: RedisRunLog, store: RedisRunStore
    ) -> None:
        wanted = stored(log, any_table(0))
        # More than are removed at once.
        log.append(b"orphans", {log.first_number + 1000 + index: any_table(index, tokens=2) for index in range(700)})
        log.close()
        again = store.open("run")
        started(again)
        fresh, absent = stored(again, any_table(2)), 99 << 32
        assert again.retain({wanted, absent}) == {absent}
        assert store.sweep(["run"]) == 700
        assert len(row_keys(store)) == 2
        assert same(again.get(wanted), any_table(0))
        assert same(again.get(fresh), any_table(2)), "what came after the claim is not looked at"

    def test_the_leftovers_of_several_runs_are_swept_at_once_and_those_of_others_stay(
        self, store: RedisRunStore
    ) -> None:
        for name in ("one", "other{}:", "third"):
            log = store.create(name, b"{}")
            started(log)
            log.append(b"orphans", {log.first_number + index: any_table(index) for index in range(2)})
            log.close()
            again = store.open(name)
            started(again)
            again.retain(set())
        assert store.sweep(["one", "other{}:", "deleted meanwhile"]) == 4
        assert len(row_keys(store)) == 2
        assert store.sweep(["third"]) == 2

    def test_tables_are_read_by_many_threads_while_others_are_written(self, log: RedisRunLog) -> None:
        errors: list[BaseException] = []
        done = threading.Event()
        number = stored(log, any_table())

        def work() -> None:
            try:
                while not done.is_set():
                    assert same(log.get(number), any_table())
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for index in range(20):
            log.remove([stored(log, any_table(index))])
        done.set()
        for each in threads:
            each.join()
        assert not errors


class TestDamage:
    """A table that is not what was written is lost: its batch fails with the reason, and the run goes on."""

    @pytest.mark.usefixtures("small_values")
    @pytest.mark.parametrize("tokens", [2, 200], ids=["one value", "pieces"])
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda client, key: client.unlink(key),
            lambda client, key: client.set(key, b""),
            lambda client, key: client.set(key, client.get(key)[:-1]),
            lambda client, key: client.setrange(key, 7, b"\1"),
            lambda client, key: (client.unlink(key), client.lpush(key, b"another type")),
        ],
        ids=["gone", "empty", "cut", "size", "type"],
    )
    def test_it_is_lost(
        self, log: RedisRunLog, store: RedisRunStore, spoil: Callable[[Any, str], object], tokens: int
    ) -> None:
        number, kept = stored(log, any_table(tokens=tokens)), stored(log, any_table(1))
        spoil(store._client, store._keys("run").rows(log.run_id, number))
        with pytest.raises(NotFoundError, match="is missing or damaged in Redis"):
            log.get(number)
        log.close()
        again = store.open("run")
        assert len(started(again)) == 2
        lost = again.retain({number, kept})
        assert lost == {number}
        assert same(again.get(kept), any_table(1))

    @pytest.mark.usefixtures("small_values")
    def test_a_piece_that_is_damaged_is_found_when_the_table_is_read(
        self, log: RedisRunLog, store: RedisRunStore
    ) -> None:
        number = stored(log, any_table(tokens=200))
        store._client.setrange(f"{store._keys('run').rows(log.run_id, number)}:1", 17, b"?")
        with pytest.raises(NotFoundError):
            log.get(number)


class TestRowsTravelWithTheirRecord:
    def test_a_small_table_is_written_with_the_record_that_refers_to_it(
        self, log: RedisRunLog, store: RedisRunStore
    ) -> None:
        numbers = [log.first_number + index for index in range(5)]
        log.append(b"three of them", {number: any_table(number % 8) for number in numbers[:3]})
        assert len(row_keys(store)) == 3
        log.append(b"the others", {number: any_table(number % 8) for number in numbers[3:]})
        expire(store)
        again = store.open("run")
        assert started(again) == [b"three of them", b"the others"]
        assert again.retain(set(numbers)) == set()
        assert all(same(again.get(number), any_table(number % 8)) for number in numbers)

    def test_a_large_table_is_written_before_its_record(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number = stored(log, any_table(tokens=50_000))
        assert len(row_keys(store)) == 1
        assert same(log.get(number), any_table(tokens=50_000))

    def test_tables_that_are_too_much_for_one_append_are_written_before_it(
        self, log: RedisRunLog, store: RedisRunStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (keys, tables):
            monkeypatch.setattr(module, "VALUE_BYTES", 2000)
        monkeypatch.setattr(tables, "_SMALL_BYTES", 2000)
        sent = {log.first_number + index: any_table(index) for index in range(10)}
        log.append(b"one", sent)
        assert len(row_keys(store)) == 10
        assert all(same(log.get(number), steps) for number, steps in sent.items())

    def test_an_append_whose_answer_is_lost_has_its_rows(self, redis_server: RedisServer, join: Join) -> None:
        with Proxy(redis_server.port) as proxy:
            store = join(proxy.url)
            log = store.create("run", b"{}")
            started(log)
            proxy.lose_next_reply()
            number = stored(log, any_table())
            log.close()
            again = store.open("run")
            assert started(again) == [b"rows"]
            assert again.retain({number}) == set()
            assert same(again.get(number), any_table())

    def test_rows_and_record_take_one_round_trip(self, redis_server: RedisServer, join: Join) -> None:
        with Proxy(redis_server.port) as proxy:
            log = join(proxy.url).create("run", b"{}")
            started(log)
            stored(log, any_table())
            proxy.delay(1.5)
            begun = time.monotonic()
            log.append(b"two", {log.first_number + 100 + index: any_table(index) for index in range(64)})
            assert 3.0 <= time.monotonic() - begun < 5.9

    def test_a_former_owner_writes_no_rows_either(self, redis_server: RedisServer, join: Join) -> None:
        first, second = join(redis_server.url, 1), join(redis_server.url, 2)
        before = first.create("run", b"{}")
        started(before)
        expire(first)
        second.open("run")
        with pytest.raises(LogLostError):
            stored(before, any_table())
        assert row_keys(first) == set()

    def test_a_record_never_refers_to_rows_that_redis_has_lost(
        self, redis_server: RedisServer, join: Join, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = join(redis_server.url)
        log = store.create("run", b"{}")
        started(log)
        write = keys.write_value

        def lost(client: Any, key: str, value: bytes) -> Any:
            names = write(client, key, value)
            redis_server.client().delete(*names)
            return names

        monkeypatch.setattr(tables, "write_value", lost)
        with pytest.raises(LogLostError, match="has lost a part"):
            stored(log, any_table(tokens=50_000))
        log.close()
        assert started(store.open("run")) == []
