"""From a published batch to a rank's tensors: streamed and mapped, and what prefetching hides."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from gristmill import TrainerClient
from gristmill._client.trainer.shards.pull import stream
from gristmill._torch.shard_files import map_shard
from gristmill._wire.addresses import Position, ShardAddress
from tests.tools.bench.figures import Figure, paired, seconds
from tests.tools.bench.other_side import OtherSide, other_side
from tests.tools.bench.pipeline import TMPFS

STREAMED_MIB = (30, 120)
ROUNDS = 15
MAPPED_MIB = (1, 100, 1024)
MAPS = 51
STEP_S = 0.020

# Groups of 8 rows of at most 16,000 tokens, of which a shard of 30 MiB is made.
_GROUPS = 26


def figures() -> Iterator[Figure]:
    yield from _mapped()
    with other_side() as side:
        yield from _streamed(side)
        yield from _overlapped(side)
        yield _while_sealing(side)


# Mapped.


def _mapped() -> Iterator[Figure]:
    """Opening a shard as a trainer does: of several sizes."""
    times = {}
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        path = Path(directory) / "shard.safetensors"
        for size in MAPPED_MIB:
            row = torch.zeros(1, dtype=torch.int32)
            tensors = {"row": row, "sequences": torch.zeros(1, size << 18, dtype=torch.int32)}
            save_file(tensors, path, metadata={"micro_batches": "[[0]]", "batch": "0", "mini_batch": "0"})
            del tensors
            times[size] = statistics.median(seconds(lambda: map_shard(str(path))) for _ in range(MAPS))
    slowest = max(times, key=times.__getitem__)
    yield Figure("pull.shared_memory_ms", times[slowest] * 1e3, "ms", 1.0, slowest, "MiB shard, the slowest")


# Streamed.


def _streamed(side: OtherSide) -> Iterator[Figure]:
    """A shard to tensors, against bare gRPC that streams the same bytes in messages of the same size; its client joins
    them, or only counts them."""
    for size in STREAMED_MIB:
        run = side.publish(f"streamed-{size}", _GROUPS * size // 30, mini_batches=1)
        answer = side.shard(run, Position(0))
        address = ShardAddress(run, "policy", 0, 0, 0)

        def ours(address: ShardAddress = address, nbytes: int = answer.size_bytes) -> None:
            stream(side.transport, address, nbytes)

        def joined(path: str = answer.shared_memory_path) -> None:
            b"".join(side.read(path))

        def counted(path: str = answer.shared_memory_path) -> None:
            sum(map(len, side.read(path)))

        rounds = max(5, ROUNDS * 30 // size)
        ratio, limit = paired(ours, joined, rounds)
        name, mib = f"pull.stream_ratio.{size}_mib", answer.size_bytes / 2**20
        yield Figure(name, 1 / ratio, "x bare gRPC", 0.85, mib / limit, "MiB/s", at_most=False)
        ratio, limit = paired(ours, counted, rounds)
        yield Figure(f"{name}.kept_nowhere", 1 / ratio, "x bare gRPC", None, mib / limit, "MiB/s", at_most=False)
        side.delete(run)


# Overlapped.


def _overlapped(side: OtherSide) -> Iterator[Figure]:
    """The share of a loop's time that a rank waits for its next shard, all of them streamed, at steps of 20 ms."""
    run = side.publish("overlapped", _GROUPS * 8, mini_batches=8)
    shares: dict[int, list[float]] = {0: [], 1: []}
    with patch("gristmill._client.trainer.shards.pull.is_mappable", lambda path, size: False):
        for number in range(10):
            with TrainerClient(side.grpc_address, run, 0, prefetch=number % 2) as trainer:
                share = _waited(next(iter(trainer)).forward())
            if number >= 2:
                shares[number % 2].append(share)
    side.delete(run)
    without, ahead = (statistics.median(shares[prefetch]) for prefetch in (0, 1))
    yield Figure("overlap.wait_ratio", ahead, "of the loop", None, without, "without prefetch")


def _waited(shards: Iterator[Any]) -> float:
    waited = 0.0
    next(shards)
    time.sleep(STEP_S)
    begin = time.perf_counter()
    while True:
        asked = time.perf_counter()
        if next(shards, None) is None:
            return waited / (asked - begin)
        waited += time.perf_counter() - asked
        time.sleep(STEP_S)


def _while_sealing(side: OtherSide) -> Figure:
    """The rate at which a rank maps or streams batch n while batch n + 1 is sealed, against the rate while none is."""
    run = side.publish("sealing", _GROUPS * 4, mini_batches=4)
    address, size = ShardAddress(run, "policy", 0, 0, 0), side.shard(run, Position(0)).size_bytes

    def pull() -> None:
        stream(side.transport, address, size)

    ratios = []
    for batch in range(1, 6):
        pull()
        alone = statistics.median(seconds(pull) for _ in range(3))
        side.fill(run, _GROUPS * 4, first=batch)
        waits = threading.Thread(target=side.wait, args=(run, batch))
        waits.start()
        meanwhile = []
        while waits.is_alive():
            meanwhile.append(seconds(pull))
        if meanwhile:
            ratios.append(alone / statistics.median(meanwhile))
    side.delete(run)
    return Figure("overlap.pull_while_sealing_ratio", statistics.median(ratios), "x", None, at_most=False)
