"""Published batches in Redis, one server or a cluster: shards in frames of zstd, one a value, whose checksums say when
one is damaged.

A batch is visible once its index is there, which is written last and removed first. Its other keys hold the nonce of
their publication, so that two publications of a batch never mix. A process that dies in a publication leaves keys that
no index names; the next owner of the run sweeps them. One process at a time publishes and frees a run's batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast

import redis
import structlog

from gristmill._wire.codecs.zstd_frames import FRAME_BYTES, DamagedFrameError, compressed, decompressed
from gristmill.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError, UnavailableError
from gristmill_service.pipeline.layout.iovec import coalesced, cut, join
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.settings import Settings
from gristmill_service.storage.redis.key_removals import KeyRemovals
from gristmill_service.storage.redis.row_values import unlink
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.servers.connection import Client, translated
from gristmill_service.storage.redis.shards.publications import Publications, is_left_behind
from gristmill_service.storage.redis.shards.shard_index import ShardIndex, StoredShard
from gristmill_service.storage.redis.shards.shard_keys import ShardKeys
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardLocation, ShardsLostError, ShardSource, ShardStore

_log = structlog.get_logger(__name__)

# What a plan may grow to when it is read: a damaged frame may say anything.
_MOST_PLAN_BYTES = 1 << 30
_KEYS_AT_ONCE = 500
_MOST_INDEXES = 256

# One packs while the other one's bytes are on their way.
_WRITERS = 2

_REDIS_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException)


@dataclass(frozen=True, slots=True)
class _ReadIndex:
    """An index as it was read last."""

    raw: bytes
    index: ShardIndex
    shards: dict[ShardAddress, StoredShard]


class _ReplacedError(UnavailableError):
    """The batch was published anew while it was read."""


class Fence(Protocol):
    """Changes a run's keys where this process may, all at once. Raises UnavailableError where it is not the owner."""

    def claim(self, run: str) -> int:
        """How often the run was claimed when this process claimed it; 0 where it is not the owner. Never raises."""

    def replace(self, run: str, key: str, value: bytes) -> bytes:
        """Returns the value before, empty where there was none. May be repeated."""

    def remove(self, run: str, key: str) -> bytes:
        """Returns the value before, empty where there was none. May be repeated."""


def open_shards(settings: Settings, runs: RunStore) -> ShardStore:
    assert isinstance(runs, RedisRunStore), "checked with the settings"
    return RedisShardStore(runs.client, runs, settings.redis_prefix)


class RedisShardStore:
    """See `gristmill_service.storage.shard_store.ShardStore`; what is published outlives this process.

    client: without `decode_responses`; stays the caller's to close. Every method may be tried again.
    """

    def __init__(self, client: Client, fence: Fence, prefix: str = "gristmill") -> None:
        self._client, self._fence, self._prefix = client, fence, prefix
        self._removals, self._publications = KeyRemovals(client), Publications()
        self._indexes: dict[tuple[str, int], _ReadIndex] = {}
        # Keys of failed publications that an index may name, for all that is known: they go when that is replaced.
        self._doubtful: dict[tuple[str, int], list[str]] = {}
        self._doubtful_lock = threading.Lock()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        """As the protocol has it; replaces the batch where it is there. Returns the bytes that the shards and
        the plan take compressed."""
        keys, written = self._keys(run), list[str]()
        with self._publications.begin(lambda: self._own_claim(run)) as nonce, self._explained():
            try:
                stored = self._write_shards(keys, nonce, shards, written)
                stored_plan = compressed(plan)
                self._write(keys.plan(nonce), stored_plan, written)
                replaced = self._fence.replace(run, keys.index(batch), ShardIndex(nonce, stored).encode())
            except BaseException as error:
                self._withdraw(run, batch, nonce, written)
                if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error):
                    raise ResourceExhaustedError(
                        f"run {run!r}: batch {batch} does not fit into Redis, which is full; raise its maxmemory, or "
                        "lower max_buffered_batches"
                    ) from error
                raise
        # The batch is published; what cannot be removed now is removed later.
        self._add_removals(run, batch, replaced)
        with suppress(*_REDIS_ERRORS):
            self._removals.run()
        return len(stored_plan) + sum(shard.stored_size for shard in stored)

    def plan(self, run: str, batch: int) -> bytes:
        keys = self._keys(run)
        while True:
            index = self._read_index(run, batch).index
            try:
                plan = self._get(run, batch, index, keys.plan(index.nonce))
            except _ReplacedError:
                continue
            return _content(plan, _MOST_PLAN_BYTES, run, batch)

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        return ShardLocation(_shard(self._read_index(run, batch), run, batch, address).size, None)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Holds the whole shard, compressed. Raises ShardsLostError where a part of it is damaged."""
        while True:
            try:
                frames = list(self.read_frames(run, batch, address))
            except _ReplacedError:
                continue
            return (_content(frame, FRAME_BYTES, run, batch) for frame in frames)

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """The iterator raises NotFoundError once the batch is freed, and UnavailableError where it is published anew
        meanwhile."""
        keys, known, first = self._keys(run), self._indexes.get((run, batch)), None
        if known is None or address not in known.shards:
            known = self._read_index(run, batch)
        else:
            # The index is asked for again, lest the batch was published anew, and the first piece with it.
            with self._explained():
                raw, first = self._get_both(keys.index(batch), keys.piece(known.index.nonce, address, 0))
            if raw != known.raw:
                known, first = self._read_index(run, batch), None
        names = _shard(known, run, batch, address).keys(keys, known.index.nonce)
        rest = (self._get(run, batch, known.index, name) for name in (names if first is None else names[1:]))
        return rest if first is None else chain([first], rest)

    def free(self, run: str, batch: int) -> None:
        with self._explained():
            self._add_removals(run, batch, self._fence.remove(run, self._keys(run).index(batch)))
            self._removals.run()

    def delete_run(self, run: str) -> None:
        keys = self._keys(run)
        with self._explained():
            for pattern in (keys.indexes, keys.pieces):
                unlink(self._client, self._scan(pattern))
        with self._doubtful_lock:
            for place in [place for place in self._doubtful if place[0] == run]:
                del self._doubtful[place]

    def sweep(self, run: str) -> None:
        """Never removes a key of a publication under this process's claim of the run, or a later one: what an earlier
        claim has not made visible by now can never become visible, because the claim ended its right to."""
        keys, claim, under_way = self._keys(run), self._fence.claim(run), self._publications.under_way()
        with self._explained():
            self._removals.run()
            named = {index.nonce for index in self._all_indexes(keys)}
            pieces = ((key, keys.nonce_of(key)) for key in self._scan(keys.pieces))
            count = unlink(
                self._client,
                (key for key, nonce in pieces if nonce not in named and is_left_behind(nonce, claim, under_way)),
            )
        if count:
            _log.info("leftovers of unfinished publications removed", run=run, keys=count)

    def close(self) -> None:
        """Leaves all that is published to the other replicas."""

    def _keys(self, run: str) -> ShardKeys:
        return ShardKeys(self._prefix, run)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns all of Redis' errors into gristmill's."""
        try:
            with translated(self._client):
                yield
        except _REDIS_ERRORS as error:
            raise FailedPreconditionError(
                f"Redis refuses a command on shards: {error}; check the keys under {self._prefix!r}, and that no other "
                "program writes there"
            ) from error

    def _own_claim(self, run: str) -> int:
        """Raises UnavailableError where this process is not the run's owner: no publication of its can succeed."""
        if not (claim := self._fence.claim(run)):
            raise UnavailableError(f"run {run!r} is not decided by this process any more; ask again")
        return claim

    def _write_shards(
        self, keys: ShardKeys, nonce: str, shards: Iterable[ShardSource], written: list[str]
    ) -> tuple[StoredShard, ...]:
        def write(shard: ShardSource) -> StoredShard:
            address, pieces, size = shard.address, 0, 0
            for part in cut(coalesced(shard.iovec()), FRAME_BYTES):
                frame = compressed(join(part))
                self._write(keys.piece(nonce, address, pieces), frame, written)
                pieces, size = pieces + 1, size + len(frame)
            return StoredShard(address.model, address.mini_batch, address.rank, shard.size, size, pieces)

        with ThreadPoolExecutor(_WRITERS, "gristmill-redis-writer") as pool:
            return tuple(pool.map(write, shards))

    def _write(self, key: str, value: bytes, written: list[str]) -> None:
        # Noted before: a write whose answer is lost may have been made.
        written.append(key)
        self._client.set(key, value)

    def _withdraw(self, run: str, batch: int, nonce: str, written: list[str]) -> None:
        """Removes what a failed publication has written, where it is certain that no index names it. Never raises."""
        keys = self._keys(run)
        try:
            found = cast(bytes | None, self._client.get(keys.index(batch)))
            if found is not None and ShardIndex.decode(found, batch).nonce == nonce:
                self._fence.remove(run, keys.index(batch))
        except Exception as error:  # noqa: BLE001 - the publication's own error is the one to raise
            _log.warning("a failed publication is removed later", run=run, batch=batch, reason=str(error))
            with self._doubtful_lock:
                self._doubtful.setdefault((run, batch), []).extend(written)
            return
        self._removals.add(written)
        with suppress(Exception):
            self._removals.run()

    def _add_removals(self, run: str, batch: int, index: bytes) -> None:
        """Has all removed that an index named, which is replaced or removed now."""
        with self._doubtful_lock:
            self._removals.add(self._doubtful.pop((run, batch), []))
        if index:
            try:
                self._removals.add(ShardIndex.decode(index, batch).keys(self._keys(run)))
            except FailedPreconditionError as error:
                _log.warning("pieces of a batch stay until the run is deleted", run=run, batch=batch, reason=str(error))

    def _scan(self, pattern: str) -> Iterator[bytes]:
        return cast(Iterator[bytes], self._client.scan_iter(match=pattern, count=_KEYS_AT_ONCE))

    def _all_indexes(self, keys: ShardKeys) -> Iterator[ShardIndex]:
        for key in self._scan(keys.indexes):
            found = cast(bytes | None, self._client.get(key))
            if found is not None:
                yield ShardIndex.decode(found, keys.batch_of(key))

    def _get_both(self, one: str, other: str) -> list[bytes | None]:
        """In one round trip; on a cluster, which may have them on two nodes, in one each."""
        client = self._client
        found = client.mget_nonatomic(one, other) if isinstance(client, redis.RedisCluster) else client.mget(one, other)
        return cast(list[bytes | None], found)

    def _read_index(self, run: str, batch: int) -> _ReadIndex:
        """The index as it is now. Raises NotFoundError where there is none."""
        with self._explained():
            raw = cast(bytes | None, self._client.get(self._keys(run).index(batch)))
        if raw is None:
            self._indexes.pop((run, batch), None)
            raise NotFoundError(f"run {run!r}: batch {batch} is not published, or freed already")
        index = ShardIndex.decode(raw, batch)
        found = _ReadIndex(raw, index, {shard.address: shard for shard in index.shards})
        if len(self._indexes) >= _MOST_INDEXES:
            self._indexes.clear()
        self._indexes[run, batch] = found
        return found

    def _get(self, run: str, batch: int, index: ShardIndex, key: str) -> bytes:
        with self._explained():
            value = cast(bytes | None, self._client.get(key))
        if value is not None:
            return value
        if self._read_index(run, batch).index.nonce != index.nonce:
            raise _ReplacedError(f"run {run!r}: batch {batch} was published anew while it was read; read it again")
        raise ShardsLostError(
            f"run {run!r}: Redis has lost a part of batch {batch}, {key}, which is made anew from its rows; ask again. "
            "Redis must not evict keys (maxmemory-policy noeviction), and loses at a failover what its replicas do not "
            "have yet"
        )


def _content(frame: bytes, most_bytes: int, run: str, batch: int) -> bytes:
    """What the value of a batch was written with."""
    try:
        return decompressed(frame, most_bytes)
    except DamagedFrameError as error:
        raise ShardsLostError(
            f"run {run!r}: Redis has a damaged part of batch {batch}, which is built again from its rows: {error}"
        ) from None


def _shard(found: _ReadIndex, run: str, batch: int, address: ShardAddress) -> StoredShard:
    shard = found.shards.get(address)
    if shard is None:
        raise NotFoundError(f"run {run!r}: batch {batch} has no shard {address.path}")
    return shard
