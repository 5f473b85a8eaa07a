"""Checks Redis' servers: whether they answer, accept writes, and have enough memory and replicas, and whether their
configuration could lose confirmed writes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import redis
import structlog
from redis import exceptions

from gristmill.errors import FailedPreconditionError, GristmillError, UnavailableError
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, described, translated
from gristmill_service.storage.redis.scripts import Durability

_log = structlog.get_logger(__name__)

MIN_VERSION = (6, 2)
_WAITAOF_VERSION = (7, 2)
# The share of `maxmemory` that rows may use. The rest is for batches and acknowledgements, which free memory.
_FULLEST = 0.9
# Redis' default. The rows and shards of one batch are often larger.
_DEFAULT_REPLICA_BUFFER = 256 << 20
_SILENT = (redis.ConnectionError, redis.TimeoutError)
# A reload of a cluster's slot map closes idle connections of one node.
_RELOAD_S = 2.0


class Health:
    """The health of Redis. Thread-safe.

    unhealthy_reason: why some writes are rejected. unreachable_reason: why Redis does not answer. Both are empty if
    Redis is healthy. memory: used bytes and `maxmemory` (0: no limit) of the fullest server at the last check.
    """

    def __init__(self, client: Client, prefix: str, durability: Durability) -> None:
        self._client, self._probe, self._durability = client, f"{prefix}:probe", durability
        self.unhealthy_reason = self.unreachable_reason = self._no_room = self._too_few = ""
        self._silent = ""
        self.memory, self._reload_at = (0, 0), 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records an error of Redis in the `with` block, until `refresh` finds Redis healthy."""
        try:
            yield
        except UnavailableError as error:
            self._report(str(error))
            if isinstance(error.__cause__, _SILENT):
                self.unreachable_reason = str(error)
            raise

    def check(self, has_rows: bool) -> None:
        """Raises UnavailableError if there are too few replicas, or if rows would use the memory that is reserved for
        finishing batches."""
        if reason := self._too_few or (has_rows and self._no_room):
            raise UnavailableError(reason)

    @property
    def unconfirmed(self) -> str:
        """The reason why a write is not acknowledged yet."""
        return f"Redis did not confirm in time that the last change is on {self._durability}"

    def refresh(self) -> None:
        """Checks the servers. Called about twice a second; never raises."""
        infos, silent = self._look()
        if self._is_map_old(infos, silent):
            infos, silent = self._look()
        if not infos:
            self.unreachable_reason = silent
            self._report(silent)
            return
        self.unreachable_reason = ""
        # Runs on the other nodes of a cluster continue.
        self._silent = _log_change(self._silent, silent, "redis node unhealthy", "redis node recovered")
        self.memory = max(map(_memory, infos), key=lambda memory: memory[0] / (memory[1] or 1e18))
        self._no_room = _fullness(*self.memory)
        if self._durability.replicas:
            self._too_few = _too_few(min(map(_replicas, infos)), self._durability.replicas)
        self._report(self._too_few or self._no_room or self._try_writing())

    def _look(self) -> tuple[list[dict[str, Any]], str]:
        """Returns the information of each server that answers, and why one does not answer."""
        infos, silent = list[dict[str, Any]](), ""
        for _, server in _servers(self._client):
            try:
                with translated(self._client):
                    server.ping()
                    infos.append(_info(server))
            except GristmillError as error:
                silent = str(error)
        return infos, silent

    def _is_map_old(self, infos: list[dict[str, Any]], silent: str) -> bool:
        """Reloads the slot map of a cluster if it may name a former primary, which no command shows if its node has no
        keys of this service. Returns whether it was reloaded."""
        is_current = not silent and all(
            about.get("role") != "slave" and _replicas(about) >= self._durability.replicas for about in infos
        )
        if is_current or not isinstance(self._client, redis.RedisCluster) or time.monotonic() < self._reload_at:
            return False
        self._reload_at = time.monotonic() + _RELOAD_S
        with suppress(*REDIS_ERRORS):
            cast(Any, self._client).nodes_manager.initialize()
        return True

    def _try_writing(self) -> str:
        """Returns why Redis rejects writes, as a full server or a replica does; empty if it accepts them."""
        try:
            with translated(self._client):
                self._client.set(self._probe, b"", px=1000)
        except GristmillError as error:
            return str(error)
        return ""

    def _report(self, reason: str) -> None:
        self.unhealthy_reason = _log_change(self.unhealthy_reason, reason, "redis unhealthy", "redis recovered")


def _log_change(before: str, reason: str, unhealthy: str, recovered: str) -> str:
    """Logs that something became unhealthy or recovered. Returns the reason."""
    if reason and not before:
        _log.warning(unhealthy, reason=reason)
    elif before and not reason:
        _log.info(recovered)
    return reason


def _memory(about: dict[str, Any]) -> tuple[int, int]:
    """Returns the memory that a server uses, and its limit; 0 if there is no limit, or if it is hidden."""
    return int(about.get("used_memory", 0)), int(about.get("maxmemory", 0))


def _replicas(about: dict[str, Any]) -> int:
    """Returns the number of replicas that follow a server. If it is hidden, returns many, so that appends detect too
    few replicas."""
    if not about:
        return 1 << 30
    replicas = [replica for name, replica in about.items() if re.fullmatch(r"slave\d+", name)]
    return sum(replica.get("state") == "online" for replica in replicas)


def _too_few(replicas: int, wanted: int) -> str:
    """Returns why writes cannot be acknowledged; empty if they can."""
    if replicas >= wanted:
        return ""
    return (
        f"Redis has {replicas} replicas that follow it, and redis_min_replicas is {wanted}, so the service accepts "
        "nothing; start the replicas, or lower redis_min_replicas"
    )


def _fullness(used: int, most: int) -> str:
    """Returns why there is no memory for rows; empty if there is."""
    if not most or used <= _FULLEST * most:
        return ""
    return (
        f"Redis has used {used} bytes of its maxmemory: {most}, and the rest is reserved for finishing batches; raise "
        "maxmemory, or lower max_row_bytes or max_buffered_batches; committed batches free memory"
    )


def check_server(client: Client, durability: Durability, *, is_thorough: bool = False) -> list[str]:
    """Returns warnings about visible settings of the servers that may lose state.

    is_thorough: whether to include settings that matter only if memory is short, or in a failover. Raises
    FailedPreconditionError for a server that is too old, or that cannot provide the `durability`, and UnavailableError
    if no server answers.
    """
    findings, servers, is_cluster = dict[str, list[str]](), _servers(client), isinstance(client, redis.RedisCluster)
    silent = list[str]()
    with translated(client):
        for name, server in servers:
            try:
                about = _info(server)
            except _SILENT as error:
                silent.append(name)
                if len(silent) == len(servers):
                    raise
                findings.setdefault(f"it does not answer, so runs on it wait: {error}", []).append(name)
                continue
            warnings = [*_check(name, server, about, durability)]
            if is_thorough:
                warnings += _check_limits(server, about, is_cluster)
            for warning in warnings:
                findings.setdefault(warning, []).append(name)
    return [f"Redis at {', '.join(names)}: {finding}" for finding, names in findings.items()]


def _check_limits(server: redis.Redis, about: dict[str, Any], is_cluster: bool) -> Iterator[str]:
    if about.get("maxmemory") == 0:
        yield "maxmemory is not set, so Redis may use all memory of the machine; set maxmemory"
    if not int(about.get("connected_slaves", 0)):
        return
    settings = _configuration(server, "min-replicas-to-write") | _configuration(server, "client-output-buffer*")
    # In a cluster, an isolated master stops accepting writes by itself.
    if settings.get("min-replicas-to-write") == "0" and not is_cluster:
        yield (
            "min-replicas-to-write is 0, so a master that is cut off from its replicas still accepts writes, which a "
            "failover discards; set it to 1, and min-replicas-max-lag to 3"
        )
    # The value is CLASS HARD SOFT SECONDS for each class; 0: no limit.
    words = settings.get("client-output-buffer-limit", "").split()
    limits = {words[at]: int(words[at + 1]) for at in range(0, len(words) - 3, 4)}
    limit = limits.get("replica", limits.get("slave", 0))
    if 0 < limit <= _DEFAULT_REPLICA_BUFFER:
        yield (
            f"client-output-buffer-limit disconnects a replica that is {limit >> 20} MiB behind, which causes a full "
            "resync; set the limit of replicas above the bytes of a batch's rows and shards"
        )


def _check(name: str, server: redis.Redis, about: dict[str, Any], durability: Durability) -> Iterator[str]:
    configuration = _configuration(server, "append*")
    _check_version(name, str(about.get("redis_version", "")), durability)
    if about.get("role") == "slave":
        yield "this is a replica, which refuses writes; set redis_url to the master, or to the sentinels"
    policy = about.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"maxmemory-policy is {policy}, so a full server deletes rows and shards; set it to noeviction"
    if configuration.get("appendonly", "yes") == "no":
        if durability.on_disk:
            raise FailedPreconditionError(f"Redis at {name} has appendonly no; set it to yes for redis_wait_aof")
        yield "appendonly is no, so a restart of Redis loses what was accepted since its last snapshot; set it to yes"
    elif configuration.get("appendfsync", "always") != "always" and not durability.on_disk:
        yield (
            f"appendfsync is {configuration['appendfsync']}, so a failure of the machine loses what was accepted in "
            "the last second or more; set it to always"
        )
    replicas = int(about.get("connected_slaves", 0))
    follow = f"it has {replicas} replica{'s' * (replicas != 1)}"
    if replicas < durability.replicas:
        yield f"{follow}, and redis_min_replicas is {durability.replicas}, so nothing is accepted; start more"
    elif replicas and not durability.replicas:
        yield (
            f"{follow}, which lag a little, so a failover may lose the last accepted changes; set redis_min_replicas"
        )


def _check_version(name: str, version: str, durability: Durability) -> None:
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else _WAITAOF_VERSION
    for needed, what in ((MIN_VERSION, "gristmill"), *([(_WAITAOF_VERSION, "redis_wait_aof")] * durability.on_disk)):
        if number < needed:
            raise FailedPreconditionError(
                f"Redis at {name} is version {version}, but {what} needs {'.'.join(map(str, needed))} or later; "
                "upgrade, or use Valkey"
            )


def _servers(client: Client) -> list[tuple[str, redis.Redis]]:
    """Returns all servers that accept writes, with their names."""
    if isinstance(client, redis.RedisCluster):
        primaries = cast(Any, client).get_primaries()
        return [(node.name, client.get_redis_connection(node)) for node in primaries]
    return [(described(client), client)]


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
