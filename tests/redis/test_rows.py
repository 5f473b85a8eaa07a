"""Tables of rows in Redis: written with the record that refers to them, read, removed and swept."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import redis

from gristmill._wire.columns import Ragged
from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.storage.redis import row_values, run_tables
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.row_tables import steps_of
from gristmill_service.storage.run_store import LogLostError
from tests.redis.proxy import Proxy
from tests.redis.run_logs import Join, any_table, expire, row_keys, same, started, stored, whole
from tests.redis.servers import RedisServer, wait_until
from tests.run.harness import row, table


class TestRows:
    @pytest.fixture
    def log(self, store: RedisRunStore) -> RedisRunLog:
        log = store.create("run", b"{}")
        started(log)
        return log

    def test_tables_have_numbers_that_are_never_given_again(self, log: RedisRunLog, store: RedisRunStore) -> None:
        numbers = [log.put(any_table(index))[0] for index in range(5)]
        log.remove(numbers)
        log.close()
        again = store.open("run")
        started(again)
        assert not {again.put(any_table())[0] for _ in range(5)} & set(numbers)

    def test_a_removed_table_is_gone_and_may_be_removed_again(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number, kept = stored(log, any_table()), stored(log, any_table(1))
        log.remove([number])
        log.remove([number, 12345])
        with pytest.raises(NotFoundError):
            log.get(number)
        assert same(log.get(kept), any_table(1))
        assert len(row_keys(store)) == 1

    @pytest.mark.usefixtures("small_values")
    def test_a_large_table_lies_in_pieces_and_goes_whole(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number, _ = log.put(any_table(tokens=200))
        assert len(row_keys(store)) > 5
        assert same(log.get(number), any_table(tokens=200))
        log.remove([number])
        assert row_keys(store) == set()

    @pytest.mark.usefixtures("small_values")
    def test_after_a_takeover_large_tables_are_removed_whole(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number, _ = log.put(any_table(tokens=200))
        log.close()
        again = store.open("run")
        started(again)
        assert again.retain({number}, whole) == set()
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
        number, _ = log.put(large)
        assert len(row_keys(store)) == 2
        read = steps_of(log.get(number))
        assert np.array_equal(read.tokens[0], tokens)
        assert read.tokens[0].ctypes.data % 8 == 0, "columns stand at multiples of eight bytes"

    @pytest.mark.usefixtures("small_values")
    def test_a_table_that_lost_a_piece_is_not_found(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number, _ = log.put(any_table(tokens=200))
        lost = next(key for key in row_keys(store) if key.endswith(":1"))
        store._client.delete(lost)
        with pytest.raises(NotFoundError):
            log.get(number)

    @pytest.mark.usefixtures("small_values")
    def test_many_tables_come_back_at_once_whatever_their_sizes(self, log: RedisRunLog, store: RedisRunStore) -> None:
        sent = {
            stored(log, any_table(index, tokens=size)): (index, size) for index, size in enumerate([2, 200, 2, 9, 2])
        }
        log.close()
        again = store.open("run")
        started(again)
        assert again.retain(sent.keys(), whole) == set()
        fresh, _ = again.put(any_table(7))
        found = again.get_all([*sent, fresh])
        assert found.keys() == {*sent, fresh}
        assert same(found[fresh], any_table(7))
        for number, (index, size) in sent.items():
            assert same(found[number], any_table(index, tokens=size))
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
        log.append(b"orphans", [log.put(any_table(index, tokens=2))[0] for index in range(700)])
        log.close()
        again = store.open("run")
        started(again)
        fresh, absent = stored(again, any_table(2)), 99 << 32
        assert again.retain({wanted, absent}, whole) == {absent}
        wait_until(lambda: len(row_keys(store)) <= 2, "orphans are swept")
        assert same(again.get(wanted), any_table(0))
        assert same(again.get(fresh), any_table(2)), "what came after the claim is not looked at"

    def test_tables_are_put_and_got_by_many_threads_at_once(self, log: RedisRunLog) -> None:
        numbers: dict[int, int] = {}
        errors: list[BaseException] = []

        def work(index: int) -> None:
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

    def test_a_small_table_is_written_with_the_record_that_refers_to_it(
        self, log: RedisRunLog, store: RedisRunStore
    ) -> None:
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

    def test_a_table_that_is_removed_before_any_record_refers_to_it_is_never_written(
        self, log: RedisRunLog, store: RedisRunStore
    ) -> None:
        unwanted, wanted = (log.put(any_table(index))[0] for index in range(2))
        log.remove([unwanted])
        with pytest.raises(NotFoundError):
            log.get(unwanted)
        log.append(b"one", [wanted])
        assert len(row_keys(store)) == 1

    def test_a_large_table_is_written_at_once(self, log: RedisRunLog, store: RedisRunStore) -> None:
        number, _ = log.put(any_table(tokens=50_000))
        assert len(row_keys(store)) == 1
        log.append(b"one", [number])
        assert same(log.get(number), any_table(tokens=50_000))

    @pytest.mark.usefixtures("small_values")
    def test_tables_that_are_too_much_for_one_append_are_written_before_it(
        self, url: str, join: Join, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(row_values, "VALUE_BYTES", 2000)
        monkeypatch.setattr(run_tables, "_HELD_BYTES", 2000)
        store = join(url)
        log = store.create("run", b"{}")
        started(log)
        numbers = [log.put(any_table(index))[0] for index in range(10)]
        log.append(b"one", numbers)
        assert len(row_keys(store)) == 10
        assert all(same(log.get(number), any_table(index)) for index, number in enumerate(numbers))

    def test_tables_of_an_append_that_had_no_effect_may_be_named_again(
        self, redis_server: RedisServer, join: Join
    ) -> None:
        with Proxy(redis_server.port) as proxy:
            store = join(proxy.url)
            log = store.create("run", b"{}")
            started(log)
            number, _ = log.put(any_table())
            proxy.refuse()
            assert isinstance(store._client, redis.Redis)
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

    def test_an_append_whose_answer_is_lost_has_its_rows(self, redis_server: RedisServer, join: Join) -> None:
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

    def test_rows_and_record_take_one_round_trip(self, redis_server: RedisServer, join: Join) -> None:
        with Proxy(redis_server.port) as proxy:
            log = join(proxy.url).create("run", b"{}")
            started(log)
            log.append(b"one", [log.put(any_table())[0]])
            numbers = [log.put(any_table(index))[0] for index in range(64)]
            proxy.delay(1.5)
            begun = time.monotonic()
            log.append(b"two", numbers)
            assert 3.0 <= time.monotonic() - begun < 5.9

    def test_a_former_owner_writes_no_rows_either(self, redis_server: RedisServer, join: Join) -> None:
        first, second = join(redis_server.url, 1), join(redis_server.url, 2)
        before = first.create("run", b"{}")
        started(before)
        number, _ = before.put(any_table())
        expire(first)
        second.open("run")
        with pytest.raises(LogLostError):
            before.append(b"of the former", [number])
        assert row_keys(first) == set()

    def test_a_record_never_refers_to_rows_that_redis_has_lost(self, redis_server: RedisServer, join: Join) -> None:
        store = join(redis_server.url)
        log = store.create("run", b"{}")
        started(log)
        number, _ = log.put(any_table(tokens=50_000))
        redis_server.client().delete(*row_keys(store))
        with pytest.raises(LogLostError):
            log.append(b"one", [number])
        log.close()
        assert started(store.open("run")) == []
