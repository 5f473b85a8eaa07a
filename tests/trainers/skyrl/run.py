"""A training process of its own: `python -m tests.trainers.skyrl.run RAY_ADDRESS '{...}'`, the arguments of `main`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

from gristmill.adapters.skyrl import Gristmill, GristmillFullyAsyncPPOTrainer, GristmillPPOTrainer
from tests.trainers.skyrl.play import config
from tests.trainers.skyrl.sampling import Sampler
from tests.trainers.skyrl.training import Trained, connected, train

LEARNING = {
    "trainer__policy__optimizer_config__lr": 0.01,
    "trainer__policy__optimizer_config__adam_betas": "[0.9,0.99]",
    "trainer__policy_mini_batch_size": 2,
    "trainer__micro_train_batch_size_per_gpu": 5,
    "generator__merge_stepwise_output": True,
    "trainer__epochs": 100,
}
# One update a batch, of rollouts that are two versions old at the end.
ASYNC = {
    "trainer__policy__optimizer_config__lr": 0.03,
    "generator__n_samples_per_prompt": 8,
    "trainer__fully_async__enabled": True,
    "trainer__fully_async__max_staleness_steps": 2,
    "trainer__fully_async__num_parallel_generation_workers": 6,
    "trainer__policy_mini_batch_size": 4,
    "trainer__algorithm__policy_loss_type": "rollout_is",
}


def main(address: str, run: str, directory: str, steps: int, is_async: bool = False, **overrides: Any) -> Trained:
    """Trains up to a step, from the last checkpoint where there is one. Writes `steps.jsonl` and `calls.jsonl`."""
    where = Path(directory)
    cfg = config(where, **LEARNING | (ASYNC if is_async else {}) | {"trainer__max_training_steps": steps} | overrides)
    return train(
        GristmillFullyAsyncPPOTrainer if is_async else GristmillPPOTrainer,
        cfg,
        Sampler(cfg, where / "calls.jsonl", is_slow=is_async),
        prompts=40,
        log=where / "steps.jsonl",
        gristmill=Gristmill(address, run),
    )


if __name__ == "__main__":
    with connected(sys.argv[1]):
        main(**json.loads(sys.argv[2]))
