"""Published batches in Redis, one server or a cluster: shards without their padding, in values of a few MiB.

A batch is visible once its index is there, which is written last and removed first. What it is made of has keys of its
publication alone, so that two publications of a batch never mix; one that died half way leaves keys that nothing names,
and that go with the run. One process at a time publishes and frees a run's batches.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple, Protocol, cast

import msgspec
import redis

from gristmill._wire.compact_shards import restore
from gristmill.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError, UnavailableError
from gristmill_service.config import Model
from gristmill_service.pipeline.iovec import cut, join
from gristmill_service.pipeline.shard_address import ShardAddress
from gristmill_service.storage.redis.connection import Client, translated
from gristmill_service.storage.redis.shard_keys import ShardKeys
from gristmill_service.storage.shard_store import ShardLocation, ShardSource

VERSION = 1

# Of a value in Redis: small enough that it answers others in between.
VALUE_BYTES = 8 << 20

_READ_BYTES = 1 << 20
_KEYS_AT_ONCE = 500
_MOST_SEEN = 256

# One packs while the other one's bytes are on their way.
_WRITERS = 2


class _StoredShard(msgspec.Struct, frozen=True, array_like=True):
    model: Model
    mini_batch: int
    rank: int
    size: int
    compact_size: int
    pieces: int

    @property
    def address(self) -> ShardAddress:
        return ShardAddress(self.model, self.mini_batch, self.rank)


class _Index(msgspec.Struct, frozen=True):
    """nonce: of the publication, in the keys of what it is made of."""

    nonce: str
    shards: tuple[_StoredShard, ...]


class _Seen(NamedTuple):
    """An index as it was read last."""

    raw: bytes
    found: _Index
    shards: dict[ShardAddress, _StoredShard]


class _ReplacedError(UnavailableError):
    """The batch was published anew while it was read."""


class Fence(Protocol):
    """Changes a run's keys where this process may, all at once. Raises UnavailableError where it is not the owner."""

    def replace(self, run: str, key: str, value: bytes) -> bytes:
        """Returns the value before, empty where there was none. May be repeated."""

    def remove(self, run: str, key: str) -> bytes: ...


class RedisShardStore:
    """See `gristmill_service.storage.shard_store.ShardStore`; what is published outlives this process.

    client: without `decode_responses`; stays the caller's to close. Every method raises what `translated` does,
    UnavailableError when Redis cannot be reached for instance; all of them may be tried again.
    """

    def __init__(self, client: Client, fence: Fence, prefix: str = "gristmill") -> None:
        self._client, self._fence, self._prefix = client, fence, prefix
        # Keys of publications that ended half way, or were replaced or freed, and are not removed yet.
        self._left: list[str] = []
        self._seen: dict[tuple[str, int], _Seen] = {}

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        """As the protocol has it; replaces the batch where it is there. Returns the bytes of the compact forms and the
        plan. Raises ResourceExhaustedError when Redis is full."""
        keys, nonce, written = self._keys(run), secrets.token_hex(8), list[str]()
        with translated(self._client):
            try:
                stored = self._write_shards(keys, nonce, shards, written)
                self._write(keys.plan(nonce), plan, written)
                index = bytes([VERSION]) + msgspec.msgpack.encode(_Index(nonce, stored))
                replaced = self._fence.replace(run, keys.index(batch), index)
            except BaseException as error:
                self._left += written
                with suppress(Exception):
                    self._undo(run, batch, nonce)
                if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error):
                    raise ResourceExhaustedError(
                        f"run {run!r}: batch {batch} does not fit into Redis, which is full; raise its maxmemory, or "
                        "lower max_buffered_batches"
                    ) from error
                raise
        # The batch is published; what cannot be removed now is removed later.
        self._left += _keys_of(keys, _parsed(replaced, batch)) if replaced else []
        with suppress(redis.RedisError, redis.exceptions.RedisClusterException):
            self._remove_left()
        return len(plan) + sum(shard.compact_size for shard in stored)

    def plan(self, run: str, batch: int) -> bytes:
        keys = self._keys(run)
        while True:
            index = self._index(run, batch)
            try:
                return self._get(run, batch, index, keys.plan(index.nonce))
            except _ReplacedError:
                continue

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        return ShardLocation(_of(self._look(run, batch), run, batch, address).size, None)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Holds the whole shard: only its compact form comes in pieces."""
        while True:
            try:
                data = restore(list(self.read_compact(run, batch, address)))
            except _ReplacedError:
                continue
            return (data[start : start + _READ_BYTES].tobytes() for start in range(0, len(data), _READ_BYTES))

    def read_compact(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Its compact form, in pieces of at most 8 MiB. Looking further raises NotFoundError once the batch is freed,
        and UnavailableError where it is published anew meanwhile."""
        keys, seen, first = self._keys(run), self._seen.get((run, batch)), None
        if seen is None or address not in seen.shards:
            seen = self._look(run, batch)
        else:
            # The index is asked for again, lest the batch was published anew, and the first piece with it.
            with translated(self._client):
                raw, first = self._get_both(keys.index(batch), keys.piece(seen.found.nonce, address, 0))
            if raw != seen.raw:
                seen, first = self._look(run, batch), None
        names = _piece_keys(keys, seen.found.nonce, _of(seen, run, batch, address))
        rest = (self._get(run, batch, seen.found, name) for name in (names if first is None else names[1:]))
        return rest if first is None else chain([first], rest)

    def free(self, run: str, batch: int) -> None:
        keys = self._keys(run)
        with translated(self._client):
            removed = self._fence.remove(run, keys.index(batch))
            self._left += _keys_of(keys, _parsed(removed, batch)) if removed else []
            self._remove_left()

    def delete_run(self, run: str) -> None:
        with translated(self._client):
            for pattern in self._keys(run).patterns:
                found = self._client.scan_iter(match=pattern, count=_KEYS_AT_ONCE)
                while some := list(islice(found, _KEYS_AT_ONCE)):
                    self._unlink(some)

    def close(self) -> None:
        """Leaves all that is published to the other replicas."""

    def _keys(self, run: str) -> ShardKeys:
        return ShardKeys(self._prefix, run)

    def _write_shards(
        self, keys: ShardKeys, nonce: str, shards: Iterable[ShardSource], written: list[str]
    ) -> tuple[_StoredShard, ...]:
        def write(shard: ShardSource) -> _StoredShard:
            runs, address, pieces = shard.compact(), shard.address, 0
            for part in cut(runs, VALUE_BYTES):
                self._write(keys.piece(nonce, address, pieces), join(part), written)
                pieces += 1
            size = int(runs[:, 1].sum())
            return _StoredShard(address.model, address.mini_batch, address.rank, shard.size, size, pieces)

        with ThreadPoolExecutor(_WRITERS, "gristmill-writer") as pool:
            return tuple(pool.map(write, shards))

    def _write(self, key: str, value: bytes, written: list[str]) -> None:
        # Noted before: a write whose answer is lost may have been made.
        written.append(key)
        self._client.set(key, value)

    def _undo(self, run: str, batch: int, nonce: str) -> None:
        index = self._find(self._keys(run), batch)
        if index is not None and index.nonce == nonce:
            self._fence.remove(run, self._keys(run).index(batch))
        self._remove_left()

    def _remove_left(self) -> None:
        """Removes what nothing names any more."""
        while self._left:
            some = self._left[-_KEYS_AT_ONCE:]
            self._unlink(some)
            del self._left[-len(some) :]

    def _unlink(self, keys: Sequence[str | bytes]) -> None:
        """On a cluster, each on the node that has it."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            self._client.unlink(*keys[start : start + _KEYS_AT_ONCE])

    def _find(self, keys: ShardKeys, batch: int) -> _Index | None:
        found = cast(bytes | None, self._client.get(keys.index(batch)))
        return None if found is None else _parsed(found, batch)

    def _get_both(self, one: str, other: str) -> list[bytes | None]:
        """In one round trip; on a cluster, which may have them on two nodes, in one each."""
        client = self._client
        found = client.mget_nonatomic(one, other) if isinstance(client, redis.RedisCluster) else client.mget(one, other)
        return cast(list[bytes | None], found)

    def _look(self, run: str, batch: int) -> _Seen:
        """The index as it is now. Raises NotFoundError where there is none."""
        with translated(self._client):
            raw = cast(bytes | None, self._client.get(self._keys(run).index(batch)))
        if raw is None:
            self._seen.pop((run, batch), None)
            raise NotFoundError(f"run {run!r}: batch {batch} is not published, or freed already")
        index = _parsed(raw, batch)
        seen = _Seen(raw, index, {shard.address: shard for shard in index.shards})
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[run, batch] = seen
        return seen

    def _index(self, run: str, batch: int) -> _Index:
        return self._look(run, batch).found

    def _get(self, run: str, batch: int, index: _Index, key: str) -> bytes:
        with translated(self._client):
            value = cast(bytes | None, self._client.get(key))
        if value is not None:
            return value
        if self._index(run, batch).nonce != index.nonce:
            raise _ReplacedError(f"run {run!r}: batch {batch} was published anew while it was read; read it again")
        raise FailedPreconditionError(
            f"run {run!r}: Redis has lost a part of batch {batch}, {key}; it must not evict keys: set its "
            "maxmemory-policy to noeviction"
        )


def _of(seen: _Seen, run: str, batch: int, address: ShardAddress) -> _StoredShard:
    shard = seen.shards.get(address)
    if shard is None:
        raise NotFoundError(f"run {run!r}: batch {batch} has no shard {address.path}")
    return shard


def _parsed(index: bytes, batch: int) -> _Index:
    if index[0] != VERSION:
        raise FailedPreconditionError(
            f"batch {batch} was published by a gristmill whose format has version {index[0]}, and this one reads "
            f"version {VERSION}; upgrade it"
        )
    return msgspec.msgpack.decode(memoryview(index)[1:], type=_Index)


def _piece_keys(keys: ShardKeys, nonce: str, shard: _StoredShard) -> list[str]:
    return [keys.piece(nonce, shard.address, number) for number in range(shard.pieces)]


def _keys_of(keys: ShardKeys, index: _Index) -> list[str]:
    """What a batch is made of."""
    pieces = [key for shard in index.shards for key in _piece_keys(keys, index.nonce, shard)]
    return [keys.plan(index.nonce), *pieces]
