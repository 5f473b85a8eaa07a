"""What stores and journals take, measured around them: seconds, and calls that failed.

Waits for room are a run's own; what is not found is no failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from gristmill._wire.steps import Steps
from gristmill.errors import AlreadyExistsError, NotFoundError
from gristmill_service.storage.row_tables import Stored
from gristmill_service.storage.run_store import OwnedElsewhereError, Replay, RunLog, RunStore
from gristmill_service.storage.shard_store import ShardSource, ShardStore

T = TypeVar("T")

_SECONDS = (0.0001, 0.0005, 0.0025, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
_NO_FAILURE = (NotFoundError, AlreadyExistsError, OwnedElsewhereError)
OPERATIONS = ("publish", "plan", "free", "append", "sync", "flush", "compact", "put", "get", "replay")


class StoreMetrics:
    """Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            "gristmill_store_seconds",
            "Seconds of calls to what keeps shards, rows and events.",
            ("operation",),
            registry=registry,
            buckets=_SECONDS,
        )
        failed = Counter(
            "gristmill_store_errors", "Calls to what keeps them that failed.", ("operation",), registry=registry
        )
        # Looked up once: some are made with each request.
        self._observe = {name: seconds.labels(name).observe for name in OPERATIONS}
        self._fail = {name: failed.labels(name).inc for name in OPERATIONS}

    def call(self, operation: str, function: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            found = function()
        except Exception as error:
            if not isinstance(error, _NO_FAILURE):
                self._fail[operation]()
            raise
        self._observe[operation](time.perf_counter() - begin)
        return found


class TimedShardStore:
    """See `gristmill_service.storage.shard_store.ShardStore`."""

    def __init__(self, store: ShardStore, measured: StoreMetrics) -> None:
        self._store, self._call = store, measured.call
        self.locate, self.read, self.read_frames = store.locate, store.read, store.read_frames
        self.delete_run, self.sweep, self.close = store.delete_run, store.sweep, store.close

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        return self._call("publish", lambda: self._store.publish(run, batch, plan, shards))

    def plan(self, run: str, batch: int) -> bytes:
        return self._call("plan", lambda: self._store.plan(run, batch))

    def free(self, run: str, batch: int) -> None:
        self._call("free", lambda: self._store.free(run, batch))


class TimedRunStore:
    """See `gristmill_service.storage.run_store.RunStore`."""

    def __init__(self, store: RunStore, measured: StoreMetrics) -> None:
        self._store, self._measured = store, measured
        self.is_shared = store.is_shared
        self.names, self.delete, self.close = store.names, store.delete, store.close
        self.unhealthy_reason, self.unreachable_reason = store.unhealthy_reason, store.unreachable_reason

    def create(self, name: str, config: bytes) -> RunLog:
        return TimedRunLog(self._store.create(name, config), self._measured)

    def open(self, name: str) -> RunLog:
        return TimedRunLog(self._store.open(name), self._measured)


class TimedRunLog:
    """See `gristmill_service.storage.run_store.RunLog`."""

    def __init__(self, log: RunLog, measured: StoreMetrics) -> None:
        self._log, self._call = log, measured.call
        self.config, self.run_id = log.config, log.run_id
        self.maps_rows, self.reads_rows = log.maps_rows, log.reads_rows
        self.remove, self.retain, self.close = log.remove, log.retain, log.close
        self.note_generation = log.note_generation

    @property
    def is_lost(self) -> bool:
        return self._log.is_lost

    @property
    def is_long(self) -> bool:
        return self._log.is_long

    @property
    def log_bytes(self) -> int:
        return self._log.log_bytes

    @property
    def lease(self) -> float | None:
        return self._log.lease

    def replay(self) -> Replay:
        return self._call("replay", self._log.replay)

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        self._call("append", lambda: self._log.append(record, tables))

    def sync(self) -> None:
        self._call("sync", self._log.sync)

    def flush(self) -> None:
        self._call("flush", self._log.flush)

    def compact(self, snapshot: bytes) -> None:
        self._call("compact", lambda: self._log.compact(snapshot))

    def put(self, table: Steps) -> tuple[int, Stored]:
        return self._call("put", lambda: self._log.put(table))

    def get(self, number: int) -> Stored:
        return self._call("get", lambda: self._log.get(number))

    def get_all(self, numbers: Collection[int]) -> Mapping[int, Stored]:
        return self._call("get", lambda: self._log.get_all(numbers))
