"""The parts that the runs of a service share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

from gristmill_service.run.batch_builder import BuildBatch
from gristmill_service.run.capacity import RowBudget, ShardRoom
from gristmill_service.run.monitor import RunMonitor
from gristmill_service.run.recent_tables import RecentTables
from gristmill_service.storage.shard_store import ShardStore

MakeMonitor = Callable[[Callable[[], float], Callable[[], float]], RunMonitor]


class Shared(NamedTuple):
    """pipeline: builds the shards of a sealed batch. make_monitor(clock, now): `now` returns the time on the run's
    clock. clock: seconds, like `time.monotonic`.
    builders, log_threads, snapshot_thread: the thread pools that build batches, that append to logs, and that write
    snapshots, one at a time. looking: a lock of runs whose tables are looked through, so that one is at a time.
    """

    store: ShardStore
    room: ShardRoom
    budget: RowBudget
    pipeline: BuildBatch
    make_monitor: MakeMonitor
    clock: Callable[[], float]
    builders: Executor
    log_threads: Executor
    snapshot_thread: Executor
    looking: asyncio.Lock
    tables: RecentTables
