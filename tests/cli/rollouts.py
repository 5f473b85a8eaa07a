"""Rollouts and training of a small run, for commands to watch."""

from __future__ import annotations

from gristmill import RolloutClient, TrainerClient
from tests.cli.terminal import CONFIG

# A single row makes no two micro-batches.
FAILS = {
    "train_batch_size": 1,
    "dp_size": 1,
    "micro_batch": {"max_tokens": 100},
    "on_misaligned": "error",
    "vpp_size": 2,
    "microbatch_group_size": 2,
}


def create(address: str, run: str, **settings: object) -> None:
    with RolloutClient(address, run) as client:
        client.create_run({**CONFIG, **settings})


def fill(address: str, run: str, *uids: str, samples: int = 2) -> None:
    """Whole groups of these uids."""
    with RolloutClient(address, run) as client:
        for uid in uids:
            for sample in range(samples):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1, 2], [3], reward=float(sample), is_last_step=True)
            for sample in range(samples, 2):
                client.abort_trajectory(uid, sample)


def train(address: str, run: str, batches: int = 1) -> None:
    """Both ranks, each in turn, of that many batches."""
    for _ in range(batches):
        for rank in range(2):
            with TrainerClient(address, run, rank, dp_size=2, prefetch=0) as trainer:
                for shard in next(iter(trainer)).mini_batches():
                    shard.ack()
