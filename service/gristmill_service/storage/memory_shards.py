"""Shards as bytes in a dictionary of this process: for tests, and for where there is no shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gristmill.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.settings import Settings
from gristmill_service.storage.memory_room import memory_room
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardLocation, ShardSource, ShardStore

_PIECE = 1 << 20


def open_shards(settings: Settings, runs: RunStore) -> ShardStore:
    return MemoryShardStore()


@dataclass(frozen=True, slots=True)
class _Published:
    plan: bytes
    shards: dict[ShardAddress, bytes]


class MemoryShardStore:
    """See `gristmill_service.storage.shard_store.ShardStore`."""

    is_remote = False

    def __init__(self) -> None:
        self._batches: dict[tuple[str, int], _Published] = {}
        self._lock = threading.Lock()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        shards, room = list(shards), memory_room()
        if (size := sum(shard.size for shard in shards)) > room.available:
            kind = FailedPreconditionError if size > room.total else ResourceExhaustedError
            raise kind(f"run {run!r}: batch {batch} has {size} bytes and there is memory for {room.available}")
        joined = {shard.address: join(shard.iovec()) for shard in shards}
        with self._lock:
            self._batches[run, batch] = _Published(plan, joined)
        return len(plan) + sum(map(len, joined.values()))

    def plan(self, run: str, batch: int) -> bytes:
        return self._published(run, batch).plan

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        return ShardLocation(len(self._shard(run, batch, address)), None)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        data = self._shard(run, batch, address)
        return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> None:
        """None: this store has whole files."""

    def free(self, run: str, batch: int) -> None:
        with self._lock:
            self._batches.pop((run, batch), None)

    def delete_run(self, run: str) -> None:
        with self._lock:
            for key in [key for key in self._batches if key[0] == run]:
                del self._batches[key]

    def sweep(self, run: str) -> None:
        """Nothing is left: it goes with its process."""

    def close(self) -> None:
        with self._lock:
            self._batches.clear()

    def _published(self, run: str, batch: int) -> _Published:
        with self._lock:
            published = self._batches.get((run, batch))
        if published is None:
            raise NotFoundError(f"run {run!r}: batch {batch} is not published, or freed already")
        return published

    def _shard(self, run: str, batch: int, address: ShardAddress) -> bytes:
        shard = self._published(run, batch).shards.get(address)
        if shard is None:
            raise NotFoundError(f"run {run!r}: batch {batch} has no shard {address.path}")
        return shard
