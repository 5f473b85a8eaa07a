"""What every run store promises, whatever it stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryRunStore
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.run_store import RunLog, RunStore
from tests.redis.servers import RedisServer
from tests.storage.tables import any_table, compact, same, snapshot_in


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), appendonly="no") as server:
        yield server


def in_memory(request: pytest.FixtureRequest) -> MemoryRunStore:
    return MemoryRunStore()


def in_journal(request: pytest.FixtureRequest) -> JournalRunStore:
    return JournalRunStore(request.getfixturevalue("tmp_path"))


def in_redis(request: pytest.FixtureRequest) -> RedisRunStore:
    client = request.getfixturevalue("redis_server").client()
    client.flushall()
    store = RedisRunStore(client, "gristmill", 30.0)
    store.advertise("grpc", "http")
    return store


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    store = request.param(request)
    yield store
    store.close()


every_store = pytest.mark.parametrize(
    "store", [in_memory, in_journal, in_redis], ids=["memory", "journal", "redis"], indirect=True
)
stores_that_keep = pytest.mark.parametrize("store", [in_journal, in_redis], ids=["journal", "redis"], indirect=True)


def opened(log: RunLog, *numbers: int) -> RunLog:
    """The log after what comes first in its life."""
    list(log.replay().records)
    assert log.retain(numbers) == set()
    return log


def reopened(store: RunStore, log: RunLog) -> tuple[RunLog, bytes | None, list[bytes]]:
    log.close()
    again = store.open("run")
    replay = again.replay()
    snapshot, records = snapshot_in(replay), list(replay.records)
    assert not replay.is_short()
    return again, snapshot, records


@every_store
class TestEveryStore:
    @pytest.mark.parametrize(
        "config",
        [
            b'{"a":18446744073709551616}',
            b'{"a":-9223372036854775809}',
            b'{"a":1' + b"0" * 400 + b"}",
            b'{"a":NaN}',
            b"{",
        ],
    )
    def test_a_configuration_that_could_not_be_read_again_makes_no_run(self, store: RunStore, config: bytes) -> None:
        with pytest.raises(InvalidArgumentError, match="run 'run': the configuration cannot be stored as JSON"):
            store.create("run", config)
        assert store.names() == []
        with pytest.raises(NotFoundError):
            store.open("run")

    def test_a_new_run_takes_rows(self, store: RunStore) -> None:
        log = store.create("run", b'{"dp_size":2}')
        assert (log.config, log.is_lost, log.is_long) == (b'{"dp_size":2}', False, False)
        assert (snapshot_in(log.replay()), list(log.replay().records)) == (None, [])
        opened(log)
        log.check()
        first = log.first_number
        log.append(b"one", {first: any_table()})
        log.remove([first])
        log.flush()
        compact(log, b"all")
        log.close()
        log.close()

    def test_a_run_that_is_not_there_is_not_found_and_may_be_deleted(self, store: RunStore) -> None:
        with pytest.raises(NotFoundError):
            store.open("run")
        store.delete("run")
        assert store.unhealthy_reason() == ""


@stores_that_keep
class TestStoresThatKeep:
    def test_records_and_their_tables_are_there_again(self, store: RunStore) -> None:
        log = opened(store.create("run", b'{"dp_size":2}'))
        run_id, first = log.run_id, log.first_number
        log.append(b"one", {first: any_table(0), first + 1: any_table(1)})
        log.append(b"two", {})
        log.append(b"three", {first + 2: any_table(2)})
        assert same(log.get(first + 1), any_table(1)), "at once"
        log, snapshot, records = reopened(store, log)
        assert (log.config, log.run_id, store.names()) == (b'{"dp_size":2}', run_id, ["run"])
        assert (snapshot, records) == (None, [b"one", b"two", b"three"])
        opened(log, first, first + 1, first + 2)
        tables = log.get_all([first + 2, first])
        assert {*tables} == {first, first + 2}
        assert same(tables[first], any_table(0))
        assert same(tables[first + 2], any_table(2))
        log.close()

    def test_a_snapshot_takes_the_place_of_the_records_before_it(self, store: RunStore) -> None:
        log = opened(store.create("run", b"{}"))
        first = log.first_number
        log.append(b"before", {first: any_table()})
        compact(log, b"all before")
        log.append(b"after", {})
        log, snapshot, records = reopened(store, log)
        assert (snapshot, records) == (b"all before", [b"after"])
        compact(log, b"all")
        log, snapshot, records = reopened(store, log)
        assert (snapshot, records) == (b"all", [])
        opened(log, first)
        assert same(log.get(first), any_table())
        log.close()

    def test_a_removed_table_is_gone_and_its_number_is_not_used_again(self, store: RunStore) -> None:
        log = opened(store.create("run", b"{}"))
        first = log.first_number
        log.append(b"one", {first: any_table(0), first + 1: any_table(1), first + 7: any_table(7)})
        log.remove([first + 1, first + 7])
        for number in (first + 1, first + 2, first + 7):
            with pytest.raises(NotFoundError):
                log.get(number)
        with pytest.raises(NotFoundError):
            log.get_all([first, first + 7])
        for compacts in (False, True, True):
            if compacts:
                compact(log, b"all")
            log.flush()
            log, _, _ = reopened(store, log)
            opened(log, first)
            assert log.first_number > first + 7
        log.close()

    def test_tables_that_are_missing_are_lost(self, store: RunStore) -> None:
        log = opened(store.create("run", b"{}"))
        first = log.first_number
        log.append(b"one", {first + index: any_table(index) for index in range(4)})
        log, _, _ = reopened(store, log)
        assert log.retain({first, first + 2, first + 9}) == {first + 9}
        assert same(log.get(first + 2), any_table(2))
        log.close()

    def test_a_dormant_run_is_marked_until_it_is_opened_or_deleted(self, store: RunStore) -> None:
        for name in ("run", "é" * 128):
            log = opened(store.create(name, b"{}"))
            assert store.dormant() == []
            store.set_dormant(name, b"described")
            log.close()
            assert ([*store.dormant()], store.names()) == ([name], [name])
            assert store.descriptions([name, "other"]) == {name: b"described"}
            store.open(name).close()
            assert ([*store.dormant()], store.descriptions([name])) == ([], {})
            opened(store.open(name))
            store.set_dormant(name, b"again")
            store.delete(name)
            assert ([*store.dormant()], store.descriptions([name])) == ([], {})
            store.create(name, b"{}").close()
            assert [*store.dormant()] == []
            store.delete(name)

    def test_a_run_is_created_once_and_deleted_whole(self, store: RunStore) -> None:
        log = opened(store.create("run", b"{}"))
        run_id = log.run_id
        with pytest.raises(AlreadyExistsError):
            store.create("run", b"{}")
        log.append(b"one", {log.first_number: any_table()})
        log.close()
        store.delete("run")
        assert store.names() == []
        with pytest.raises(NotFoundError):
            store.open("run")
        again = opened(store.create("run", b"{}"))
        assert again.run_id != run_id
        with pytest.raises(NotFoundError):
            again.get(0)
        again.close()
