"""Deletions of runs in Redis: killed at any point they can be finished, and nothing is left of a run or of its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest

from gristmill.errors import AlreadyExistsError, NotFoundError
from gristmill_service.storage.redis import deletion, run_store
from gristmill_service.storage.redis.connection import Client
from gristmill_service.storage.redis.keys import RunKeys
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.run_store import OwnedElsewhereError
from tests.redis.run_logs import Join, any_table, expire, keys, row_keys, started, stored
from tests.redis.servers import RedisServer, StartRedis
from tests.storage.tables import compact


class KilledError(BaseException):
    """The process ends here."""


def kill_after(store: RedisRunStore, commands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the store's process send only so many more commands."""
    left, send = commands, cast(Any, store._client).execute_command

    def execute(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KilledError
        return send(*args, **options)

    monkeypatch.setattr(store._client, "execute_command", execute)


def die(*_: object) -> None:
    raise KilledError


def fill(store: RedisRunStore) -> None:
    """Creates a run with rows and a snapshot."""
    log = store.create("run", b"{}")
    started(log)
    compact(log, b"all before")
    for number in range(3):
        stored(log, any_table(number))


def test_a_deletion_that_is_killed_at_any_point_is_finished_by_the_next_process_that_asks_for_the_run(
    url: str, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "KEYS_AT_ONCE", 2)
    other = join(url, 1)
    for commands in range(100):
        dying = join(url)
        fill(dying)
        with monkeypatch.context() as killed:
            kill_after(dying, commands, killed)
            try:
                dying.delete("run")
            except KilledError:
                is_whole = False
            else:
                is_whole = True
        expire(dying)
        if commands:
            with pytest.raises(NotFoundError):
                other.open("run")
        else:
            other.delete("run")
        assert (other.names(), keys(other)) == ([], set())
        if is_whole:
            assert commands > 5
            return
    raise AssertionError("the deletion does not end")


@pytest.mark.parametrize("again", ["delete", "open"])
def test_a_name_is_free_again_when_a_deletion_that_was_killed_is_finished(
    redis_server: RedisServer, join: Join, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    dying, other = join(redis_server.url), join(redis_server.url, 1)
    fill(dying)
    with monkeypatch.context() as killed:
        killed.setattr(run_store, "finish_deletion", die)
        with pytest.raises(KilledError):
            dying.delete("run")
    assert len(row_keys(other)) == 3
    with pytest.raises(AlreadyExistsError):
        other.create("run", b"{}")
    with pytest.raises(OwnedElsewhereError):
        join(redis_server.url, 2).open("run")
    expire(dying)
    with suppress(NotFoundError):
        getattr(other, again)("run")
    assert keys(other) == set()
    assert started(other.create("run", b"{}")) == []


def test_a_deletion_that_hangs_removes_nothing_of_a_later_run_of_the_name(
    redis_server: RedisServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, other = join(redis_server.url), join(redis_server.url, 1)
    fill(hanging)
    scan = RunKeys.scan

    def scan_and_hang(self: RunKeys, client: Client, kind: str = "") -> Iterator[bytes]:
        monkeypatch.setattr(RunKeys, "scan", scan)
        expire(hanging)
        with pytest.raises(NotFoundError):
            other.open("run")
        fill(other)
        yield from scan(self, client, kind)

    monkeypatch.setattr(RunKeys, "scan", scan_and_hang)
    hanging.delete("run")
    assert len(row_keys(other)) == 3
    assert other.names() == ["run"]
    stored(other.owned("run"), any_table())


def test_a_server_that_is_full_deletes_a_run(start_redis: StartRedis, join: Join) -> None:
    server = start_redis(appendonly="no")
    store = join(server.url)
    fill(store)
    server.client().config_set("maxmemory", 1)
    store.delete("run")
    assert (store.names(), keys(store)) == ([], set())


def test_a_name_without_a_run_is_removed_when_it_is_looked_at(url: str, join: Join) -> None:
    store = join(url)
    store._client.sadd(store._runs, "run")
    with pytest.raises(NotFoundError):
        store.open("run")
    assert (store.names(), keys(store)) == ([], set())


def test_a_run_that_is_created_while_its_name_is_removed_keeps_it(
    redis_server: RedisServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = join(redis_server.url), join(redis_server.url, 1)
    store._client.sadd(store._runs, "run")
    remove = store._client.srem

    def remove_late(*args: Any) -> Any:
        # Its process is killed before it opens the run.
        with monkeypatch.context() as killed:
            kill_after(other, 3, killed)
            with pytest.raises(KilledError):
                other.create("run", b"{}")
        return remove(*args)

    monkeypatch.setattr(store._client, "srem", remove_late)
    with pytest.raises(NotFoundError):
        store.open("run")
    assert store.names() == ["run"]
    expire(other)
    assert started(store.open("run")) == []
