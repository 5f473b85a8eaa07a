"""verl's configuration for a model of a few thousand weights on the CPU, as overrides of its own defaults."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

# Where a mean is of few tokens and updates are compared, bfloat16 is all that would be seen.
_ENGINES = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
_PRECISION = [f"+{engine}.mixed_precision.{kind}_dtype=fp32" for engine in _ENGINES for kind in ("param", "reduce")]

CPU = [
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console]",
    "trainer.val_before_train=False",
    "trainer.total_training_steps=1",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=12",
    "+ray_kwargs.ray_init.num_gpus=2",
    # Whatever other clusters this machine has.
    "+ray_kwargs.ray_init.address=local",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "critic.strategy=fsdp2",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    *_PRECISION,
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "algorithm.adv_estimator=grpo",
]
RUN = [
    "trainer.v1.trainer_mode=gristmill",
    "+trainer.v1.gristmill.address=127.0.0.1:50051",
    "+trainer.v1.gristmill.run=my-run",
]


def model(folder: Path) -> str:
    return f"actor_rollout_ref.model.path={folder}"


def batches(groups: int, samples: int, mini_batch: int, micro_batch: int) -> list[str]:
    """Of that many prompts, with that many rollouts each; prompts in a mini-batch; rows in a micro-batch."""
    return [
        f"data.train_batch_size={groups}",
        f"actor_rollout_ref.rollout.n={samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_batch}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro_batch}",
    ]


def sgd(rate: float) -> list[str]:
    """Updates that are the gradients, times the rate."""
    optimizer = "actor_rollout_ref.actor.optim"
    return [
        f"{optimizer}.optimizer=SGD",
        f"{optimizer}.lr={rate}",
        f"{optimizer}.weight_decay=0",
        f"{optimizer}.clip_grad=1e9",
        "actor_rollout_ref.actor.grad_clip=1e9",
    ]


def compose_config(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(files("verl") / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", list(overrides))
