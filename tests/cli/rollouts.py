"""Rollouts and training of a small run, for commands to watch."""

from __future__ import annotations

from gristmill import RolloutClient, TrainerClient
from tests.cli.terminal import CONFIG


def create(address: str, run: str, **settings: object) -> None:
    with RolloutClient(address, run) as client:
        client.create_run({**CONFIG, **settings})


def fill(address: str, run: str, *uids: str) -> None:
    """Whole groups of these uids."""
    with RolloutClient(address, run) as client:
        for uid in uids:
            for sample in range(2):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1, 2], [3], reward=float(sample), is_last_step=True)


def train(address: str, run: str, batches: int = 1) -> None:
    """Both ranks, each in turn, of so many batches."""
    for _ in range(batches):
        for rank in range(2):
            with TrainerClient(address, run, rank, dp_size=2, prefetch=0) as trainer:
                for shard in next(iter(trainer)).mini_batches():
                    shard.ack()
