"""`make bench-skyrl`: from Python lists to published shards, compared with SkyRL's way from them to its own batch.

Both get a step-wise generator output whose turns share prefixes, and merge them. SkyRL merges the steps, makes rewards
per token, its padded batch, advantages and their scaling by the loss's reduction, all in memory. Ours checks, merges,
scores, schedules and lays out the rows, and writes the shards as files of shared memory. Run in SkyRL's environment.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

from loguru import logger
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from tests.tools.bench.adapters_skyrl import RANKS, prepare, trainer_of, without_reward_metrics
from tests.tools.bench.figures import Figure, report
from tests.tools.bench.lists import NAMES, built, generator_output, published, spent
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.rollouts import rollouts
from tests.tools.bench.workloads import Workload
from tests.trainers.skyrl.play import save_model

ROUNDS = 5
_REACH = 4.0


def figures() -> Iterator[Figure]:
    logger.remove()
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory, without_reward_metrics():
        save_model(Path(directory) / "model")
        for name in NAMES:
            yield from _figures(name, Path(directory))


def _figures(name: str, directory: Path) -> Iterator[Figure]:
    work = rollouts(name)
    ours, theirs = generator_output(work, is_apart=True), _theirs(work)
    trainer = _trainer(work, directory)
    uids = list(work.steps.uids)
    target = directory / name
    merged = len(prepare(trainer, dict(theirs), uids)["advantages"])
    assert 0 <= merged - built(ours, work).plan.rows < RANKS, "both merge the same steps; SkyRL pads to its ranks"

    def publish() -> None:
        published(ours, work, target)
        shutil.rmtree(target)

    rounds = [(_spent(publish), _spent(lambda: prepare(trainer, dict(theirs), uids))) for _ in range(ROUNDS)]
    for place, (kind, reach) in enumerate((("", _REACH), ("_cpu", None))):
        ratio = statistics.median(them[place] / us[place] for us, them in rounds)
        theirs_s = statistics.median(them[place] for _, them in rounds)
        yield Figure(
            f"once.lists_over_skyrl.{name}{kind}",
            ratio,
            "times as fast as SkyRL",
            reach,
            theirs_s * 1e3,
            "ms, SkyRL",
            at_most=False,
        )


def _theirs(work: Workload) -> dict[str, Any]:
    """The same lists under SkyRL's names; rewards per token, as its generator gives them to steps."""
    output = generator_output(work, is_apart=True)
    lengths = [len(response) for response in output["response_ids"]]
    rewards = [[0.0] * (length - 1) + [reward] for length, reward in zip(lengths, output["rewards"], strict=True)]
    keys = zip(output["uids"], output["samples"], strict=True)
    return {
        **{name: output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")},
        "rewards": rewards,
        "stop_reasons": ["stop"] * len(lengths),
        "trajectory_ids": [TrajectoryID(uid, sample) for uid, sample in keys],
        "is_last_step": output["is_last_step"],
    }


def _trainer(work: Workload, directory: Path) -> Any:
    prompts = len(set(work.steps.uids))
    samples = int(work.steps.samples.max()) + 1
    return trainer_of(
        RayPPOTrainer,
        directory,
        trainer__train_batch_size=prompts,
        trainer__policy_mini_batch_size=prompts // 4,
        generator__n_samples_per_prompt=samples,
        generator__step_wise_trajectories=True,
        generator__merge_stepwise_output=True,
    )


def _spent(work: Callable[[], object]) -> tuple[float, float]:
    gc.collect()
    return spent(work)


if __name__ == "__main__":
    sys.exit(report("lists_skyrl", figures()))
