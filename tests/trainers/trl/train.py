"""`python -m tests.trainers.trl.train JOB`: one training as a process of its own, also one of several ranks.

JOB is a JSON file with the fields of `Job`. The final weights are written to its `weights`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import GRPOTrainer

from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer
from tests.trainers.trl.play import Replay, config, policy, prompts_of, replayed, rollouts, tokenizer, weights

LOW = 16


@dataclass(frozen=True)
class Job:
    """directory: for checkpoints. game: `replay`: rollouts that are given; `low`: low words are rewarded. gristmill:
    the adapter's options; None: TRL alone. config: more of GRPOConfig. kill_at: the step after which it is killed."""

    directory: str
    weights: str
    game: str = "low"
    gristmill: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    kill_at: int | None = None

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


LEARNING: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "max_completion_length": 6,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_steps": 20,
}
"""Of GRPOConfig, for a policy that learns in 20 steps."""


def low(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward function: the share of low words."""
    return [sum(token < LOW for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(job: Job) -> Any:
    more: dict[str, Any] = {"processing_class": tokenizer(), "args": config(Path(job.directory), **job.config)}
    if job.game == "replay":
        known = rollouts(prompts=4)
        more |= {"reward_funcs": replayed, "train_dataset": prompts_of(known), "rollout_func": Replay(known)}
    else:
        more |= {"reward_funcs": low, "train_dataset": Dataset.from_list([{"prompt": f"w{n}"} for n in range(2, 42)])}
    if job.gristmill is None:
        return GRPOTrainer(model=policy(), **more)
    gristmill = Gristmill(**job.gristmill)
    if gristmill.rollouts == "workers":
        more |= {"reward_funcs": None, "train_dataset": None, "rollout_func": None}
    return GristmillGRPOTrainer(model=policy(), gristmill=gristmill, **more)


class Killed(TrainerCallback):  # type: ignore[misc]
    """Kills the process with all that it has not written."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(job: Job) -> None:
    trainer = trainer_of(job)
    if job.kill_at is not None:
        trainer.add_callback(Killed(job.kill_at))
    trainer.train(resume_from_checkpoint=True if job.resume else None)
    if trainer.accelerator.is_main_process:
        save_file(weights(trainer.accelerator.unwrap_model(trainer.model)), job.weights)


if __name__ == "__main__":
    main(Job(**json.loads(Path(sys.argv[1]).read_text())))
