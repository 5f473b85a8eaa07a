"""Measures what a replica takes and gives on Redis, whose log is synced before each answer: all of it, the client too,
on one machine. Of the run's owner, and of one that passes calls on."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from gristmill._client.connection.transport import Transport
from gristmill.v1 import run_pb2, trainer_pb2
from gristmill_service.config import RunConfig
from tests.redis.servers import RedisServer
from tests.tools.bench.figures import Figure, seconds
from tests.tools.bench.processes import served
from tests.tools.bench.submissions import LONG, Sender, config, split, tables
from tests.tools.bench.takeover import owns
from tests.tools.bench.workloads import DP_SIZE, workload

ROUNDS = 5
ROUND_BYTES = 128 << 20
_READERS = 4


def figures() -> Iterator[Figure]:
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory())
        server = opened.enter_context(RedisServer(Path(directory), appendonly="always"))
        flags = ["--store", "redis", "--redis-url", server.url]
        both = [opened.enter_context(served(flags)) for _ in range(2)]
        transport = Transport(both[0].grpc_address, 60.0, "bench")
        opened.callback(transport.close)
        messages = list(tables(LONG, ROUND_BYTES))
        for name, at in (("owner", True), ("forwarded", False)):
            times = []
            for number in range(ROUNDS):
                run = f"{name}-{number}"
                _create(transport, run, config())
                sender = Sender(next(one for one in both if owns(one, run) is at).grpc_address, messages)
                times.append(sender.seconds(run))
                sender.close()
                transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))
            size, rows, taken = sender.nbytes / 1e6, sender.rows, statistics.median(times)
            yield Figure(f"redis.submit_mb_s.{name}", size / taken, "MB/s", None, rows / taken, "rows/s")
        _create(transport, "read", workload("agent").config("prefix"))
        reader = next(one for one in both if not owns(one, "read"))
        yield _reading(reader.grpc_address)


def _create(transport: Transport, run: str, settings: RunConfig) -> None:
    made = run_pb2.CreateRunRequest(run=run, config_json=settings.model_dump_json(exclude_defaults=True))
    transport.call(transport.runs.CreateRun, made)


def _reading(address: str) -> Figure:
    """Every shard of a batch, by several callers at once, as it rests in Redis."""
    transport = Transport(address, 60.0, "bench")
    sender = Sender(address, list(split(workload("agent"))))
    try:
        sender.seconds("read")
        asked = trainer_pb2.GetBatchRequest(run="read", batch=0, wait_s=20.0)
        assert transport.call(transport.trainers.GetBatch, asked, wait_s=20.0).plan_json
        shards = [
            trainer_pb2.ReadShardRequest(run="read", batch=0, mini_batch=part, rank=rank, accepts_zstd=True)
            for part in range(4)
            for rank in range(DP_SIZE)
        ]

        def read(request: trainer_pb2.ReadShardRequest) -> int:
            return sum(len(part.data) for part in transport.trainers.ReadShard(request, timeout=60))

        with ThreadPoolExecutor(_READERS) as pool:
            size = sum(pool.map(read, shards))
            taken = statistics.median(seconds(lambda: list(pool.map(read, shards))) for _ in range(ROUNDS))
    finally:
        sender.close()
        transport.close()
    return Figure("redis.read_mb_s", size / 1e6 / taken, "MB/s", None, len(shards) / taken, "shards/s")
