"""The ledger of a service that is several processes: runs in Redis, each decided by the one process that claimed it.

A claim is a lease that its owner renews. Whoever else is asked for the run learns where its owner is; when the lease
has run out, whoever asks first becomes the owner, and what the one before still sends is refused by its token.
"""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import cast

import msgspec
import structlog

from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.storage.redis.connection import Client, translated
from gristmill_service.storage.redis.row_values import RowKeys, remove_all
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.scripts import ControlKeys, Owner, Scripts
from gristmill_service.storage.redis.server_health import Health
from gristmill_service.storage.run_configs import check_config
from gristmill_service.storage.run_store import LogLostError, OwnedElsewhereError

_log = structlog.get_logger(__name__)

_FORMAT = 1
# A learned owner is trusted for so long: a call that reaches the wrong process is refused there.
_OWNER_KNOWN_S = 0.5
_RENEWERS = 16
_LOOK_S = 1.0


class _Description(msgspec.Struct, frozen=True):
    """nonce: tells this run from one of the same name that was deleted before."""

    format: int
    nonce: str
    config: str


class RedisRunStore:
    """See `gristmill_service.storage.run_store.RunStore`. The client stays the caller's to close.

    lease_s: how long the owner of a run may be silent before another process takes the run over.
    """

    is_shared = True

    def __init__(self, client: Client, prefix: str, lease_s: float) -> None:
        self._client, self._prefix, self._lease_s = client, prefix, lease_s
        self._scripts = Scripts(client)
        self._owner: Owner | None = None
        self._process = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._books: dict[str, RedisRunLog] = {}
        self._elsewhere: dict[str, tuple[OwnedElsewhereError, float]] = {}
        self._health = Health(client, prefix)
        self._stopped = threading.Event()
        self._renewer = threading.Thread(target=self._keep_leases, name="gristmill-leases", daemon=True)
        self._looker = threading.Thread(target=self._look, name="gristmill-redis-health", daemon=True)
        self._renewer.start()
        self._looker.start()

    def advertise(self, grpc_address: str, http_url: str) -> None:
        """Where other processes reach this one. Runs are claimed from now on."""
        self._owner = Owner(self._process, grpc_address, http_url)

    def names(self) -> list[str]:
        if self._owner is None:
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
        known = self._elsewhere.get(name)
        if known is not None and time.monotonic() < known[1]:
            raise copy(known[0])
        if self._owner is None:
            raise UnavailableError(f"run {name!r}: the service is starting; ask again")
        keys, token, asked = self._keys(name), secrets.token_hex(8), time.monotonic()
        with translated(self._client):
            claimed = self._scripts.claim(keys, token, self._owner, self._lease_ms)
            if claimed is None:
                raise NotFoundError(f"run {name!r} is not in Redis")
            if isinstance(claimed, Owner):
                elsewhere = OwnedElsewhereError(
                    f"run {name!r} is decided by the process at {claimed.grpc_address}; ask there, or again",
                    name,
                    claimed.grpc_address,
                    claimed.http_url,
                )
                self._elsewhere[name] = elsewhere, time.monotonic() + _OWNER_KNOWN_S
                # A copy: the one that is kept would hold on to the frames of all whom it was raised through.
                raise copy(elsewhere)
            described = cast(bytes | None, self._client.get(keys.config))
        if described is None:
            raise NotFoundError(f"run {name!r} is not in Redis")
        description = msgspec.json.decode(described, type=_Description)
        if description.format > _FORMAT:
            self._scripts.release(keys, token)
            raise InvalidArgumentError(
                f"run {name!r} has format {description.format} in Redis and this version reads up to {_FORMAT}; use a "
                "newer gristmill"
            )
        rows = RowKeys(self._prefix, name, description.nonce)
        config = description.config.encode()
        book = RedisRunLog(self._client, self._scripts, keys, rows, config, token, claimed, self._health)
        book.owned_until = asked + self._lease_s
        book.on_close = lambda: self._released(name, book)
        with self._lock:
            self._books[name] = book
        _log.info("run claimed", run=name, claim=claimed)
        return book

    def delete(self, name: str) -> None:
        with self._lock:
            book = self._books.get(name)
        keys = self._keys(name)
        with translated(self._client):
            if book is not None and not self._scripts.delete(keys, book.token):
                book.owned_until = 0.0
                raise LogLostError(f"another replica decides for run {name!r} by now; ask again")
            remove_all(self._client, self._prefix, name)
            self._scripts.forget(keys)
            self._client.srem(self._runs, name)

    def claim(self, run: str) -> int:
        """See `gristmill_service.storage.redis.shard_store.Fence`."""
        with self._lock:
            book = self._books.get(run)
        return 0 if book is None else book.claim

    def replace(self, run: str, key: str, value: bytes) -> bytes:
        """See `gristmill_service.storage.redis.shard_store.Fence`."""
        with translated(self._client):
            return _allowed(self._scripts.publish(self._keys(run), self._token(run), key, value), run)

    def remove(self, run: str, key: str) -> bytes:
        with translated(self._client):
            return _allowed(self._scripts.withdraw(self._keys(run), self._token(run), key), run)

    def _token(self, run: str) -> str:
        """What this process has to name to change the run; nobody's, where it is not the owner."""
        with self._lock:
            book = self._books.get(run)
        return "-" if book is None else book.token

    def unhealthy_reason(self) -> str:
        return self._health.trouble

    def unreachable_reason(self) -> str:
        return self._health.silence

    def room(self) -> dict[str, tuple[int, int]]:
        """Bytes used of the fullest server's memory, and its `maxmemory`; nothing where it has none."""
        return {"redis": self._health.memory} if self._health.memory[1] else {}

    def close(self) -> None:
        self._stopped.set()
        self._renewer.join()
        self._looker.join()

    @property
    def _runs(self) -> str:
        return f"{self._prefix}:runs"

    @property
    def _lease_ms(self) -> int:
        return int(1000 * self._lease_s)

    def _keys(self, name: str) -> ControlKeys:
        return ControlKeys(self._prefix, name)

    def _released(self, name: str, book: RedisRunLog) -> None:
        with self._lock:
            if self._books.get(name) is book:
                del self._books[name]

    def _keep_leases(self) -> None:
        """Each run's own thread, as far as there are some: one that hangs must not cost the others their runs."""
        with ThreadPoolExecutor(_RENEWERS, "gristmill-lease") as pool:
            under_way: dict[RedisRunLog, Future[None]] = {}
            while not self._stopped.wait(self._lease_s / 3):
                with self._lock:
                    books = dict(self._books)
                under_way = {book: renewal for book, renewal in under_way.items() if not renewal.done()}
                for name, book in books.items():
                    if book not in under_way:
                        under_way[book] = pool.submit(self._renew, name, book)

    def _renew(self, name: str, book: RedisRunLog) -> None:
        owner, asked = self._owner, time.monotonic()
        assert owner is not None, "a run was claimed"
        try:
            with translated(self._client):
                is_ours = self._scripts.renew(self._keys(name), book.token, owner, self._lease_ms)
        except UnavailableError as error:
            _log.warning("lease not renewed", run=name, reason=str(error))
        except Exception:  # noqa: BLE001 - there is a next time
            _log.exception("lease not renewed", run=name)
        else:
            if not is_ours:
                _log.warning("run taken over by another process", run=name)
            book.owned_until = asked + self._lease_s if is_ours else 0.0

    def _look(self) -> None:
        while not self._stopped.wait(min(self._lease_s / 3, _LOOK_S)):
            self._health.look()


def _allowed(found: bytes | None, run: str) -> bytes:
    if found is None:
        raise LogLostError(f"another replica decides for run {run!r} by now; ask again")
    return found
