"""Runs of `layout: prefix_tree`: through every store ranks get the shards that the pipeline makes of the same rows."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill import RolloutClient, Shard, TrainerClient
from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests import naive
from tests.client.test_shards import as_shard
from tests.redis.servers import RedisServer
from tests.serving import ServiceProcess, StartService
from tests.strategies import Row

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "n_samples_per_prompt": 3,
    "policy_mini_batch_size": 2,
    "step_wise": True,
    "merge": "none",
    "layout": "prefix_tree",
    "micro_batch": {"max_tokens": 200},
    "dp_size": 2,
    "columns": [{"name": "routes", "dtype": "int16", "scope": "token", "shape": [2]}],
}


def turns(uid: str, sample: int) -> Iterator[Row]:
    """Turns of a sample: all of a group begin with the same 40 tokens."""
    prompt = [ord(uid)] * 40
    for step in range(2 + sample):
        response = [7, sample, step, 9]
        count = len(prompt) + len(response)
        yield {
            "uid": uid,
            "sample": sample,
            "step": step,
            "is_last_step": step == 1 + sample,
            "prompt_token_ids": prompt,
            "response_ids": response,
            "loss_mask": [1] * 4,
            "rollout_logprobs": [-0.5 - sample] * 4,
            "reward": float(sample),
            "policy_version": 0,
            "routes": [[step, at] for at in range(count)],
        }
        prompt = [*prompt, *response, 5]


ROWS = [row for uid in "abcd" for sample in range(3) for row in turns(uid, sample)]


@pytest.fixture(params=["memory", "shared memory", "redis"])
def serving(request: pytest.FixtureRequest, start_service: StartService, tmp_path: Path) -> Iterator[ServiceProcess]:
    with ExitStack() as opened:
        flags = {"memory": ["--store", "memory"], "shared memory": ["--shared-memory-dir", str(tmp_path)]}
        if request.param == "redis":
            redis = opened.enter_context(RedisServer(tmp_path / "redis", appendonly="no"))
            flags["redis"] = ["--store", "redis", "--redis-url", redis.url]
        yield start_service(*flags[request.param])


def expected(dp_size: int) -> dict[tuple[int, int], bytes]:
    config = parse_config(CONFIG | {"dp_size": dp_size})
    batch = build_batch(from_rows(ROWS, columns=config.columns), config, run="trees", batch=0)
    return {(one.address.mini_batch, one.address.rank): naive.shard_bytes(one) for one in batch.shards}


def is_shard_of(shard: Shard, data: bytes) -> bool:
    other = as_shard(data)
    assert shard.metadata == other.metadata
    assert shard.tensors.keys() == other.tensors.keys()
    return all(torch.equal(values, other[name]) for name, values in shard.tensors.items())


def test_ranks_get_the_shards_that_the_pipeline_makes_also_when_they_come_back_as_fewer(
    serving: ServiceProcess,
) -> None:
    with RolloutClient(serving.grpc_address, "trees") as client:
        client.create_run(CONFIG)
        client.submit(ROWS)
    two = expected(2)
    for (mini_batch, rank), data in two.items():
        path = f"/v1/runs/trees/batches/0/policy/{mini_batch}/{rank}"
        with urllib.request.urlopen(serving.http_url + path, timeout=20) as answer:
            assert answer.read() == data
    with TrainerClient(serving.grpc_address, "trees", 0, acks=False, columns=[], dp_size=2) as bare:
        for micro in next(next(iter(bare)).mini_batches()).micro_batches():
            assert "routes" not in micro
            assert micro["parents"].shape == micro["sequences"].shape
    with ExitStack() as opened:
        options: dict[str, Any] = {"dp_size": 2, "auto_commit": False, "timeout_s": 20}
        ranks = [opened.enter_context(TrainerClient(serving.grpc_address, "trees", rank, **options)) for rank in (0, 1)]
        for rank, trainer in enumerate(ranks):
            trainer.load_state_dict({}, launch="two")
            batch = next(iter(trainer))
            metrics = batch.plan["metrics"]
            assert metrics["distinct_tokens"] < metrics["tokens"] / 2
            shard = next(batch.mini_batches())
            assert is_shard_of(shard, two[0, rank])
            shard.ack()
        state = ranks[0].state_dict()
    with TrainerClient(serving.grpc_address, "trees", 0, dp_size=1, timeout_s=20) as alone:
        alone.load_state_dict(state)
        (shard,) = next(iter(alone)).mini_batches()
        assert is_shard_of(shard, expected(1)[1, 0])
        assert all(micro.is_tree for micro in shard.micro_batches())
