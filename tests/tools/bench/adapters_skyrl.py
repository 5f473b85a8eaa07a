"""`make bench-skyrl`: the time of a training step in the adapter, compared with SkyRL's own preparation of the batch.

SkyRL makes per-token rewards and its batch of what a generator returned, then advantages, and scales them by the loss's
reduction. Through gristmill the adapter submits the rows, the service makes shards of them, and the adapter opens those
of all ranks, makes SkyRL's batch of them and acknowledges. Nothing is sampled and no model runs; what both do, SkyRL's
metrics of rewards, counts for neither. SkyRL's environment has not all that the other benchmarks need, so that this one
is run alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

import numpy as np
from loguru import logger
from skyrl.train import trainer as skyrl_trainer
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer
from gristmill.adapters.skyrl._session import Session
from tests.tools.bench.clock import Clock, Spent
from tests.tools.bench.figures import Figure, report
from tests.tools.bench.processes import served
from tests.trainers.skyrl.play import WORDS, Engine, Prompts, Recorded, Tracker, config, save_model, tokenizer

PROMPTS, SAMPLES, PROMPT, RESPONSE, RANKS = 250, 8, 200, 800, 4
ROWS = PROMPTS * SAMPLES
ROUNDS = 7
_SIZES: dict[str, Any] = {
    "trainer__train_batch_size": PROMPTS,
    "trainer__policy_mini_batch_size": PROMPTS // 5,
    "generator__n_samples_per_prompt": SAMPLES,
    "generator__step_wise_trajectories": False,
}


def figures() -> Iterator[Figure]:
    """`skyrl_cpu`: what the trainer's process computes of both, which a busy machine does not change."""
    rounds = _rounds()[1:]
    for name, kind in (("adapters.skyrl", ""), ("adapters.skyrl_cpu", "cpu ")):
        ratio = statistics.median(spent[f"{kind}ours"] / spent[f"{kind}theirs"] for spent in rounds)
        bound = statistics.median(spent[f"{kind}theirs"] for spent in rounds)
        yield Figure(name, ratio, "x SkyRL's own batch", 0.2, bound, "s, SkyRL's own batch")


def _rounds() -> list[Spent]:
    logger.remove()
    clock = Clock()
    with (
        tempfile.TemporaryDirectory() as directory,
        served() as service,
        without_reward_metrics(),
    ):
        save_model(Path(directory) / "model")
        theirs = trainer_of(RayPPOTrainer, Path(directory), **_SIZES)
        named = {"gristmill": Gristmill(service.grpc_address, "bench")}
        ours = trainer_of(GristmillPPOTrainer, Path(directory), named, **_SIZES)
        ours._session = Session(ours._gristmill, ours._settings(RANKS), dp_size=RANKS, auto_commit=True)
        ours._session.restart(None)
        output, uids = _output()
        rounds = []
        for _ in range(ROUNDS + 1):
            clock.spent.clear()
            with clock.on("theirs"):
                prepare(theirs, dict(output), uids)
            _step(ours, clock, dict(output), uids)
            rounds.append(clock.spent.copy())
        ours._session.close()
    return rounds


def without_reward_metrics() -> AbstractContextManager[object]:
    """SkyRL does not compute its metrics of rewards meanwhile: they are no part of what is compared."""
    return patch.object(
        skyrl_trainer,
        "get_metrics_from_generator_output",
        lambda *_: {"avg_score": 0.0, "pass_at_n": 0.0, "mean_positive_reward": 0.0},
    )


def prepare(trainer: Any, output: dict[str, Any], uids: list[str]) -> Any:
    data = trainer.convert_to_training_input(*trainer.postprocess_generator_output(output, uids))
    data["values"] = None
    data = trainer.compute_advantages_and_returns(data)
    boundaries = data.metadata["policy_mini_batch_boundaries"]
    return trainer._normalize_advantages(data, boundaries, data.metadata.get("policy_prompt_boundaries"))


def _step(trainer: Any, clock: Clock, output: dict[str, Any], uids: list[str]) -> None:
    """A step as SkyRL's loop makes it: its own part of it is left out."""
    trainer.global_step += 1
    with clock.on("ours"):
        trainer._submit(trainer._parts(output, uids))
        data = trainer.convert_to_training_input(output, uids)
        data = trainer.compute_advantages_and_returns(data)
        trainer._normalize_advantages(data)
        for batch in trainer._batch.values():
            batch.ack()
        trainer._session.announce(trainer.global_step)
    assert len(data["advantages"]) == ROWS


def _output() -> tuple[dict[str, Any], list[str]]:
    """What a generator returns, in its own types."""
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(2, WORDS, PROMPT).tolist() for _ in range(PROMPTS) for _ in range(SAMPLES)]
    uids = [str(row // SAMPLES) for row in range(ROWS)]
    return {
        "prompt_token_ids": prompts,
        "response_ids": [drawn.integers(2, WORDS, RESPONSE).tolist() for _ in range(ROWS)],
        "rewards": drawn.random(ROWS).tolist(),
        "loss_masks": [[1] * RESPONSE for _ in range(ROWS)],
        "stop_reasons": ["stop"] * ROWS,
        "rollout_logprobs": (-drawn.random((ROWS, RESPONSE))).tolist(),
        "trajectory_ids": [TrajectoryID(uid, row % SAMPLES) for row, uid in enumerate(uids)],
        "is_last_step": None,
    }, uids


def trainer_of(kind: Any, directory: Path, named: dict[str, Any] | None = None, **sizes: Any) -> Any:
    """A trainer of SkyRL's that samples nothing and trains no model. sizes: its settings, as `config` takes them."""
    cfg = config(directory, **{"trainer__micro_train_batch_size_per_gpu": 8} | sizes)
    trainer = kind(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=tokenizer(cfg),
        train_dataset=Prompts(cfg.trainer.train_batch_size),
        inference_engine_client=Engine(),
        generator=Recorded(cfg),
        **(named or {}),
    )
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: RANKS)
    logger.remove()
    return trainer


if __name__ == "__main__":
    sys.exit(report("adapters_skyrl", figures()))
