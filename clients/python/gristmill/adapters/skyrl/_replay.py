"""After a restart, returns rollouts that the run already stores instead of sampling them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs

from gristmill.adapters.skyrl._session import Rows


class Replay(GeneratorInterface):  # type: ignore[misc]
    """A generator that returns each stored rollout once, and samples all others.

    generator: the trainer's generator. stored: rollouts by uid, in order if a prompt was sampled several times. on_end:
    called after all stored rollouts were returned. dtypes: the dtypes of the run's columns in outputs, by name.
    """

    def __init__(
        self,
        generator: GeneratorInterface,
        stored: dict[str, list[Rows]],
        step_wise: bool,
        on_end: Callable[[], None],
        dtypes: Mapping[str, str],
    ) -> None:
        self._generator, self._stored, self._step_wise, self._on_end = generator, stored, step_wise, on_end
        self._dtypes = dtypes

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        uids = list(dict.fromkeys(trajectory.instance_id for trajectory in input_batch["trajectory_ids"] or ()))
        metadata = input_batch["batch_metadata"]
        is_training = metadata is None or metadata.training_phase == "train"
        if not is_training or not uids or not all(self._stored.get(uid) for uid in uids):
            return await self._generator.generate(input_batch)
        rows = [row for uid in uids for row in self._stored[uid].pop(0)]
        if not any(self._stored.values()):
            self._on_end()
        return generator_output(rows, self._step_wise, self._dtypes)


def generator_output(rows: Sequence[dict[str, Any]], step_wise: bool, dtypes: Mapping[str, str]) -> GeneratorOutput:
    """Convert submitted rows back to the generator's output. dtypes: the dtypes of the columns to include, by name."""
    output: dict[str, Any] = {
        "prompt_token_ids": [row["prompt_token_ids"] for row in rows],
        "response_ids": [row["response_ids"] for row in rows],
        "rewards": [row["reward"] for row in rows],
        "loss_masks": [row["loss_mask"] for row in rows],
        "stop_reasons": [row["stop_reason"] for row in rows] if any(row["stop_reason"] for row in rows) else None,
        "rollout_logprobs": [row["rollout_logprobs"] for row in rows] if "rollout_logprobs" in rows[0] else None,
        "trajectory_ids": [TrajectoryID(row["uid"], row["sample"]) for row in rows],
        "is_last_step": [row["is_last_step"] for row in rows] if step_wise else None,
        "rollout_metrics": None,
    }
    for name, dtype in dtypes.items():
        if any(name in row for row in rows):
            output[name] = [np.asarray(row[name], dtype) if name in row else None for row in rows]
    # This also computes the metrics.
    return concatenate_generator_outputs([output], step_wise=step_wise)
