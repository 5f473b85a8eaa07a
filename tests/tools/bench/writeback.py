"""Columns that trainers write back: from the first write until the train shards are published."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from gristmill import Batch, RolloutClient, TrainerClient
from gristmill._client.connection.transport import Transport
from gristmill.converters import from_skyrl
from gristmill.v1 import run_pb2
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import served

DP_SIZE, ROWS, PROMPT, RESPONSE = 8, 2_048, 256, 2_442
SAMPLES, ROUNDS = 8, 4
COLUMNS = ("values", "old_logprobs", "ref_logprobs")


def figures() -> Iterator[Figure]:
    """5 million trained tokens over 8 ranks, PPO with the KL in its rewards. GB: of the train shards."""
    with served([]) as service:
        measured = [_round(service.grpc_address, f"writeback-{number}") for number in range(ROUNDS)][1:]
    seconds = statistics.median(taken for taken, _ in measured)
    gigabytes = measured[0][1] / 1e9
    yield Figure("writeback.seconds_per_gb", seconds / gigabytes, "s/GB", 1.5, seconds, "s of them")


def _round(address: str, run: str) -> tuple[float, int]:
    """Seconds from the first write to the train shards, and the bytes of these."""
    with RolloutClient(address, run) as client:
        client.create_run(_config())
        client.submit(from_skyrl(_output()))
    with ExitStack() as opened:
        ranks = [opened.enter_context(TrainerClient(address, run, rank)) for rank in range(DP_SIZE)]
        batches = [next(iter(rank)) for rank in ranks]
        shards = [list(batch.forward()) for batch in batches]
        values = [
            [np.full(shard["response_mask"].shape, -0.5, np.float32) for shard in of_batch] for of_batch in shards
        ]
        begin = time.perf_counter()
        writing = [
            threading.Thread(target=_write, args=(rank, of_batch, numbers))
            for rank, of_batch, numbers in zip(ranks, shards, values, strict=True)
        ]
        for thread in writing:
            thread.start()
        for thread in writing:
            thread.join()
        size = sum(map(_train_bytes, batches))
        taken = time.perf_counter() - begin
    transport = Transport(address, 60.0, "bench")
    transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))
    transport.close()
    return taken, size


def _write(rank: TrainerClient, shards: list[Any], values: list[Any]) -> None:
    for shard, numbers in zip(shards, values, strict=True):
        rank.write(shard, dict.fromkeys(COLUMNS, numbers))


def _train_bytes(batch: Batch) -> int:
    """Waits for the rank's first train shard; the bytes of its tensors."""
    shard = next(batch.mini_batches())
    return sum(tensor.nbytes for tensor in shard.tensors.values())


def _output() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, 150_000, (ROWS, PROMPT), dtype=np.int32)
    responses = rng.integers(0, 150_000, (ROWS, RESPONSE), dtype=np.int32)
    return {
        "uids": [f"p{row // SAMPLES}" for row in range(ROWS)],
        "samples": [row % SAMPLES for row in range(ROWS)],
        "prompt_token_ids": list(prompts),
        "response_ids": list(responses),
        "rewards": rng.random(ROWS).tolist(),
        "rollout_logprobs": list(-rng.random((ROWS, RESPONSE), dtype=np.float32)),
    }


def _config() -> dict[str, Any]:
    return {
        "train_batch_size": ROWS // SAMPLES,
        "n_samples_per_prompt": SAMPLES,
        "policy_mini_batch_size": ROWS // SAMPLES,
        "micro_batch": {"max_tokens": 32_768},
        "dp_size": DP_SIZE,
        "advantage_estimator": "gae",
        "whiten": "batch",
        "kl_in_reward": {"coef": 0.05, "estimator": "k3"},
        "columns": [{"name": name, "dtype": "float32", "scope": "response", "source": "trainer"} for name in COLUMNS],
    }
