"""One training with SkyRL's workers on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

import ray
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorInterface

from tests.trainers.skyrl.cpu_workers import CriticWorker, PolicyWorker, RefWorker
from tests.trainers.skyrl.play import Engine, Prompts, Tracker, tokenizer, weights_of

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """The weights at the end, and what was logged."""

    policy: Weights
    critic: Weights
    logs: list[dict[str, Any]]


@contextmanager
def connected(ray_address: str) -> Iterator[None]:
    """Within it this process may train."""
    # Workers run functions of SkyRL's own, too.
    patched = {"worker_process_setup_hook": "tests.trainers.skyrl.cpu_patches.applied"}
    ray.init(address=ray_address, log_to_driver=False, runtime_env=patched)
    yield
    ray.shutdown()


def train(
    kind: Any,
    cfg: SkyRLTrainConfig,
    generator: GeneratorInterface,
    prompts: int,
    log: Path | None = None,
    **more: Any,
) -> Trained:
    """Trains as SkyRL's experiment does. kind: the trainer's class. log: where the tracker writes. more: arguments of
    the trainer."""
    tracker = Tracker(log)
    trainer = kind(
        cfg=cfg,
        tracker=tracker,
        tokenizer=tokenizer(cfg),
        train_dataset=Prompts(prompts),
        inference_engine_client=Engine(),
        generator=generator,
        **more,
    )
    trainer.build_models(PolicyWorker, CriticWorker, RefWorker)
    asyncio.run(trainer.train())
    critic = {}
    if trainer.critic_model is not None:
        critic = ray.get(trainer.critic_model.async_run_ray_method("pass_through", "weights"))[0]
    return Trained(weights_of(cfg), critic, tracker.logs)
