"""A training run in an experiment tracker: TensorBoard or Weights & Biases, both in files, with no account or network.

    gristmill serve &
    pip install tensorboard        # or wandb
    python examples/trackers.py --to tensorboard --logs logs      # then: tensorboard --logdir logs
    python examples/trackers.py --to wandb --logs logs            # then: wandb sync logs/wandb/offline-run-*

The task and the training are those of grpo.py. `trainer.metrics()` is the one call: a dictionary of numbers by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from grpo import SETTINGS, TinyModel, flags, roll_out, train

from gristmill import RolloutClient, TrainerClient


class Log(Protocol):
    def __call__(self, metrics: dict[str, float], step: int) -> None: ...


@contextmanager
def tensorboard(directory: str) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(directory) as writer:

        def log(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def wandb(directory: str) -> Iterator[Log]:
    import wandb

    with wandb.init(project="gristmill", dir=directory, mode="offline") as run:
        yield lambda metrics, step: run.log(metrics, step=step)


def main() -> None:
    parser = flags("trackers-example")
    parser.add_argument("--to", choices=["tensorboard", "wandb"], default="tensorboard")
    parser.add_argument("--logs", default="logs", help="the directory to write to (default: %(default)s)")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tracker = {"tensorboard": tensorboard, "wandb": wandb}[given.to]
    with (
        RolloutClient(given.address, given.run) as client,
        TrainerClient(given.address, given.run, rank=0) as trainer,
        tracker(given.logs) as log,
    ):
        client.delete_run()
        client.create_run(SETTINGS)
        batches = iter(trainer)
        for step in range(given.steps):
            roll_out(client, model, step)
            batch = next(batches)
            log(trainer.metrics(), batch.number)
            train(batch, model, optimizer)
            trainer.announce_policy_version(step + 1)
        client.finish()


if __name__ == "__main__":
    main()
