"""Redis over loopback TCP: what rows and shards weigh there, and what a pull costs, over fetching the same bytes and
writing the padded output once."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import redis
from safetensors.numpy import load

from gristmill._wire.codecs.zstd_frames import FRAME_BYTES, decompressed
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.storage.redis.run_store import RedisRunStore
from gristmill_service.storage.redis.shard_store import RedisShardStore
from tests.on_loop import Runs
from tests.redis.fence import OpenFence
from tests.redis.servers import RedisServer, wait_until
from tests.tools.bench.figures import Figure, paired
from tests.tools.bench.submissions import split
from tests.tools.bench.workloads import workload

NAMES = ("agent", "short")
MERGES = ("none", "prefix")
SHARDS = 10
ROUNDS = 5
BATCH = "{gristmill:bench}:batch:0"


def figures() -> Iterator[Figure]:
    measured: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory), appendonly="no") as server:
        for name in NAMES:
            for merge in MERGES:
                measured += _figures(server.client(), name, merge)
        for name in NAMES:
            measured += _at_rest(server, name)
    yield from measured
    for name, reach in (("redis.bytes_ratio", 1.1), ("redis.pull_ratio", 1.4)):
        yield _together(name, reach, [figure for figure in measured if figure.name.startswith(name)])


def _together(name: str, reach: float, parts: list[Figure]) -> Figure:
    """Sums over all workloads: ours in all, over the bound in all."""
    limit = sum(part.bound or 0.0 for part in parts)
    value = sum(part.value * (part.bound or 0.0) for part in parts) / limit
    return Figure(name, value, parts[0].unit, reach, limit, parts[0].bound_unit)


def _figures(client: redis.Redis, name: str, merge: str) -> Iterator[Figure]:
    client.flushall()
    work = workload(name)
    batch = build_batch(work.steps, work.config(merge), run="bench", batch=0)
    store = RedisShardStore(client, OpenFence(client))
    store.publish("bench", 0, b"{}", batch.shards)
    stored = sum(map(len, client.hvals(BATCH)))
    real = sum(_real_bytes(shard) for shard in batch.shards)
    yield Figure(f"redis.bytes_ratio.{name}.{merge}", stored / real, "x real tokens", 1.1, real / 2**20, "MiB")
    ratio, limit = _pull(client, store, batch.shards)
    yield Figure(f"redis.pull_ratio.{name}.{merge}", ratio, "x bound", 1.4, limit * 1e3, "ms")


def _at_rest(server: RedisServer, name: str) -> Iterator[Figure]:
    """The server's own memory, a token that workers sent: of rows alone, and with the shards that are made of them."""
    work = workload(name)
    tokens, sent = work.steps.tokens.total, work.input_bytes / work.steps.tokens.total
    for merge in MERGES:
        client = server.client()
        client.flushall()
        ledger = RedisRunStore(client, "gristmill", lease_s=10.0)
        ledger.advertise("127.0.0.1:1", "http://127.0.0.1:1")
        runs = Runs(RedisShardStore(client, ledger), ledger, make_monitor=Monitor)
        try:
            # More groups than there are: nothing is sealed before it is asked for.
            settings = json.loads(work.config(merge).model_dump_json(exclude_defaults=True))
            runs.create("bench", settings | {"train_batch_size": 2 * settings["train_batch_size"]})
            run = runs.get("bench")
            for table in split(work):
                run.submit(table)
            rows = _used(client)
            run.seal(0)
            wait_until(lambda: run.status().batches_published, "the batch is published")  # noqa: B023
            held = _used(client)
        finally:
            runs.close(0.0)
            ledger.close()
        if merge == MERGES[0]:
            yield Figure(f"redis.rows_bytes_per_token.{name}", rows / tokens, "B/token", None, sent, "B/token sent")
        yield Figure(f"redis.held_bytes_per_token.{name}.{merge}", held / tokens, "B/token", None, sent, "B/token sent")


def _used(client: redis.Redis) -> int:
    """Bytes of all keys, as the server counts them; `used_memory` also has the buffers of connections."""
    return sum(int(client.memory_usage(key, samples=0) or 0) for key in client.scan_iter())


def _real_bytes(shard: Shard) -> int:
    """Bytes of a shard's tensors over the tokens of real rows alone."""
    tensors = load(join(shard.iovec()))
    real = tensors["is_padding"] == 0
    lengths, responses = (tensors[name].sum(axis=1)[real].sum() for name in ("attention_mask", "response_mask"))
    return sum(
        tensor.itemsize * int({"sequences": lengths, "attention_mask": lengths}.get(name, responses))
        if tensor.ndim == 2
        else tensor[real].nbytes
        for name, tensor in tensors.items()
    )


def _pull(client: redis.Redis, store: RedisShardStore, shards: Sequence[Shard]) -> tuple[float, float]:
    """Shard after shard, as ranks pull them. What came is kept, so that memory is fresh each time, for both alike."""
    kept: list[np.ndarray] = []
    pulls = [_pull_one(client, store, shard, kept) for shard in shards[:SHARDS]]
    return statistics.median(ratio for ratio, _ in pulls), statistics.median(limit for _, limit in pulls)


def _pull_one(client: redis.Redis, store: RedisShardStore, shard: Shard, kept: list[np.ndarray]) -> tuple[float, float]:
    address, output = shard.address, np.frombuffer(join(shard.iovec()), np.uint8)
    name = f"{address.model}/{address.mini_batch}/{address.rank}/"
    fields = [field for field, _ in client.hscan_iter(BATCH, f"{name}*")]

    def ours() -> None:
        data, at = np.empty(shard.size, np.uint8), 0
        for frame in store.read_frames("bench", 0, address):
            content = decompressed(frame, FRAME_BYTES)
            data.data[at : at + len(content)] = content
            at += len(content)
        kept.append(data)

    def bound() -> None:
        for field in fields:
            client.hget(BATCH, field)
        kept.append(output.copy())

    ratio, limit = paired(ours, bound, ROUNDS)
    assert all(np.array_equal(one, output) for one in kept[-2:])
    return ratio, limit
