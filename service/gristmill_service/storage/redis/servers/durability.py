"""Commands in one round trip to each server, and how many copies a write needs before it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import redis
from redis.exceptions import AskError, RedisClusterException

from gristmill.errors import UnavailableError
from gristmill_service.storage.redis.servers.connection import Client

Command = tuple[Any, ...]

# Shorter than a read from a socket may take.
_CONFIRM_MS = 1000


class Durability(NamedTuple):
    """Which copies of a write have to exist, beside the one in the memory of the server that took it.

    replicas: how many replicas must have it. on_disk: whether they, and the server itself, must have it on disk, too.
    """

    replicas: int = 0
    on_disk: bool = False

    @property
    def command(self) -> Command | None:
        """Waits for the copies of all that was written before it; None where the server alone is enough."""
        if self.on_disk:
            return "WAITAOF", 1, self.replicas, _CONFIRM_MS
        return ("WAIT", self.replicas, _CONFIRM_MS) if self.replicas else None

    def is_reached(self, copies: Any) -> bool:
        """copies: the answer to the command."""
        if self.on_disk:
            return bool(copies[0] >= 1 and copies[1] >= self.replicas)
        return bool(copies >= self.replicas)

    def check(self, is_reached: bool, what: str) -> None:
        """Raises UnavailableError where that is not so."""
        if not is_reached:
            raise UnavailableError(f"Redis did not confirm in time that {what} is on {self}; ask again")

    def __str__(self) -> str:
        copies = f"{self.replicas} replica{'s' * (self.replicas != 1)}"
        return f"the disks of Redis and of {copies}" if self.on_disk else copies


SERVER_ALONE = Durability()


def server_of(client: Client, key: str) -> redis.Redis:
    """The server that has the key, as far as the client knows."""
    if isinstance(client, redis.RedisCluster):
        return client.get_redis_connection(cast(Any, client).get_node_from_key(key))
    return client


def execute(
    client: Client, server: redis.Redis, commands: Sequence[Command], durability: Durability
) -> tuple[list[Any], bool]:
    """The answers of one of the client's servers, each of which may be an error, and whether all that was written to it
    so far has its copies. One round trip; no command is ever sent twice."""
    pipeline: Any = server.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    if durability.command is not None:
        pipeline.execute_command(*durability.command)
    try:
        answers = pipeline.execute(raise_on_error=False)
    except (redis.ConnectionError, redis.TimeoutError):
        if isinstance(client, redis.RedisCluster):
            with suppress(redis.RedisError, RedisClusterException):
                cast(Any, client).nodes_manager.initialize()
        raise
    if durability.command is None:
        return answers, True
    copies = answers.pop()
    # A server that refuses the question mostly refused the commands for the same reason.
    is_reached = not isinstance(copies, Exception) and durability.is_reached(copies)
    return answers, is_reached


def pipelined(client: Client, commands: Mapping[str, Command]) -> dict[str, Any]:
    """The answers to commands by the key that each is about. Raises the first error.

    A command is sent again only to another server, where the first one says that the key is not its own.
    """
    answers: dict[str, Any] = {}
    for server, keys in _by_server(client, commands).items():
        found, _ = execute(client, server, [commands[key] for key in keys], SERVER_ALONE)
        for key, answer in zip(keys, found, strict=True):
            # The client follows the redirection, and learns where the key is now.
            answers[key] = cast(Any, client).execute_command(*commands[key]) if isinstance(answer, AskError) else answer
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return answers


def write(client: Client, values: Mapping[str, Any], durability: Durability) -> None:
    """Sets keys, which may be on several servers. May be repeated.

    Raises UnavailableError where too few copies are confirmed in time.
    """
    for server, keys in _by_server(client, values).items():
        answers, is_reached = execute(client, server, [("SET", key, values[key]) for key in keys], durability)
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, AskError):
                client.set(key, values[key])
                is_reached = durability.command is None
            elif isinstance(answer, Exception):
                raise answer
        durability.check(is_reached, "a table of rows")


def _by_server(client: Client, keys: Mapping[str, Any]) -> dict[redis.Redis, list[str]]:
    found: dict[redis.Redis, list[str]] = {}
    for key in keys:
        found.setdefault(server_of(client, key), []).append(key)
    return found
