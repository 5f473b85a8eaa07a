"""Who gives a run's shards: the run itself, or, where another process decides for it, their store alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from gristmill_service.pipeline.shard_address import ShardAddress
from gristmill_service.run.patience import PatientStore


class Shards(Protocol):
    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]: ...

    def read_compact_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes] | None: ...


class StoredShards:
    def __init__(self, run: str, store: PatientStore) -> None:
        self._run, self._store = run, store

    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]:
        return self._store.read(self._run, batch, address)

    def read_compact_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        return self._store.read_compact(self._run, batch, address)
