"""Opens the stores that a service's settings name. A store's module is imported only where it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import structlog

from gristmill.errors import UnavailableError
from gristmill_service.settings import Settings
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardStore

if TYPE_CHECKING:
    from gristmill_service.storage.redis.servers.connection import RedisAddress

_log = structlog.get_logger(__name__)

Advertise = Callable[[str, str, str], None]
ReadRoom = Callable[[], dict[str, tuple[int, int]]]


class StorageAwayError(UnavailableError):
    """The settings name a store that does not answer now. Another try may help."""


class Storage:
    """A service's shards and runs. Closing it closes all that was opened for them.

    advertise(grpc_address, http_url, secret) tells other services where they reach this one, and what they show it.
    room() returns, for each place that is bounded, the bytes that are used there and the bytes that there are.
    """

    def __init__(
        self,
        shards: ShardStore,
        runs: RunStore,
        advertise: Advertise,
        room: ReadRoom,
        close: Callable[[], None],
    ) -> None:
        self.shards, self.runs, self.advertise, self.room, self.close = shards, runs, advertise, room, close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_storage(settings: Settings) -> Storage:
    """Raises StorageAwayError where Redis cannot be reached, and other errors where a setting is wrong."""
    with ExitStack() as opened:
        storage = _in_redis(settings, opened) if settings.store == "redis" else _on_this_machine(settings, opened)
        storage.close = opened.pop_all().close
        return storage


def _on_this_machine(settings: Settings, opened: ExitStack) -> Storage:
    # The journal comes first: its lock refuses another service of the same directory.
    runs = _local_run_store(settings)
    opened.callback(runs.close)
    shards = _local_shard_store(settings)
    opened.callback(shards.close)
    places = {"journal": settings.journal_dir}
    if settings.store == "shared_memory":
        places["shared_memory"] = settings.shared_memory_dir
    room = partial(_room_on_disk, {name: path for name, path in places.items() if path is not None})
    return Storage(shards, runs, lambda grpc_address, http_url, secret: None, room, opened.close)


def _room_on_disk(places: dict[str, Path]) -> dict[str, tuple[int, int]]:
    found = {}
    for name, path in places.items():
        with suppress(OSError):
            system = os.statvfs(path)
            used = system.f_frsize * (system.f_blocks - system.f_bfree)
            found[name] = used, used + system.f_frsize * system.f_bavail
    return found


def _local_run_store(settings: Settings) -> RunStore:
    if settings.journal_dir is None:
        from gristmill_service.storage.memory_runs import MemoryRunStore

        return MemoryRunStore()
    from gristmill_service.storage.journal.run_store import JournalRunStore

    return JournalRunStore(settings.journal_dir, settings.journal_fsync)


def _local_shard_store(settings: Settings) -> ShardStore:
    if settings.store == "memory":
        from gristmill_service.storage.memory_shards import MemoryShardStore

        return MemoryShardStore()
    from gristmill_service.storage.shared_memory import SharedMemoryShardStore

    return SharedMemoryShardStore(settings.shared_memory_dir)


def _in_redis(settings: Settings, opened: ExitStack) -> Storage:
    from gristmill_service.storage.redis.run_store import RedisRunStore
    from gristmill_service.storage.redis.servers.connection import connect
    from gristmill_service.storage.redis.servers.durability import Durability
    from gristmill_service.storage.redis.servers.server_check import check_server
    from gristmill_service.storage.redis.shards.shard_store import RedisShardStore

    durability = Durability(settings.redis_min_replicas, settings.redis_wait_aof)
    try:
        client = connect(redis_address(settings))
        opened.callback(client.close)
        warnings = check_server(client, durability)
    except UnavailableError as error:
        raise StorageAwayError(str(error)) from error
    for warning in warnings:
        _log.warning(warning)
    runs = RedisRunStore(client, settings.redis_prefix, settings.lease_s, durability)
    opened.callback(runs.close)
    shards = RedisShardStore(client, runs, settings.redis_prefix)
    return Storage(shards, runs, runs.advertise, runs.room, opened.close)


def redis_address(settings: Settings) -> RedisAddress:
    """Where the Redis of settings with `store: redis` is, and how to enter."""
    from gristmill_service.storage.redis.servers.connection import RedisAddress

    assert settings.redis_url is not None, "checked with the settings"
    password = settings.redis_password
    return RedisAddress(
        url=settings.redis_url,
        username=settings.redis_username,
        password=None if password is None else password.get_secret_value(),
        ca_file=settings.redis_ca_file,
    )
