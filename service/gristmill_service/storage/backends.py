"""Opens the stores in a service's settings. A store's module is imported only if it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import structlog

from gristmill.errors import UnavailableError
from gristmill_service.settings import SHARD_STORES, Settings
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardStore

if TYPE_CHECKING:
    from gristmill_service.storage.redis.connection import RedisAddress

_log = structlog.get_logger(__name__)

Advertise = Callable[[str, str, str], None]
ReadRoom = Callable[[], dict[str, tuple[int, int]]]


class StorageUnreachableError(UnavailableError):
    """A store does not answer now, or another process uses it. A retry may help."""


class Storage:
    """A service's stores of shards and runs. Closing it closes everything that was opened for them.

    advertise(grpc_address, http_url, secret): publishes the addresses at which other replicas reach this process, and
    the secret that they must send. room(): returns used and total bytes of each limited storage.
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
    """Opens the stores. Raises StorageUnreachableError if Redis is unreachable or the journal is locked, and other
    errors for invalid settings."""
    with ExitStack() as opened:
        # Runs are opened first, because the journal's lock rejects a second service with the same directory.
        runs, advertise, room = _RUN_STORES[settings.run_store](settings, opened)
        opened.callback(runs.close)
        shards: ShardStore = import_module(SHARD_STORES[settings.shard_store].module).open_shards(settings, runs)
        opened.callback(shards.close)
        return Storage(shards, runs, advertise, room, opened.pop_all().close)


class _OpenRuns(NamedTuple):
    """An opened run store. advertise, room: see `Storage`."""

    runs: RunStore
    advertise: Advertise
    room: ReadRoom


def _of_this_machine(runs: RunStore, settings: Settings) -> _OpenRuns:
    return _OpenRuns(runs, lambda grpc_address, http_url, secret: None, partial(_room, settings.store_directories))


def _room(places: dict[str, Path]) -> dict[str, tuple[int, int]]:
    room = {}
    for name, path in places.items():
        with suppress(OSError):
            system = os.statvfs(path)
            used = system.f_frsize * (system.f_blocks - system.f_bfree)
            room[name] = used, used + system.f_frsize * system.f_bavail
    return room


def _in_memory(settings: Settings, opened: ExitStack) -> _OpenRuns:
    from gristmill_service.storage.memory import MemoryRunStore

    return _of_this_machine(MemoryRunStore(), settings)


def _in_a_journal(settings: Settings, opened: ExitStack) -> _OpenRuns:
    from gristmill_service.storage.journal.run_store import JournalRunStore

    assert settings.journal_dir is not None, "checked with the settings"
    try:
        return _of_this_machine(JournalRunStore(settings.journal_dir, settings.journal_fsync), settings)
    except UnavailableError as error:
        raise StorageUnreachableError(str(error)) from error


def _in_redis(settings: Settings, opened: ExitStack) -> _OpenRuns:
    from gristmill_service.storage.redis.connection import connect
    from gristmill_service.storage.redis.run_store import RedisRunStore
    from gristmill_service.storage.redis.scripts import Durability
    from gristmill_service.storage.redis.servers import check_server

    durability = Durability(settings.redis_min_replicas, settings.redis_wait_aof)
    try:
        client = connect(redis_address(settings))
        opened.callback(client.close)
        warnings = check_server(client, durability)
    except UnavailableError as error:
        raise StorageUnreachableError(str(error)) from error
    for warning in warnings:
        _log.warning(warning)
    runs = RedisRunStore(client, settings.redis_prefix, settings.lease_s, durability)
    return _OpenRuns(runs, runs.advertise, runs.room)


_RUN_STORES: dict[str, Callable[[Settings, ExitStack], _OpenRuns]] = {
    "memory": _in_memory,
    "journal": _in_a_journal,
    "redis": _in_redis,
}


def redis_address(settings: Settings) -> RedisAddress:
    """Returns the address and credentials of Redis from settings with `run_store: redis`."""
    from gristmill_service.storage.redis.connection import RedisAddress

    assert settings.redis_url is not None, "checked with the settings"
    password = settings.redis_password
    return RedisAddress(
        url=settings.redis_url,
        username=settings.redis_username,
        password=None if password is None else password.get_secret_value(),
        ca_file=settings.redis_ca_file,
    )
