"""One update by verl's workers is the same from the service's shards as from verl's own batch of the same rollouts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.protocol import BatchData
from verl.utils import tensordict_utils

from gristmill._torch.conversion import Conversion
from gristmill._torch.shard_files import parse_shard
from gristmill._wire.addresses import Position
from gristmill._wire.rows import from_rows
from gristmill.adapters.verl._tensor_dicts import MiniBatchData
from gristmill.torch import Shard
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests.trainers.verl import tiny_model
from tests.trainers.verl.rollouts import Row, native, rollouts
from tests.trainers.verl.verl_settings import CPU, batches, model, sgd

# Importing verl takes long where others are at work.
pytestmark = pytest.mark.timeout(900)

GROUPS, SAMPLES = 6, 4
# So large a rate that an update keeps its digits when a weight takes it: at 0.1 those of the smallest gradients, 7e-6,
# would be rounded to float32's 3.7e-9 at weights of 0.05, which is 5e-4 of them whatever the batch.
OVERRIDES = [*CPU, *batches(GROUPS, SAMPLES, GROUPS, 2), *sgd(rate=10.0)]
CONFIG: dict[str, Any] = {
    "train_batch_size": GROUPS,
    "n_samples_per_prompt": SAMPLES,
    "policy_mini_batch_size": GROUPS,
    "step_wise": True,
    "layout": "packed",
}
WAYS: dict[str, dict[str, Any]] = {
    "by rows": {"micro_batch": {"size": 4, "full": True}},
    "by rows, the last micro-batch short": {"micro_batch": {"size": 5}},
    "by tokens, balanced": {"micro_batch": {"max_tokens": 120}, "balance": "tokens"},
    "merged, by rows": {"micro_batch": {"size": 4}, "merge": "prefix"},
    "merged, by tokens": {"micro_batch": {"max_tokens": 150}, "merge": "prefix"},
}
# Whether verl's engine runs rows without padding: `use_remove_padding`.
ENGINES = {"packed": True, "padded": False}
FIELDS = ("input_ids", "position_ids", "prompts", "responses", "loss_mask", "response_mask", "advantages")


def shards(rows: list[Row], config: Mapping[str, Any]) -> list[Shard]:
    """Of the one mini-batch, rank after rank."""
    built = build_batch(from_rows(rows), parse_config(dict(config)), run="run", batch=0)
    mapped = []
    for shard in built.shards:
        tensors, metadata = parse_shard(np.frombuffer(bytearray(join(shard.iovec())), np.uint8), "here")
        mapped.append(Shard(tensors, metadata, Conversion(), Position(0, 0, 0), is_mapped=False))
    return mapped


def settings(rows: int, micro_batch: int, engine: str) -> dict[str, Any]:
    """What verl's trainer says of a mini-batch."""
    return {
        "temperature": 1.0,
        "calculate_entropy": False,
        "global_batch_size": rows,
        "mini_batch_size": rows,
        "epochs": 1,
        "seed": 42,
        "dataloader_kwargs": {"shuffle": False},
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch,
        "use_remove_padding": ENGINES[engine],
    }


@pytest.fixture(scope="module", params=[1, 2])
def updates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By way and engine, the update of each weight; those of "verl" are of verl's own batch."""
    ranks, folder = request.param, tmp_path_factory.mktemp("updates")
    tiny_model.save(folder / "model")
    rows = rollouts(GROUPS, SAMPLES, seed=5)
    assert len(rows) % ranks == 0, "verl gives each rank equally many rows"
    jobs: dict[str, list[Any]] = {}
    for engine in ENGINES:
        data = tensordict_utils.assign_non_tensor(native(rows), **settings(len(rows), 1, engine))
        jobs[f"verl, {engine}"] = list(BatchData(data).chunk(ranks))
        for way, config in WAYS.items():
            part = MiniBatchData(shards(rows, CONFIG | config | {"dp_size": ranks}))
            known = settings(len(part.is_real), part.rows_per_micro_batch, engine)
            jobs[f"ours, {way}, {engine}"] = list(BatchData(part.of_ranks(FIELDS, known)).chunk(ranks))
    for name, parts in jobs.items():
        for rank, chunk in enumerate(parts):
            torch.save(chunk, folder / f"{name}-{rank}.pt")
    overrides = [*OVERRIDES, model(folder / "model")]
    (folder / "jobs.json").write_text(json.dumps({"overrides": overrides, "names": list(jobs)}))
    run_ranks(folder, ranks)
    return {name: torch.load(folder / f"{name}-update.pt") for name in jobs}


def run_ranks(folder: Path, ranks: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("updates.py")
    arguments = [sys.executable, "-W", "ignore", str(script), str(folder)]
    processes = [subprocess.Popen([*arguments, str(rank), str(ranks), str(port)]) for rank in range(ranks)]
    assert [process.wait(timeout=800) for process in processes] == [0] * ranks


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_an_update_is_that_of_verls_own_batch(updates: dict[str, Any], way: str, engine: str) -> None:
    ours = updates[f"ours, {way}, {engine}"]
    parity = {
        name: float((ours[name] - expected).abs().max() / expected.abs().max())
        for name, expected in updates[f"verl, {engine}"].items()
    }
    assert max(parity.values()) < 1e-4, parity


def test_data_that_is_cut_for_other_ranks_is_refused() -> None:
    parts = MiniBatchData(shards(rollouts(GROUPS, SAMPLES, seed=5), CONFIG | WAYS["by rows"])).of_ranks(FIELDS, {})
    with pytest.raises(ValueError, match="a mini-batch of 1 ranks was passed to 2"):
        BatchData(parts).chunk(2)
