"""Stores the runs of a service with several processes in Redis. Each run is owned by the process that claimed it.

A claim is a lease that its owner renews. Another process that opens the run gets its owner's address. After the lease
has expired, the first process that opens the run becomes the owner, and Redis rejects the former owner's writes because
of their token.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from zlib import crc32

import msgspec
import redis
import structlog

from gristmill.errors import AlreadyExistsError, GristmillError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, server_of, translated, watched_master
from gristmill_service.storage.redis.deletion import finish_deletion
from gristmill_service.storage.redis.keys import RunKeys, damaged, reading, scan, tag_and_parts, unlink
from gristmill_service.storage.redis.run_log import Acknowledged, RedisRunLog
from gristmill_service.storage.redis.scripts import (
    CREATE,
    DELETE,
    RELEASE,
    REPORT,
    SERVER_ALONE,
    Durability,
    Outcome,
    Owner,
    Scripts,
)
from gristmill_service.storage.redis.servers import Health
from gristmill_service.storage.run_store import CheckNames, LogLostError, OwnedElsewhereError, any_names, check_config

_log = structlog.get_logger(__name__)

FORMAT = 3
# The owner of a run is cached for this time. If the cached owner is wrong, that process refuses the call.
_OWNER_KNOWN_S = 0.5
# A former owner repeats its report for this time, because Redis may lose a report, and its reader may die.
_REPORT_S = 30.0
# The number of a claim is at least its time in seconds since 2020.
_EPOCH = 1_577_836_800


class _Description(msgspec.Struct, frozen=True):
    """A run's description. nonce: distinguishes the run from deleted runs of its name. crc: the checksum of the other
    fields."""

    format: int
    nonce: str
    config: str
    crc: int = 0

    @classmethod
    def of(cls, nonce: str, config: str) -> _Description:
        return cls(FORMAT, nonce, config, crc32(f"{FORMAT}{nonce}{config}".encode()))


@dataclass
class _Known:
    """A process's information about a run, in addition to its own claim.

    acknowledged: the last record that the process acknowledged as owner. reported, reports_until: its report of that
    record to the new owner. compared: the reports that it received. elsewhere, elsewhere_until: the cached owner.
    """

    acknowledged: Acknowledged | None = None
    reported: Acknowledged | None = None
    reports_until: float = 0.0
    compared: set[Acknowledged] = field(default_factory=set)
    elsewhere: OwnedElsewhereError | None = None
    elsewhere_until: float = 0.0


class RedisRunStore:
    """Implements `gristmill_service.storage.run_store.RunStore`. The caller closes the client.

    lease_s: the time without a renewal after which another process may take over a run.
    durability: the copies that a record must have before its append returns.
    """

    is_shared = True

    def __init__(self, client: Client, prefix: str, lease_s: float, durability: Durability = SERVER_ALONE) -> None:
        self.client, self._client, self._prefix = client, client, prefix
        self._scripts, self._health = Scripts(client, durability), Health(client, prefix, durability)
        self._process = secrets.token_hex(8)
        self._leases = Leases(client, self._scripts, self._health, lease_s)
        self._known: dict[str, _Known] = {}

    def advertise(self, grpc_address: str, http_url: str, secret: str = "") -> None:
        """Sets this process's address for other processes, and the secret that they send. Enables claiming runs."""
        self._leases.owner = Owner(self._process, grpc_address, http_url, secret)

    def names(self) -> list[str]:
        if self._leases.owner is None:
            return []
        with translated(self._client):
            names = {name.decode() for name in cast(set[bytes], self._client.smembers(self._runs))}
            # Other processes deleted these. A failover may also have lost the name of a run that exists.
            for name in {*self._known} - names:
                if self._leases.get(name) is None and not self._client.exists(self._keys(name).config):
                    self._known.pop(name, None)
        return sorted(names)

    def create(self, name: str, config: bytes, check: CheckNames = any_names) -> RedisRunLog:
        check_config(name, config)
        description, keys = _Description.of(secrets.token_hex(8), config.decode()), self._keys(name)
        lease = msgspec.json.encode(self._owner(name))
        with translated(self._client):
            # Other processes remove a name without a run, unless a process has the run's lease. If they could remove
            # this one, it would not be counted.
            is_mine = self._client.set(keys.owner, lease, px=self._leases.lease_ms, nx=True)
            outcome = Outcome.EXISTS
            if is_mine or self._client.get(keys.owner) == lease:
                # The name is added first, because a run without a name would be lost.
                self._add(name, check)
                outcome = self._scripts.confirmed(CREATE, keys, msgspec.json.encode(description), lease)
        if outcome is Outcome.EXISTS:
            raise AlreadyExistsError(f"run {name!r} already exists in Redis; choose another name")
        if outcome is Outcome.LOST:
            raise UnavailableError(f"run {name!r}: Redis took longer than lease_s to create it; retry")
        if outcome is Outcome.UNCONFIRMED:
            raise UnavailableError(f"{self._health.unconfirmed}: run {name!r} may be lost; retry")
        return self.open(name)

    def _add(self, name: str, check: CheckNames) -> None:
        """Adds a name to those of all runs, unless `check` refuses it. Checks again if they change meanwhile."""

        def add(names: redis.client.Pipeline) -> None:
            others = {other.decode() for other in cast(set[bytes], names.smembers(self._runs))} - {name}
            check(others)
            names.multi()
            names.sadd(self._runs, name)

        server_of(self._client, self._runs).transaction(add, self._runs)

    def open(self, name: str) -> RedisRunLog:
        """Claims a run. Raises OwnedElsewhereError if another process owns it."""
        keys, token, asked = self._keys(name), secrets.token_hex(8), time.monotonic()
        with translated(self._client):
            try:
                claim = self._claim(name, keys, token)
            except NotFoundError:
                self._forget(name, keys)
                raise
            # In a cluster, the name is on another node, which may have lost it in a failover.
            self._client.sadd(self._runs, name)
            self._client.hdel(self._dormant, name)
            try:
                description = self._describe(keys)
            except InvalidArgumentError:
                # Another process may be able to read it.
                self._scripts.step(RELEASE, keys, token)
                raise
        known = self._known.setdefault(name, _Known())
        before = self._leases.get(name)
        acknowledged = known.acknowledged if before is None else before.acknowledged
        is_same = acknowledged is not None and acknowledged.run_id == description.nonce
        log = RedisRunLog(
            self._client,
            self._scripts,
            keys,
            self._health,
            config=description.config.encode(),
            run_id=description.nonce,
            token=token,
            claim=claim,
            before=acknowledged if is_same else None,
            compared=known.compared,
        )
        log.on_close = lambda: self._closed(name, log)
        self._leases.add(name, log, asked)
        _log.info("run claimed", run=name, claim=claim)
        return log

    def _describe(self, keys: RunKeys) -> _Description:
        """Reads a run's description. Raises InvalidArgumentError if it is missing, damaged or of another format."""
        with reading(keys.config):
            described = self._client.get(keys.config)
            if described is None:
                raise damaged(keys.config, "it is missing")
            description = msgspec.json.decode(cast(bytes, described), type=_Description)
        if description.format != FORMAT:
            raise InvalidArgumentError(
                f"run {keys.run!r} has format {description.format} in Redis and this version reads {FORMAT}; use the "
                "version that wrote it"
            )
        if description != _Description.of(description.nonce, description.config):
            raise damaged(keys.config, "its checksum does not match")
        return description

    def delete(self, name: str) -> None:
        """Deletes a run, even if it cannot be read. Raises OwnedElsewhereError if another process owns it."""
        log, keys, token = self._leases.get(name), self._keys(name), secrets.token_hex(8)
        with translated(self._client):
            if log is None:
                # A damaged or partly deleted run cannot be claimed, but can be deleted.
                with suppress(NotFoundError, InvalidArgumentError):
                    self._claim(name, keys, token)
            outcome = self._scripts.confirmed(DELETE, keys, token if log is None else log.token, secrets.token_hex(8))
            if outcome is Outcome.FENCED:
                if log is not None:
                    log.lose()
                raise LogLostError(f"another replica now owns run {name!r}; retry")
            if outcome is Outcome.UNCONFIRMED:
                raise UnavailableError(f"{self._health.unconfirmed}: run {name!r} may reappear; delete it again")
            if log is not None:
                # A renewal would be rejected.
                self._leases.discard(name, log)
                log.on_close = lambda: None
            self._forget(name, keys)

    def _forget(self, name: str, keys: RunKeys) -> None:
        """Finishes the run's deletion if it was interrupted, and removes the name of a run that does not exist."""
        finish_deletion(self._client, self._scripts, keys)
        self._client.hdel(self._dormant, name)
        if self._client.srem(self._runs, name) and self._client.exists(keys.config):
            # Another process has created a run of the name in the meantime.
            self._client.sadd(self._runs, name)
        self._known.pop(name, None)

    def set_dormant(self, name: str, description: bytes) -> None:
        log = self.owned(name)
        log.lose()
        with translated(self._client):
            self._client.hset(self._dormant, name, cast(Any, description))

    def dormant(self) -> list[str]:
        with translated(self._client):
            names = [name.decode() for name in cast(list[bytes], self._client.hkeys(self._dormant))]
            # A mark that was late, or that a failover brought back.
            if wrong := [name for name in names if (log := self._leases.get(name)) is not None and not log.is_lost]:
                self._client.hdel(self._dormant, *wrong)
        return [name for name in names if name not in wrong]

    def descriptions(self, names: Collection[str]) -> dict[str, bytes]:
        with translated(self._client):
            values = cast(list[bytes | None], self._client.hmget(self._dormant, list(names)))
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def sweep(self, names: Collection[str]) -> int:
        """Removes the unreferenced keys of runs that this process owns. Returns their number. Scans all keys of each
        server once, because after a takeover of many runs a scan for each would take too long."""
        by_server = dict[redis.Redis, dict[str, RedisRunLog]]()
        with translated(self._client):
            for log in filter(None, map(self._leases.get, names)):
                by_server.setdefault(server_of(self._client, log.keys.head), {})[log.keys.tag] = log
            return sum(
                unlink(self._client, (key for key in scan(server, f"{{{self._prefix}:") if _is_orphan(logs, key)))
                for server, logs in by_server.items()
            )

    def owned(self, name: str) -> RedisRunLog:
        """Returns the log of a run that this process owns. Raises UnavailableError if it does not own the run."""
        log = self._leases.get(name)
        if log is None:
            raise LogLostError(f"this process no longer owns run {name!r}; retry")
        return log

    def unhealthy_reason(self) -> str:
        return self._health.unhealthy_reason

    def unreachable_reason(self) -> str:
        return self._health.unreachable_reason

    def room(self) -> dict[str, tuple[int, int]]:
        """Returns the used memory and `maxmemory` of the fullest server; nothing if it has no limit."""
        return {"redis": self._health.memory} if self._health.memory[1] else {}

    def close(self) -> None:
        self._leases.close()

    @property
    def _runs(self) -> str:
        return f"{self._prefix}:runs"

    @property
    def _dormant(self) -> str:
        # A cluster stores it with the names, so that no other node has to answer when a run is opened.
        return f"{self._prefix}:dormant:{{{self._runs}}}"

    def _keys(self, name: str) -> RunKeys:
        return RunKeys(self._prefix, name)

    def _owner(self, name: str) -> Owner:
        """Returns this process as the owner of runs."""
        if (owner := self._leases.owner) is None:
            raise UnavailableError(f"run {name!r}: the service is starting; retry")
        return owner

    def _claim(self, name: str, keys: RunKeys, token: str) -> int:
        known = self._known.get(name, _Known())
        if known.elsewhere is not None and time.monotonic() < known.elsewhere_until:
            raise copy(known.elsewhere)
        owner, least = self._owner(name), int(time.time()) - _EPOCH
        claimed = self._scripts.claim(keys, token, owner, self._leases.lease_ms, least)
        if claimed is None:
            raise NotFoundError(f"run {name!r} does not exist in Redis; create it first")
        if isinstance(claimed, Owner):
            known = self._known.setdefault(name, _Known())
            known.elsewhere = OwnedElsewhereError(
                f"run {name!r} is owned by the process at {claimed.grpc_address}; call it, or retry",
                name,
                claimed.grpc_address,
                claimed.http_url,
                claimed.secret,
            )
            known.elsewhere_until = time.monotonic() + _OWNER_KNOWN_S
            self._report_acknowledged(known, keys)
            # A copy, because the cached error would keep the frames of its traceback alive.
            raise copy(known.elsewhere)
        return claimed

    def _report_acknowledged(self, known: _Known, keys: RunKeys) -> None:
        """Reports the last record that this process acknowledged to the run's owner. A log without that record was
        rolled back, which a new owner cannot detect by itself."""
        if known.acknowledged is None:
            return
        now = time.monotonic()
        if known.reported != known.acknowledged:
            known.reported, known.reports_until = known.acknowledged, now + _REPORT_S
        if now < known.reports_until:
            self._scripts.step(REPORT, keys, msgspec.json.encode(known.acknowledged))

    def _closed(self, name: str, log: RedisRunLog) -> None:
        if log.acknowledged is not None:
            self._known.setdefault(name, _Known()).acknowledged = log.acknowledged
        self._leases.discard(name, log)


def _is_orphan(logs: Mapping[str, RedisRunLog], key: bytes) -> bool:
    """Returns whether no record refers to the key, which belongs to a run's log by hash tag."""
    try:
        tag, parts = tag_and_parts(key)
        return tag in logs and logs[tag].is_orphan(*parts)
    except (ValueError, IndexError):
        # The key was not written by gristmill.
        return False


_log = structlog.get_logger(__name__)

_THREADS = 16
_LOOK_S = 0.5


class Leases:
    """The claims of this process. Renews their leases, and checks Redis' health, in background threads.

    The threads are separate, so that a renewal does not wait for other tasks: a timer, one for health, and one per
    Redis server with runs, so that a server that hangs affects only its own runs. Thread-safe.
    owner: this process; set once it is reachable.
    """

    def __init__(self, client: Client, scripts: Scripts, health: Health, lease_s: float) -> None:
        self.owner: Owner | None = None
        self._client, self._scripts, self._health, self._lease_s = client, scripts, health, lease_s
        self._logs: dict[str, RedisRunLog] = {}
        self._master: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._under_way: dict[object, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "gristmill-leases")
        self._timer = threading.Thread(target=self._keep, name="gristmill-leases", daemon=True)
        self._timer.start()

    @property
    def lease_ms(self) -> int:
        return int(1000 * self._lease_s)

    def get(self, name: str) -> RedisRunLog | None:
        """Returns the log of a run that this process has claimed."""
        return self._logs.get(name)

    def add(self, name: str, log: RedisRunLog, claimed_at: float) -> None:
        """Adds a claimed run. claimed_at: a time before the claim was requested."""
        log.renewed(claimed_at + self._lease_s)
        self._logs[name] = log

    def discard(self, name: str, log: RedisRunLog) -> None:
        if self._logs.get(name) is log:
            del self._logs[name]

    def close(self) -> None:
        self._stopped.set()
        self._timer.join()
        self._pool.shutdown()

    def _keep(self) -> None:
        renews_at, pause = time.monotonic() + self._lease_s / 3, min(self._lease_s / 3, _LOOK_S)
        while not self._stopped.wait(pause):
            self._start(self, self._look)
            if time.monotonic() >= renews_at:
                renews_at = time.monotonic() + self._lease_s / 3 - pause / 2
                self._renew_all()

    def _start(self, what: object, task: Callable[[], None]) -> None:
        """Starts a task, unless it is still running."""
        if what not in self._under_way or self._under_way[what].done():
            self._under_way[what] = self._pool.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # noqa: BLE001 - it runs again
            _log.exception("task failed", task="leases")

    def _renew_all(self) -> None:
        by_server = dict[redis.Redis, dict[str, RedisRunLog]]()
        for name, log in list(self._logs.items()):
            try:
                by_server.setdefault(server_of(self._client, log.keys.head), {})[name] = log
            except REDIS_ERRORS as error:
                # No node of the cluster has the run.
                _log.warning("lease not renewed", run=name, reason=str(error))
        for server, logs in by_server.items():
            self._start(server, partial(self._renew, server, logs))

    def _renew(self, server: redis.Redis, logs: dict[str, RedisRunLog]) -> None:
        """Renews the leases of runs on one server."""
        owner, asked = self.owner, time.monotonic()
        assert owner is not None, "a run was claimed"
        claims = [(log.keys, log.token, log.reaches) for log in logs.values()]
        try:
            with translated(self._client):
                answers = self._scripts.renew(server, owner, self.lease_ms, claims)
        except GristmillError as error:
            _log.warning("leases not renewed", runs=len(logs), reason=str(error))
            return
        for (name, log), answer in zip(logs.items(), answers, strict=True):
            if self._logs.get(name) is not log:
                # The run was closed or deleted in the meantime.
                continue
            if isinstance(answer, Exception):
                _log.warning("lease not renewed", run=name, reason=str(answer))
            elif answer[0] is Outcome.DONE:
                log.renewed(asked + self._lease_s)
                try:
                    log.compare(answer[1])
                except GristmillError as error:
                    _log.warning("report of a former owner not read", run=name, reason=str(error))
            else:
                log.lose()
                is_fenced = answer[0] is Outcome.FENCED
                event = "run taken over by another process" if is_fenced else "log behind the acknowledged position"
                _log.warning(event, run=name)

    def _look(self) -> None:
        """Checks health. Switches to a new master named by the sentinels, and checks the logs of leased runs there."""
        # If the sentinels do not answer, the next command reports the error.
        with suppress(redis.RedisError):
            before, self._master = self._master, watched_master(self._client)
            if before not in (None, self._master):
                _log.warning("Redis has another master", before=before, now=self._master)
                self._renew_all()
        self._health.refresh()
