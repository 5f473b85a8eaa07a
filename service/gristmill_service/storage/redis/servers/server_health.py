"""Whether Redis answers, takes writes, has room for rows, and as many replicas as the settings ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import redis
import structlog

from gristmill.errors import GristmillError, UnavailableError
from gristmill_service.storage.redis.servers.connection import Client, translated
from gristmill_service.storage.redis.servers.durability import Durability

_log = structlog.get_logger(__name__)

# Of `maxmemory`. What is left is for batches and acknowledgements, which make room.
_FULLEST = 0.9
_SILENT = (redis.ConnectionError, redis.TimeoutError)


class Health:
    """Thread-safe. unhealthy_reason: why something is refused. unreachable_reason: why Redis cannot even be asked.
    Empty when all is well.

    memory: bytes used of the fullest server, and its `maxmemory`, 0 where it has none, as they were last seen.
    """

    def __init__(self, client: Client, prefix: str, durability: Durability) -> None:
        self._client, self._probe, self._durability = client, f"{prefix}:probe", durability
        self.unhealthy_reason = self.unreachable_reason = self._no_room = self._too_few = ""
        self.memory = 0, 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes that Redis does not answer, or refuses, until `refresh` finds it well."""
        try:
            yield
        except UnavailableError as error:
            self._report(str(error))
            if isinstance(error.__cause__, _SILENT):
                self.unreachable_reason = str(error)
            raise

    def check_room(self) -> None:
        """Raises UnavailableError where rows would take what is left for ending batches."""
        if reason := self._no_room or self._too_few:
            raise UnavailableError(reason)

    def check_replicas(self) -> None:
        """Raises UnavailableError where nothing could be acknowledged for want of replicas."""
        if self._too_few:
            raise UnavailableError(self._too_few)

    @property
    def unconfirmed(self) -> str:
        """The reason why a write does not count yet."""
        return f"Redis did not confirm in time that the last change is on {self._durability}"

    def refresh(self) -> None:
        """Asks the servers. Called about once a second; never raises."""
        try:
            with translated(self._client):
                self._client.ping()
            self.unreachable_reason = ""
        except GristmillError as error:
            self.unreachable_reason = str(error)
            self._report(self.unreachable_reason)
            return
        try:
            with translated(self._client):
                # A write: a server that is full, or only a replica, answers everything else.
                self._client.set(self._probe, b"", px=1000)
                found = servers(self._client)
                self.memory = max(map(_memory, found), key=lambda found: found[0] / (found[1] or 1e18))
                self._no_room = _fullness(*self.memory)
                if self._durability.replicas:
                    self._too_few = _too_few(min(map(_replicas, found)), self._durability.replicas)
            self._report(self._too_few or self._no_room)
        except GristmillError as error:
            self._report(str(error))

    def _report(self, reason: str) -> None:
        before, self.unhealthy_reason = self.unhealthy_reason, reason
        if reason and not before:
            _log.warning("Redis in trouble", reason=reason)
        elif before and not reason:
            _log.info("Redis well again")


def servers(client: Client) -> list[redis.Redis]:
    """All servers that take writes."""
    if isinstance(client, redis.RedisCluster):
        return [client.get_redis_connection(node) for node in cast(Any, client).get_primaries()]
    return [client]


def _memory(server: redis.Redis) -> tuple[int, int]:
    """The bytes that a server uses, and how many it may, 0 where that is not bounded."""
    try:
        memory = server.info("memory")
    except redis.exceptions.ResponseError:  # forbidden
        return 0, 0
    return int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))


def _replicas(server: redis.Redis) -> int:
    """The number of replicas that follow a server now."""
    try:
        about = server.info("replication")
    except redis.exceptions.ResponseError:  # forbidden: each append finds out by itself
        return 1 << 30
    return sum(
        isinstance(replica, dict) and replica.get("state") == "online"
        for name, replica in about.items()
        if name.startswith("slave")
    )


def _too_few(replicas: int, wanted: int) -> str:
    """The reason why nothing can be acknowledged; empty where it can."""
    if replicas >= wanted:
        return ""
    return (
        f"Redis has {replicas} replicas that follow it, and redis_min_replicas is {wanted}: nothing is accepted until "
        "they are back; start them, or lower the setting"
    )


def _fullness(used: int, most: int) -> str:
    """The reason why there is no room for rows; empty where there is."""
    if not most or used <= _FULLEST * most:
        return ""
    return (
        f"Redis has used {used} bytes of its maxmemory: {most}, and the rest is for batches that are ending; raise it, "
        "or lower max_row_bytes or max_buffered_batches; it goes on by itself when batches are committed"
    )
