"""Bytes of a batch's rows at rest over those of its distinct tokens.

`python -m tests.tools.bench once` measures. Turns come as a client sends them: without what the step before begins
with. Distinct tokens are those of the tree of each prompt group; their columns are the token ids, and of sampled tokens
the mask and the log-probability.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis

from gristmill._client.rollout.delivery import Delivery, PendingRow
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._wire.codecs.submit_codec import Submission
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_store import ShardStore
from tests.on_loop import Run, Runs
from tests.redis.servers import RedisServer
from tests.tools.bench.figures import Figure
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.rollouts import rollouts
from tests.tools.bench.workloads import Workload

NAMES = ("short", "agent", "anti")
REACH = {"short": 1.3, "agent": 1.1, "anti": 1.1}


def figures() -> Iterator[Figure]:
    for name in NAMES:
        work = rollouts(name)
        limit = distinct_bytes(work)
        for kind, held in (("memory", _in_memory), ("journal", _in_journal), ("redis", _in_redis)):
            yield Figure(f"once.{kind}.{name}", held(work) / limit, "x distinct", REACH[name], limit / 2**20, "MiB")


def distinct_bytes(work: Workload) -> int:
    """Bytes of the columns of the tokens of the trees that prompt groups are."""
    return 4 * distinct_tokens(work) + 5 * work.steps.loss_mask.total


def distinct_tokens(work: Workload) -> int:
    """Tokens of the trees that prompt groups are."""
    steps = work.steps
    count, group = 0, list[bytes]()
    for row in range(len(steps)):
        if row and steps.uids[row] != steps.uids[row - 1]:
            count, group = count + _distinct(group), []
        group.append(steps.tokens[row].astype(">i4").tobytes())
    return count + _distinct(group)


def _distinct(rows: list[bytes]) -> int:
    """Tokens of the tree that rows make. In the order of their bytes each shares most with the one before it."""
    count, before = 0, np.empty(0, np.int32)
    for row in sorted(rows):
        tokens = np.frombuffer(row, ">i4")
        shorter = min(len(before), len(tokens))
        differs = np.flatnonzero(before[:shorter] != tokens[:shorter])
        count += len(tokens) - (int(differs[0]) if len(differs) else shorter)
        before = tokens
    return count


def _settings(work: Workload, **more: object) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(work.config("prefix", 8).model_dump_json(exclude_defaults=True))
    packed = {"layout": "packed", "balance": "tokens", "micro_batch": {"max_tokens": 32_768}}
    # More groups than there are: nothing is sealed before it is asked for.
    return settings | packed | {"train_batch_size": 2 * settings["train_batch_size"]} | more


def messages(work: Workload) -> Iterator[bytes]:
    """A request a turn, first turns first, as workers bring them side by side."""
    encoder = RequestEncoder("bench", compresses=False)
    steps = work.steps
    for row in np.argsort(steps.steps, kind="stable").tolist():
        table = steps.take(np.array([row]))
        entry = PendingRow(table, 0, table.key(0), (), 0, Delivery(), 0, 0, 0.0)
        yield encoder.encode([entry])


def submit(run: Run, work: Workload) -> None:
    for message in messages(work):
        sent = Submission(message).rows()
        run.submit(run.checked(sent), sent.prefixes)


@contextmanager
def run_of(work: Workload, store: RunStore | None = None, shards: ShardStore | None = None) -> Iterator[Run]:
    """A run that the workload can be submitted to. It seals nothing by itself."""
    shards = shards or MemoryShardStore()
    runs = Runs(shards, store, make_monitor=Monitor) if store else Runs(shards, make_monitor=Monitor)
    try:
        runs.create("bench", _settings(work))
        yield runs.get("bench")
    finally:
        runs.close(0.0)


def _in_memory(work: Workload) -> int:
    """The bytes that are freed when the rows are released, Python's objects included."""
    with run_of(work) as run:
        tracemalloc.start()
        try:
            submit(run, work)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            run._writer.rows = RowBuffer()
            gc.collect()
            return held - tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()


def _in_journal(work: Workload) -> int:
    """Bytes of the database, of which the log of events is a small part."""
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        store = JournalRunStore(Path(directory), "never")
        with closing(store), run_of(work, store) as run:
            submit(run, work)
        return sum(os.stat(path).st_blocks * 512 for path in Path(directory).glob("run-*/*"))


@contextmanager
def redis_store() -> Iterator[tuple[redis.Redis, RedisRunStore]]:
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory), appendonly="no") as server:
        client = server.client()
        store = RedisRunStore(client, "gristmill", lease_s=10.0)
        store.advertise("127.0.0.1:1", "http://127.0.0.1:1")
        try:
            yield client, store
        finally:
            store.close()


def _in_redis(work: Workload) -> int:
    """Bytes of the keys that hold rows, as the server counts them."""
    with redis_store() as (client, store), run_of(work, store) as run:
        submit(run, work)
        return sum(int(client.memory_usage(key, samples=0) or 0) for key in client.scan_iter("*:rows:*"))
