"""A run whose batch waits for columns that trainers write, and what a trainer writes for its shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load

from gristmill._wire.columns import Array
from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import Run
from tests.pipeline.written import column, files
from tests.run.harness import (
    CONFIG,
    Bench,
    row,
    table,
)
from tests.run.logs import RecordingLog
from tests.strategies import Row

SETTINGS: dict[str, Any] = {
    "policy_mini_batch_size": 1,
    "dp_size": 2,
    "critic_mini_batch_size": 2,
    "merge": "prefix",
    "advantage_estimator": "gae",
    "kl_in_reward": {"coef": 0.5, "estimator": "k1"},
    "kl_from": "rollout_logprobs",
    "columns": [column("values"), column("ref_logprobs")],
}
NAMES = ("values", "ref_logprobs")
PLACES = [(mini_batch, rank) for mini_batch in range(2) for rank in range(2)]


def rows(uid: str) -> list[Row]:
    """A group of two trajectories: one of two steps that merge, one of a step."""
    first = row(uid, 0, last=False, response=(3, 4), rollout_logprobs=[-1.0, -2.0])
    second = row(uid, 0, 1, prompt_token_ids=[1, 2, 3, 4, 5], response=(6,), rollout_logprobs=[-3.0])
    return [first, second, row(uid, 1, response=(7, 8, 9), reward=0.5, rollout_logprobs=[-1.0, -1.0, -1.0])]


def forwarded(store: Any = None, log: RecordingLog | None = None, **settings: Any) -> Bench:
    """A run with a batch of two groups, whose forward shards are out."""
    bench = Bench(build_batch=build_batch, store=store or MemoryShardStore(), log=log, **SETTINGS | settings)
    submit(bench.run)
    bench.make_batches()
    return bench


def submit(run: Run) -> None:
    for uid in ("a", "b"):
        run.submit(table(*rows(uid)))


def shard(run: Run, mini_batch: int, rank: int, model: Any = "policy") -> dict[str, Array]:
    return load(b"".join(run.read_shard(0, ShardAddress(model, mini_batch, rank))))


def values_for(tensors: Mapping[str, Array], names: tuple[str, ...] = NAMES, scale: float = 1.0) -> dict[str, Array]:
    """What a trainer computes of a shard: something of each token, and noise on padding."""
    tokens = tensors["sequences"][:, -tensors["response_mask"].shape[1] :].astype(np.float32)
    response_mask = tensors["response_mask"] == 1
    return {
        name: np.where(response_mask, scale * tokens / 8 + index, 99).astype(np.float32)
        for index, name in enumerate(names)
    }


def write(run: Run, mini_batch: int, rank: int, names: tuple[str, ...] = NAMES, **more: Any) -> int:
    incarnation = more.pop("incarnation", 1)
    values = values_for(shard(run, mini_batch, rank), names, **more)
    lacking: int = run.write(0, mini_batch, rank, incarnation, values)
    return lacking


def write_all(run: Run, **more: Any) -> None:
    for mini_batch, rank in PLACES:
        write(run, mini_batch, rank, **more)


def train_shards(run: Run, dp_size: int = 2) -> dict[ShardAddress, bytes]:
    addresses = [ShardAddress("policy", mini_batch, rank) for mini_batch in range(2) for rank in range(dp_size)]
    addresses += [ShardAddress("critic", 0, rank) for rank in range(dp_size)]
    return {address: b"".join(run.read_shard(0, address)) for address in addresses}


def as_sent_with_rows(dp_size: int = 2) -> dict[ShardAddress, bytes]:
    """The shards of the same batch, whose rollout workers sent what `values_for` writes."""
    settings = SETTINGS | {
        "dp_size": dp_size,
        "columns": [spec | {"source": "rollout"} for spec in SETTINGS["columns"]],
    }
    config = parse_config(CONFIG | settings)
    sent = [
        one | {name: [token / 8 + index for token in one["response_ids"]] for index, name in enumerate(NAMES)}
        for uid in ("a", "b")
        for one in rows(uid)
    ]
    steps = from_rows(sent, step_wise=True, columns=config.columns)
    batch = build_batch(steps, config, run="run", batch=0, policy_version=0)
    return files(batch)
