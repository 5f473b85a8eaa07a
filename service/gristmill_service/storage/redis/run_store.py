"""The runs of a service that is several processes: in Redis, each decided by the one process that claimed it.

A claim is a lease that its owner renews. Whoever else is asked for the run learns where its owner is; when the lease
has run out, whoever asks first becomes the owner, and what the one before still sends is refused by its token.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from copy import copy
from typing import cast

import msgspec
import structlog

from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.storage.redis.leases import Leases
from gristmill_service.storage.redis.row_values import RowKeys, remove_all
from gristmill_service.storage.redis.run_log import Acknowledged, RedisRunLog
from gristmill_service.storage.redis.run_tables import RunTables
from gristmill_service.storage.redis.scripts import ControlKeys, Owner, Scripts
from gristmill_service.storage.redis.servers.connection import Client, translated
from gristmill_service.storage.redis.servers.durability import SERVER_ALONE, Durability
from gristmill_service.storage.redis.servers.server_health import Health
from gristmill_service.storage.run_configs import check_config
from gristmill_service.storage.run_store import LogLostError, OwnedElsewhereError

_log = structlog.get_logger(__name__)

_FORMAT = 1
# A learned owner is trusted for so long: a call that reaches the wrong process is refused there.
_OWNER_KNOWN_S = 0.5
_CHECK_S = 1.0
# A former owner reports again for so long: Redis may lose a report, and its reader may die.
_REPORT_S = 30.0
# Claims are numbered by the second in which they are made, counted from 2020.
_EPOCH = 1_577_836_800


class _Description(msgspec.Struct, frozen=True):
    """nonce: tells this run from one of the same name that was deleted before."""

    format: int
    nonce: str
    config: str


class RedisRunStore:
    """See `gristmill_service.storage.run_store.RunStore`. The client stays the caller's to close.

    lease_s: how long the owner of a run may be silent before another process takes the run over.
    durability: the copies that a record must have before its append returns.
    """

    is_shared = True

    def __init__(self, client: Client, prefix: str, lease_s: float, durability: Durability = SERVER_ALONE) -> None:
        self.client, self._client, self._prefix, self._durability = client, client, prefix, durability
        self._scripts = Scripts(client, durability)
        self._process = secrets.token_hex(8)
        self._leases = Leases(client, self._scripts, prefix, lease_s)
        self._elsewhere: dict[str, tuple[OwnedElsewhereError, float]] = {}
        # By run: what this process had acknowledged of those that it has had.
        self._acknowledged: dict[str, Acknowledged] = {}
        # By run: what this process reports of it, and until when; what others reported to it.
        self._reported: dict[str, tuple[Acknowledged, float]] = {}
        self._compared: dict[str, set[Acknowledged]] = {}
        self._health = Health(client, prefix, durability)
        self._stopped = threading.Event()
        self._checker = threading.Thread(
            target=self._check_health, args=(min(lease_s / 3, _CHECK_S),), name="gristmill-redis-health", daemon=True
        )
        self._checker.start()

    def advertise(self, grpc_address: str, http_url: str, secret: str = "") -> None:
        """Says where other processes reach this one, and what they show it there. Runs are claimed from now on."""
        self._leases.owner = Owner(self._process, grpc_address, http_url, secret)

    def names(self) -> list[str]:
        if self._leases.owner is None:
            return []
        with translated(self._client):
            return sorted(name.decode() for name in cast(set[bytes], self._client.smembers(self._runs)))

    def create(self, name: str, config: bytes) -> RedisRunLog:
        check_config(name, config)
        description = _Description(_FORMAT, secrets.token_hex(8), config.decode())
        with translated(self._client):
            # Named first: a name without a run is nothing, a run without a name would be forgotten.
            self._client.sadd(self._runs, name)
            if not self._scripts.create(self._keys(name), msgspec.json.encode(description)):
                raise AlreadyExistsError(f"run {name!r} exists in Redis")
        return self.open(name)

    def open(self, name: str) -> RedisRunLog:
        """Raises OwnedElsewhereError where another process has the run."""
        keys, token, asked = self._keys(name), secrets.token_hex(8), time.monotonic()
        claim = self._claim(name, keys, token)
        with translated(self._client):
            described = cast(bytes | None, self._client.get(keys.config))
            # A failover of another node of a cluster may have made that one forget it.
            self._client.sadd(self._runs, name)
        if described is None:
            raise NotFoundError(f"run {name!r} is not in Redis")
        description = msgspec.json.decode(described, type=_Description)
        if description.format > _FORMAT:
            self._scripts.release(keys, token)
            raise InvalidArgumentError(
                f"run {name!r} has format {description.format} in Redis and this version reads up to {_FORMAT}; use a "
                "newer gristmill"
            )
        run_id = description.nonce
        log = RedisRunLog(
            self._client,
            self._scripts,
            keys,
            RunTables(self._client, RowKeys(self._prefix, name, run_id), claim, self._durability),
            self._health,
            config=description.config.encode(),
            run_id=run_id,
            token=token,
            before=self._acknowledged_of(name, run_id),
            compared=self._compared.setdefault(name, set()),
        )
        log.on_close = lambda: self._closed(name, log)
        self._leases.add(name, log, asked)
        _log.info("run claimed", run=name, claim=claim)
        return log

    def delete(self, name: str) -> None:
        """Raises OwnedElsewhereError where another process has the run."""
        log, keys = self._leases.get(name), self._keys(name)
        token = self._claimed_for_deletion(name, keys) if log is None else log.token
        with translated(self._client):
            if not self._scripts.delete(keys, token):
                if log is not None:
                    log.lose()
                raise LogLostError(f"another replica decides for run {name!r} by now; ask again")
            remove_all(self._client, self._prefix, name)
            self._scripts.forget(keys)
            self._client.srem(self._runs, name)
        if log is not None:
            log.on_close = lambda: self._leases.discard(name, log)
        self._acknowledged.pop(name, None)
        self._reported.pop(name, None)
        self._compared.pop(name, None)

    def claim(self, run: str) -> int:
        """See `gristmill_service.storage.redis.shards.shard_store.Fence`."""
        log = self._leases.get(run)
        return 0 if log is None else log.claim

    def replace(self, run: str, key: str, value: bytes) -> bytes:
        """See `gristmill_service.storage.redis.shards.shard_store.Fence`."""
        with translated(self._client):
            return _allowed(self._scripts.publish(self._keys(run), self._token(run), key, value), run)

    def remove(self, run: str, key: str) -> bytes:
        with translated(self._client):
            return _allowed(self._scripts.withdraw(self._keys(run), self._token(run), key), run)

    def unhealthy_reason(self) -> str:
        return self._health.unhealthy_reason

    def unreachable_reason(self) -> str:
        return self._health.unreachable_reason

    def room(self) -> dict[str, tuple[int, int]]:
        """Bytes used of the fullest server's memory, and its `maxmemory`; nothing where it has none."""
        return {"redis": self._health.memory} if self._health.memory[1] else {}

    def close(self) -> None:
        self._stopped.set()
        self._leases.close()
        self._checker.join()

    @property
    def _runs(self) -> str:
        return f"{self._prefix}:runs"

    def _keys(self, name: str) -> ControlKeys:
        return ControlKeys(self._prefix, name)

    def _claim(self, name: str, keys: ControlKeys, token: str) -> int:
        known = self._elsewhere.get(name)
        if known is not None and time.monotonic() < known[1]:
            raise copy(known[0])
        owner = self._leases.owner
        if owner is None:
            raise UnavailableError(f"run {name!r}: the service is starting; ask again")
        with translated(self._client):
            claimed = self._scripts.claim(keys, token, owner, self._leases.lease_ms, int(time.time()) - _EPOCH)
        if claimed is None:
            raise NotFoundError(f"run {name!r} is not in Redis")
        if isinstance(claimed, Owner):
            elsewhere = OwnedElsewhereError(
                f"run {name!r} is decided by the process at {claimed.grpc_address}; ask there, or again",
                name,
                claimed.grpc_address,
                claimed.http_url,
                claimed.secret,
            )
            self._elsewhere[name] = elsewhere, time.monotonic() + _OWNER_KNOWN_S
            self._report_acknowledged(name, keys)
            # A copy: the one that is stored would hold on to the frames of all whom it was raised through.
            raise copy(elsewhere)
        return claimed

    def _claimed_for_deletion(self, name: str, keys: ControlKeys) -> str:
        """The token of a run that this process has not opened, as where it cannot be read."""
        token = secrets.token_hex(8)
        with suppress(NotFoundError):
            # Of a run that is half deleted, the rest goes.
            self._claim(name, keys, token)
        return token

    def _token(self, run: str) -> str:
        """The token that this process has to name to change the run; nobody's, where it is not the owner."""
        log = self._leases.get(run)
        return "-" if log is None else log.token

    def _acknowledged_of(self, name: str, run_id: str) -> Acknowledged | None:
        log = self._leases.get(name)
        found = self._acknowledged.get(name) if log is None else log.acknowledged
        return found if found is not None and found.run_id == run_id else None

    def _report_acknowledged(self, name: str, keys: ControlKeys) -> None:
        """Reports to the run's owner what this process had acknowledged before: a log without it was rolled back, which
        an owner that took the run over after a failover cannot know."""
        found, now = self._acknowledged.get(name), time.monotonic()
        if found is None:
            return
        reported, until = self._reported.get(name, (None, 0.0))
        if reported != found:
            until = now + _REPORT_S
            self._reported[name] = found, until
        if now < until:
            with translated(self._client):
                self._scripts.report(keys, msgspec.json.encode(found))

    def _closed(self, name: str, log: RedisRunLog) -> None:
        if log.acknowledged is not None:
            self._acknowledged[name] = log.acknowledged
        self._leases.discard(name, log)

    def _check_health(self, pause_s: float) -> None:
        while not self._stopped.wait(pause_s):
            self._health.refresh()


def _allowed(found: bytes | None, run: str) -> bytes:
    if found is None:
        raise LogLostError(f"another replica decides for run {run!r} by now; ask again")
    return found
