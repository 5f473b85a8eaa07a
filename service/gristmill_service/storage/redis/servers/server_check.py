"""A check of the servers of Redis when the service starts: whether they could lose state that they confirm."""

from __future__ import annotations

import re
from typing import Any, cast

import redis
from redis import exceptions

from gristmill.errors import FailedPreconditionError
from gristmill_service.storage.redis.servers.connection import Client, described, translated
from gristmill_service.storage.redis.servers.durability import SERVER_ALONE, Durability

MIN_VERSION = (6, 2)
# What Redis has unless it is set. Rows and shards of one batch are often more.
_DEFAULT_REPLICA_BUFFER = 256 << 20
_WAITAOF_VERSION = (7, 2)


def check_server(client: Client, durability: Durability = SERVER_ALONE) -> list[str]:
    """Warnings about settings of the servers that may lose state; what they do not let us see is not judged.

    Raises FailedPreconditionError for a server that is too old, or that cannot keep what `durability` promises.
    """
    findings: dict[str, list[str]] = {}
    with translated(client):
        for name, server in _servers(client):
            for finding in _check(name, server, durability):
                findings.setdefault(finding, []).append(name)
    return [f"Redis at {', '.join(names)}: {finding}" for finding, names in findings.items()]


def has_bound(client: Client) -> dict[str, bool]:
    """By server that lets us see it, whether it has a `maxmemory`."""
    with translated(client):
        memories = {name: _info(server).get("maxmemory") for name, server in _servers(client)}
    return {name: memory != 0 for name, memory in memories.items() if memory is not None}


def check_replication(client: Client) -> list[str]:
    """Findings about servers that have replicas of their own: what cuts them off, and what is written meanwhile. What
    the servers do not let us see is not judged."""
    findings = []
    with translated(client):
        for name, server in _servers(client):
            if not int(_info(server).get("connected_slaves", 0)):
                continue
            settings = _configuration(server, "min-replicas-to-write") | _configuration(server, "client-output-buffer*")
            # In a cluster a master that is cut off stops by itself.
            if settings.get("min-replicas-to-write") == "0" and not isinstance(client, redis.RedisCluster):
                findings.append(
                    f"Redis at {name}: min-replicas-to-write is 0: a master that is cut off from its replicas goes on "
                    "taking writes, which a failover takes back; set it to 1, and min-replicas-max-lag to 3"
                )
            buffer = _replica_buffer(settings.get("client-output-buffer-limit", ""))
            if 0 < buffer <= _DEFAULT_REPLICA_BUFFER:
                findings.append(
                    f"Redis at {name}: client-output-buffer-limit cuts off a replica that is {buffer >> 20} MiB "
                    "behind, and everything is copied to it anew; set that of replicas above the bytes of a batch's "
                    "rows and shards"
                )
    return findings


def _replica_buffer(limits: str) -> int:
    """The hard limit of replicas in bytes, of `CLASS HARD SOFT SECONDS` for each class; 0: none."""
    words = limits.split()
    of = {words[at]: int(words[at + 1]) for at in range(0, len(words) - 3, 4)}
    return of.get("replica", of.get("slave", 0))


def _servers(client: Client) -> list[tuple[str, redis.Redis]]:
    if isinstance(client, redis.RedisCluster):
        primaries = cast(Any, client).get_primaries()
        return [(node.name, client.get_redis_connection(node)) for node in primaries]
    return [(described(client), client)]


def _check(name: str, server: redis.Redis, durability: Durability) -> list[str]:
    about, configuration = _info(server), _configuration(server, "append*")
    _check_version(name, str(about.get("redis_version", "")), durability)
    findings = []
    if about.get("role") == "slave":
        findings.append("this is a replica, which refuses writes; let redis_url name the master, or the sentinels")
    policy = about.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        findings.append(f"maxmemory-policy is {policy}: a full server deletes rows and shards; set it to noeviction")
    if configuration.get("appendonly", "yes") == "no":
        if durability.on_disk:
            raise FailedPreconditionError(f"Redis at {name} has appendonly no; set it to yes for redis_wait_aof")
        findings.append(
            "appendonly is no: when the server ends, what was accepted since its last snapshot is lost; set it to yes"
        )
    elif configuration.get("appendfsync", "always") != "always" and not durability.on_disk:
        findings.append(
            f"appendfsync is {configuration['appendfsync']}: when its machine fails, what was accepted in the last "
            "second or more is lost; set it to always"
        )
    findings += _check_replicas(int(about.get("connected_slaves", 0)), durability.replicas)
    return findings


def _check_version(name: str, version: str, durability: Durability) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else _WAITAOF_VERSION
    for needed, what in ((MIN_VERSION, "gristmill"), *([(_WAITAOF_VERSION, "redis_wait_aof")] * durability.on_disk)):
        if number < needed:
            raise FailedPreconditionError(
                f"Redis at {name} is version {version}; {what} needs {'.'.join(map(str, needed))} or later, or Valkey"
            )


def _check_replicas(replicas: int, wanted: int) -> list[str]:
    follow = f"it has {replicas} replica{'s' * (replicas != 1)}"
    if replicas < wanted:
        return [f"{follow}, and redis_min_replicas is {wanted}: nothing is accepted until there are as many"]
    if replicas and not wanted:
        return [
            f"{follow}, which follow a moment later: a failover may lose what was accepted last; set redis_min_replicas"
        ]
    return []


def _info(server: redis.Redis) -> dict[str, Any]:
    try:
        return server.info()
    except exceptions.ResponseError:  # forbidden
        return {}


def _configuration(server: redis.Redis, pattern: str) -> dict[str, str]:
    try:
        return cast(dict[str, str], server.config_get(pattern))
    except exceptions.ResponseError:  # forbidden, or renamed away
        return {}
