"""One demonstration: its size, its seed, gristmill's settings for the run, and its files."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from game import LARGEST, MAX_TURNS, PAD

RUN = "demo"
WORKERS = 2
DP_SIZE = 2

GROUPS_PER_BATCH = 16
SAMPLES_PER_GROUP = 16

BEST_SUCCESS = min(1.0, (2**MAX_TURNS - 1) / LARGEST)
"""The share of games that the best player wins, who halves the remaining numbers with each guess."""

BLIND_SUCCESS = MAX_TURNS / LARGEST
"""The largest share of games that a player wins who does not read the hints."""

RUN_CONFIG: dict[str, Any] = {
    "train_batch_size": GROUPS_PER_BATCH,
    "n_samples_per_prompt": SAMPLES_PER_GROUP,
    "policy_mini_batch_size": GROUPS_PER_BATCH // 2,
    "step_wise": True,
    "merge": "prefix",
    "trajectory_score": "sum",
    "advantage_estimator": "grpo",
    "loss_reduction": "token_mean",
    "max_staleness": 1,
    "dp_size": DP_SIZE,
    "micro_batch": {"max_tokens": 1024},
    "pad_token_id": PAD,
}


LAYOUTS = ("left_padded", "prefix_tree")


@dataclass(frozen=True)
class Experiment:
    """The configuration of every process of the demonstration. directory: temporary; removed at the end. layout: one of
    `LAYOUTS`."""

    directory: Path
    seed: int
    batches: int
    layout: str

    @property
    def run_config(self) -> dict[str, Any]:
        return RUN_CONFIG | {"layout": self.layout}

    @property
    def weights(self) -> Path:
        return self.directory / "policy.safetensors"

    @property
    def games(self) -> list[tuple[str, int]]:
        """Return every prompt group of the run: its uid and its secret. All numbers are equally often the secret."""
        generator = random.Random(self.seed)
        secrets: list[int] = []
        while len(secrets) < self.batches * GROUPS_PER_BATCH:
            secrets += generator.sample(range(1, LARGEST + 1), LARGEST)
        return [(f"game-{index}", secret) for index, secret in enumerate(secrets[: self.batches * GROUPS_PER_BATCH])]
