"""Stores published batches in Redis. Each is a hash of the plan and of the shards in zstd frames, with checksums.

A batch is written to a temporary key, which is then renamed to the batch's key; this replaces an earlier batch
atomically. If a process dies before that, the next owner of the run removes the temporary key.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import structlog

from gristmill._wire.codecs.zstd_frames import FRAME_BYTES, DamagedFrameError, compressed, decompressed
from gristmill.errors import (
    FailedPreconditionError,
    GristmillError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service.pipeline.layout.iovec import coalesced, cut, join
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.settings import Settings
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, is_full, outcome_unknown, translated
from gristmill_service.storage.redis.deletion import remove_keys
from gristmill_service.storage.redis.keys import RunKeys, sealed, unlink, unsealed
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.scripts import SERVER_ALONE, Scripts
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardLocation, ShardsLostError, ShardSource, ShardStore

_log = structlog.get_logger(__name__)

_FORMAT = 3
# The limit of a document's decompressed bytes, because a damaged frame may contain any size.
_MOST_DOCUMENT_BYTES = 1 << 30
# One thread compresses while the other sends.
_WRITERS = 2


def open_shards(settings: Settings, runs: RunStore) -> ShardStore:
    assert isinstance(runs, RedisRunStore), "checked with the settings"
    return RedisShardStore(runs.client, runs, settings.redis_prefix)


class _ReplacedError(UnavailableError):
    """The batch was republished while it was read."""


class RedisShardStore:
    """Implements `gristmill_service.storage.shard_store.ShardStore`. Published batches outlive this process.

    client: a client without `decode_responses`, which the caller closes.
    """

    is_remote = True

    def __init__(self, client: Client, runs: RedisRunStore, prefix: str = "gristmill") -> None:
        self._client, self._runs, self._prefix = client, runs, prefix
        self._scripts = Scripts(client, SERVER_ALONE)
        # The keys of failed publications that remain to be removed.
        self._left: set[str] = set()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource], table: bytes = b"") -> int:
        """See the protocol. Returns the compressed bytes of the shards, the plan and the table."""
        keys, owned, nonce = RunKeys(self._prefix, run), self._runs.owned(run), secrets.token_hex(8)
        shards = list(shards)
        place, staged = keys.batch(batch), keys.staged(owned.claim, nonce)
        self._remove_left()
        try:
            with translated(self._client):
                documents = {"plan": compressed(plan), "table": compressed(table)}
                stored = {name: sealed([document]) for name, document in documents.items()}
                fields = {"format": str(_FORMAT), "nonce": nonce, **stored}
                self._client.hset(staged, mapping=cast(Any, fields))
                size = sum(map(len, documents.values())) + self._write_shards(staged, shards)
                _put_in_place(owned, staged, place, nonce)
        except BaseException as error:
            self._left.add(staged)
            self._remove_left()
            with suppress(GristmillError, *REDIS_ERRORS):
                # The batch was published, but the answer was lost.
                if self._client.hget(place, "nonce") == nonce.encode():
                    owned.free(place)
            if isinstance(error, UnavailableError) and is_full(error.__cause__):
                raise ResourceExhaustedError(
                    f"run {run!r}: batch {batch} does not fit into Redis, which is full, with its "
                    f"{sum(shard.size for shard in shards)} bytes before compression; raise maxmemory, or lower "
                    "max_buffered_batches"
                ) from error
            raise
        return size

    def _write_shards(self, staged: str, shards: Iterable[ShardSource]) -> int:
        def write(shard: ShardSource) -> int:
            name, frames, size = _name(shard.address), 0, 0
            for part in cut(coalesced(shard.iovec()), FRAME_BYTES):
                frame = compressed(join(part))
                self._client.hset(staged, f"{name}/{frames}", sealed([frame]))
                frames, size = frames + 1, size + len(frame)
            self._client.hset(staged, name, sealed([f"{shard.size} {frames}".encode()]))
            return size

        with ThreadPoolExecutor(_WRITERS, "gristmill-frames") as pool:
            return sum(pool.map(write, shards))

    def _remove_left(self) -> None:
        left = set(self._left)
        with suppress(*REDIS_ERRORS):
            unlink(self._client, left)
            self._left -= left

    def plan(self, run: str, batch: int) -> bytes:
        return self._document(run, batch, "plan")

    def table(self, run: str, batch: int) -> bytes:
        return self._document(run, batch, "table")

    def _document(self, run: str, batch: int, name: str) -> bytes:
        _, [document] = self._read(run, batch, name)
        return _content(run, batch, _whole(run, batch, document), _MOST_DOCUMENT_BYTES)

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        _, [described] = self._read(run, batch, _name(address))
        return ShardLocation(_size(run, batch, address, described)[0], None)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Reads the whole compressed shard into memory."""
        while True:
            try:
                frames = list(self.read_frames(run, batch, address))
            except _ReplacedError:
                continue
            return (_content(run, batch, frame, FRAME_BYTES) for frame in frames)

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Yields the checked frames. The iterator raises NotFoundError after the batch is freed, and UnavailableError
        if the batch is republished in the meantime."""
        name = _name(address)
        nonce, [described, first] = self._read(run, batch, name, f"{name}/0")
        _, frames = _size(run, batch, address, described)

        def rest() -> Iterator[bytes]:
            for index in range(1, frames):
                current, [frame] = self._read(run, batch, f"{name}/{index}")
                if current != nonce:
                    raise _ReplacedError(f"run {run!r}: batch {batch} was republished while it was read; read it again")
                yield _whole(run, batch, frame)

        return chain([_whole(run, batch, first)], rest()) if frames else iter(())

    def free(self, run: str, batch: int) -> None:
        self._runs.owned(run).free(RunKeys(self._prefix, run).batch(batch))
        self._remove_left()

    def delete_run(self, run: str) -> None:
        """Removes nothing of a run that exists: the run store removes batches with the run's other keys."""
        with translated(self._client):
            remove_keys(self._client, self._scripts, RunKeys(self._prefix, run))

    def sweep(self, runs: Collection[str]) -> None:
        """Removes leftovers of unfinished publications, and rows that no record refers to."""
        if count := self._runs.sweep(runs):
            _log.info("leftovers of earlier owners removed", runs=len(runs), keys=count)

    def close(self) -> None:
        """Does nothing, because other replicas need the published batches."""

    def _read(self, run: str, batch: int, *fields: str) -> tuple[bytes, list[bytes | None]]:
        """Returns the batch's current nonce, and the values of these fields; None for a missing field."""
        key = RunKeys(self._prefix, run).batch(batch)
        try:
            with translated(self._client):
                read = cast(list[bytes | None], self._client.hmget(key, ["format", "nonce", *fields]))
        except FailedPreconditionError as error:
            if "WRONGTYPE" not in str(error):
                raise
            raise _lost(run, batch, "it is of another type") from error
        version, nonce, *values = read
        if all(value is None for value in read):
            raise NotFoundError(f"run {run!r}: batch {batch} is not published, or already freed; request another batch")
        if version is not None and version.isdigit() and int(version) > _FORMAT:
            raise FailedPreconditionError(
                f"batch {batch} in Redis has format {int(version)} and this version reads {_FORMAT}; use the gristmill "
                "that published it, or a newer one"
            )
        if version != b"%d" % _FORMAT or nonce is None:
            raise _lost(run, batch, "it is of another format")
        return nonce, values


def _put_in_place(owned: RedisRunLog, staged: str, place: str, nonce: str) -> None:
    try:
        owned.publish(staged, place, nonce)
    except UnavailableError as error:
        if not outcome_unknown(error):
            raise
        owned.publish(staged, place, nonce)


def _name(address: ShardAddress) -> str:
    """Returns the name of the field with a shard's size. The names of its frames' fields have a number appended."""
    return f"{address.model}/{address.mini_batch}/{address.rank}"


def _size(run: str, batch: int, address: ShardAddress, described: bytes | None) -> tuple[int, int]:
    """Returns the size of a shard's file in bytes, and the number of its frames."""
    if described is None:
        raise NotFoundError(f"run {run!r}: batch {batch} has no shard {address.path}; request a shard of its plan")
    size, frames = _whole(run, batch, described).split()
    return int(size), int(frames)


def _whole(run: str, batch: int, value: bytes | None) -> bytes:
    """Returns a field's content. Raises ShardsLostError if it is missing or damaged."""
    content = unsealed(value)
    if content is None:
        raise _lost(run, batch, "a part of it is missing or damaged")
    return bytes(content)


def _content(run: str, batch: int, frame: bytes, most_bytes: int) -> bytes:
    try:
        return decompressed(frame, most_bytes)
    except DamagedFrameError as error:
        raise _lost(run, batch, str(error)) from None


def _lost(run: str, batch: int, reason: str) -> ShardsLostError:
    return ShardsLostError(
        f"run {run!r}: Redis has lost a part of batch {batch} ({reason}), which is being rebuilt from its rows; retry. "
        "To prevent this, set maxmemory-policy to noeviction, and redis_min_replicas for failovers"
    )
