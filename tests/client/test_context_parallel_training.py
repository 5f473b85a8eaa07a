"""Training with context parallelism is training without: the same loss and the same gradients, to 1e-9, of a dense and
a mixture-of-experts model, on two data-parallel ranks of two context-parallel ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests.client.cp_trainers import CP_SIZE, DP_SIZE, EXPERTS, VOCABULARY, train, trained
from tests.strategies import Row

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"layout": "packed"},
    "zigzag": {"layout": "packed", "cp_shards": "zigzag", "pad_rows_to_multiple_of": 8},
    "contiguous": {"layout": "packed", "cp_shards": "contiguous", "pad_rows_to_multiple_of": 2},
    "blocks": {"layout": "prefix_tree", "cp_shards": "blocks", "pad_rows_to_multiple_of": 4},
}


def rows(random: Random) -> list[Row]:
    """Samples of two steps, which merge, after prompts of 100 tokens that they share."""

    def some(count: int) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(count)]

    made: list[Row] = []
    for prompt in range(4):
        shared = some(100)
        for sample in range(4):
            tokens = list(shared)
            for step in range(2):
                response = some(random.randint(10, 40))
                made.append(
                    {
                        "uid": f"p{prompt}",
                        "sample": sample,
                        "step": step,
                        "is_last_step": step == 1,
                        "prompt_token_ids": tokens,
                        "response_ids": response,
                        "loss_mask": [random.randrange(2) for _ in response],
                        "rollout_logprobs": [-random.uniform(2.5, 3.5) for _ in response],
                        "reward": random.uniform(-1, 1),
                    }
                )
                tokens = tokens + response + some(3)
    return made


def write_shards(given: list[Row], directory: Path, **changes: Any) -> Path:
    config = {
        "train_batch_size": 4,
        "n_samples_per_prompt": 4,
        "policy_mini_batch_size": 2,
        "step_wise": True,
        "merge": "prefix",
        "loss_reduction": "token_mean",
        "micro_batch": {"max_tokens": 400},
        "dp_size": DP_SIZE,
        "cp_size": CP_SIZE,
    }
    batch = build_batch(from_rows(given), parse_config(config | changes), run="r", batch=0)
    for shard in batch.shards:
        path = directory / shard.address.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(join(shard.iovec()))
    return directory


@pytest.mark.slow
def test_loss_and_gradients_of_parts_are_those_of_whole_rows(tmp_path: Path) -> None:
    given, experts = rows(Random(3)), [1, EXPERTS]
    paths = {kind: write_shards(given, tmp_path / kind, **changes) for kind, changes in KINDS.items()}
    whole = sorted(paths.pop("whole").glob("*/*.safetensors"))
    expected = {count: trained(iter(whole), count) for count in experts}
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    common = (str(tmp_path / "rendezvous"), list(map(str, paths.values())), experts, answers)
    processes = [context.Process(target=train, args=(number, *common)) for number in range(DP_SIZE * CP_SIZE)]
    for process in processes:
        process.start()
    results = [answers.get() for _ in range(len(paths) * len(experts))]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    for _, count, (loss, *gradients) in results:
        expected_loss, expected_gradients = expected[count]
        assert loss == pytest.approx([expected_loss], rel=1e-9)
        assert max(float(one.abs().max()) for one in expected_gradients) > 1e-3
        for mine, reference in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine, dtype=torch.float64), reference.flatten(), rtol=1e-9, atol=1e-12
            )
