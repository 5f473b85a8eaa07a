"""Stores in the memory of this process: runs that end with it, and shards for tests or for lack of shared memory.

The run store retains nothing: it discards appended records, and each run has its own rows on the heap.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, ResourceExhaustedError
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.settings import Settings
from gristmill_service.storage.memory_room import Writes, memory_room
from gristmill_service.storage.row_tables import Stored
from gristmill_service.storage.run_store import CheckNames, LogEnd, Replay, RunStore, any_names, check_config
from gristmill_service.storage.shard_store import ShardLocation, ShardSource, ShardStore


class MemoryRunStore:
    """Implements `gristmill_service.storage.run_store.RunStore`. It lists no runs, because a process uses the log of
    each run that it creates until it ends."""

    is_shared = False

    def names(self) -> list[str]:
        return []

    def create(self, name: str, config: bytes, check: CheckNames = any_names) -> MemoryRunLog:
        check_config(name, config)
        return MemoryRunLog(config)

    def open(self, name: str) -> MemoryRunLog:
        raise NotFoundError(f"run {name!r} is not stored; create it first")

    def delete(self, name: str) -> None:
        pass

    def set_dormant(self, name: str, description: bytes) -> None:
        raise AssertionError(f"run {name!r} would be lost, as it is only in memory")

    def dormant(self) -> list[str]:
        return []

    def descriptions(self, names: Collection[str]) -> dict[str, bytes]:
        return {}

    def unreachable_reason(self) -> str:
        return ""

    def unhealthy_reason(self) -> str:
        return ""

    def close(self) -> None:
        pass


class MemoryRunLog:
    """Implements `gristmill_service.storage.run_store.RunLog`. The run itself stores its tables."""

    reads_rows = is_remote = is_lost = is_long = False
    log_bytes = first_number = 0
    lease: float | None = None
    end = LogEnd()

    def __init__(self, config: bytes = b"{}") -> None:
        self.config, self.run_id = config, uuid.uuid4().hex

    def check(self, has_rows: bool = True, row_bytes: int = 0) -> None:
        pass

    def replay(self) -> Replay:
        return Replay(None, ())

    def note_generation(self, generation: int) -> None:
        pass

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        pass

    def sync(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def compact(self, end: LogEnd, snapshot: Iterable[bytes]) -> None:
        pass

    def get(self, number: int) -> Stored:
        raise NotFoundError(f"table {number} of rows is not stored: it is only in the run's memory")

    def get_all(self, numbers: Collection[int]) -> dict[int, Stored]:
        return {number: self.get(number) for number in numbers}

    def remove(self, numbers: Collection[int]) -> None:
        pass

    def retain(self, numbers: Collection[int]) -> set[int]:
        return set(numbers)

    def close(self) -> None:
        pass


_PIECE = 1 << 20


def open_shards(settings: Settings, runs: RunStore) -> ShardStore:
    return MemoryShardStore()


@dataclass(frozen=True, slots=True)
class _Published:
    plan: bytes
    table: bytes
    shards: dict[ShardAddress, bytes]


class MemoryShardStore:
    """Implements `gristmill_service.storage.shard_store.ShardStore`."""

    is_remote = False

    def __init__(self) -> None:
        self._batches: dict[tuple[str, int], _Published] = {}
        self._writes = Writes()
        self._lock = threading.Lock()

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource], table: bytes = b"") -> int:
        shards = list(shards)
        size = sum(shard.size for shard in shards)

        def check(others: int) -> None:
            room = memory_room()
            if size > room.available - others:
                raise ResourceExhaustedError(
                    f"run {run!r}: batch {batch} has {size} bytes, and {room.available - others} of {room.total} bytes "
                    "of memory are free; free memory, or lower train_batch_size or max_buffered_batches for later runs"
                )

        with self._writes.reserved(size, check):
            joined = {shard.address: join(shard.iovec()) for shard in shards}
        with self._lock:
            self._batches[run, batch] = _Published(plan, table, joined)
        return len(plan) + len(table) + sum(map(len, joined.values()))

    def plan(self, run: str, batch: int) -> bytes:
        return self._published(run, batch).plan

    def table(self, run: str, batch: int) -> bytes:
        return self._published(run, batch).table

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        return ShardLocation(len(self._shard(run, batch, address)), None)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        data = self._shard(run, batch, address)
        return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> None:
        """Returns None, because this store's files are uncompressed."""

    def free(self, run: str, batch: int) -> None:
        with self._lock:
            self._batches.pop((run, batch), None)

    def delete_run(self, run: str) -> None:
        with self._lock:
            for key in [key for key in self._batches if key[0] == run]:
                del self._batches[key]

    def sweep(self, runs: Collection[str]) -> None:
        """Does nothing, because leftovers end with their process."""

    def close(self) -> None:
        with self._lock:
            self._batches.clear()

    def _published(self, run: str, batch: int) -> _Published:
        with self._lock:
            published = self._batches.get((run, batch))
        if published is None:
            raise NotFoundError(f"run {run!r}: batch {batch} is not published, or already freed; request another batch")
        return published

    def _shard(self, run: str, batch: int, address: ShardAddress) -> bytes:
        shard = self._published(run, batch).shards.get(address)
        if shard is None:
            raise NotFoundError(f"run {run!r}: batch {batch} has no shard {address.path}; request a shard of its plan")
        return shard
