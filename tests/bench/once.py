"""Bytes of a batch's rows at rest over those of its distinct tokens, and the way from seal to shards.

`python -m tests.bench once` measures. Turns come as a client sends them: without what the step before begins with.
Distinct tokens are those of the tree of each prompt group; their columns are the token ids, and of sampled tokens the
mask and the log-probability.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import redis

from gristmill._client.rollout.delivery import Delivery, PendingRow
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._wire.submit_codec import Submission
from gristmill_service.run.row_buffer import RowBuffer
from gristmill_service.run.run import Run
from gristmill_service.run.runs import Runs
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory_shards import MemoryShardStore
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.run_store import RunStore
from tests.bench.figures import Figure
from tests.bench.pipeline import TMPFS
from tests.bench.rollouts import rollouts
from tests.bench.workloads import Workload
from tests.redis.servers import RedisServer, wait_until

NAMES = ("short", "agent", "anti")
REACH = {"short": 1.3, "agent": 1.1, "anti": 1.1}
SEAL_REACH = {"redis": 1.5, "journal": 1.0}
TIMES = (1, 16)


def figures() -> Iterator[Figure]:
    for name in NAMES:
        work = rollouts(name)
        limit = distinct_bytes(work)
        for kind, held in (("memory", _in_memory), ("journal", _in_journal), ("redis", _in_redis)):
            yield Figure(f"once.{kind}.{name}", held(work) / limit, "x distinct", REACH[name], limit / 2**20, "MiB")
    for kind in ("journal", "redis"):
        for times in TIMES:
            yield _seal(kind, rollouts("agent"), times)


def distinct_bytes(work: Workload) -> int:
    """Bytes of the columns of the tokens of the trees that prompt groups are."""
    steps = work.steps
    found, group = 0, list[bytes]()
    for row in range(len(steps)):
        if row and steps.uids[row] != steps.uids[row - 1]:
            found, group = found + _distinct(group), []
        group.append(steps.tokens[row].astype(">i4").tobytes())
    return 4 * (found + _distinct(group)) + 5 * steps.loss_mask.total


def _distinct(rows: list[bytes]) -> int:
    """Tokens of the tree that rows make. In the order of their bytes each shares most with the one before it."""
    found, before = 0, np.empty(0, np.int32)
    for row in sorted(rows):
        tokens = np.frombuffer(row, ">i4")
        shorter = min(len(before), len(tokens))
        differs = np.flatnonzero(before[:shorter] != tokens[:shorter])
        found += len(tokens) - (int(differs[0]) if len(differs) else shorter)
        before = tokens
    return found


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
        yield b"".join(encoder.encode([entry]))


def submit(run: Run, work: Workload) -> None:
    for message in messages(work):
        sent = Submission(message).rows()
        run.submit(run.checked(sent), sent.prefixes)


@contextmanager
def _run(store: RunStore | None, work: Workload) -> Iterator[Run]:
    runs = Runs(MemoryShardStore(), store) if store else Runs(MemoryShardStore())
    try:
        runs.create("bench", _settings(work))
        yield runs.get("bench")
    finally:
        runs.close(0.0)


def _in_memory(work: Workload) -> int:
    """What is given back when the rows are let go, Python's objects included."""
    with _run(None, work) as run:
        tracemalloc.start()
        try:
            submit(run, work)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            run._writer.rows = RowBuffer(compacts=False)
            gc.collect()
            return held - tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()


def _in_journal(work: Workload) -> int:
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory, ExitStack() as opened:
        store = JournalRunStore(Path(directory), "never")
        opened.callback(store.close)
        run = opened.enter_context(_run(store, work))
        submit(run, work)
        return sum(os.stat(path).st_blocks * 512 for path in Path(directory).glob("run-*/rows-*"))


@contextmanager
def _redis() -> Iterator[tuple[redis.Redis, RedisRunStore]]:
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
    with _redis() as (client, store), _run(store, work) as run:
        submit(run, work)
        return sum(int(client.memory_usage(key, samples=0) or 0) for key in client.scan_iter("*:rows:*"))


def _seal(kind: str, work: Workload, times: int) -> Figure:
    """Seconds a GB of rows as they would be whole, from the seal to published shards."""
    size = times * work.input_bytes / 1e9
    work = _multiplied(work, times)
    with ExitStack() as opened:
        store: RunStore
        if kind == "redis":
            _, store = opened.enter_context(_redis())
        else:
            directory = opened.enter_context(tempfile.TemporaryDirectory(dir=TMPFS))
            store = JournalRunStore(Path(directory), "never")
            opened.callback(store.close)
        run = opened.enter_context(_run(store, work))
        submit(run, work)
        begin = time.perf_counter()
        run.seal(0)
        wait_until(lambda: run.status().batches_published, "the batch is published", timeout_s=300.0)
        taken = time.perf_counter() - begin
    name = f"{kind}.seal_seconds_per_gb" + ("" if times == 1 else f".{times}x")
    return Figure(name, taken / size, "s/GB", SEAL_REACH[kind], size, "GB as sent, whole")


def _multiplied(work: Workload, times: int) -> Workload:
    """So many times the groups, under other names; tokens are the same ones in each."""
    steps = work.steps
    if times == 1:
        return work
    rows = np.tile(np.arange(len(steps)), times)
    many = steps.take(rows)
    uids = [f"{at // len(steps)}-{uid}" for at, uid in enumerate(many.uids)]
    return Workload(work.name, replace(many, uids=uids), work.samples)
