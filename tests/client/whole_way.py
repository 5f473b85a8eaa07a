"""A small run of two prompts a batch, for tests of the whole way: what is rolled out, and who trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill import (
    RolloutClient,
    TrainerClient,
)
from tests.on_loop import Service
from tests.rows import make_config

CONFIG = make_config(
    train_batch_size=2, n_samples_per_prompt=2, merge="prefix", loss_reduction="token_mean", update_epochs_per_batch=2
)


ROW = {"prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}


def trainer_of(service: Service, client: RolloutClient, rank: int = 0, **more: Any) -> TrainerClient:
    return TrainerClient(service.grpc_address, client.run, rank, timeout_s=20, **more)


def roll_out(client: RolloutClient, uids: Sequence[str], **more: Any) -> None:
    """Two samples of two turns each; the second extends the first."""
    for uid in client.begin_groups(uids):
        for sample in range(2):
            with client.trajectory(uid, sample, policy_version=0, **more) as trajectory:
                assert trajectory.step([1, 2, 3], [4, 5])
                assert trajectory.step([1, 2, 3, 4, 5, 6], [7], reward=float(sample), is_last_step=True)


def prompts(first: int, count: int) -> list[str]:
    return [f"p{index}" for index in range(first, first + count)]
