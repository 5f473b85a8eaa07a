"""Rollouts that the run holds already, given again in place of sampling them: after a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs

from gristmill.adapters.skyrl._session import Rows


class Replay(GeneratorInterface):  # type: ignore[misc]
    """Gives the rollouts of the prompts that are held, each once, and has the rest sampled.

    generator: the trainer's own. held: rollouts by uid, those of a prompt that was sampled again in their order.
    on_end: called when there are no more.
    """

    def __init__(
        self, generator: GeneratorInterface, held: dict[str, list[Rows]], step_wise: bool, on_end: Callable[[], None]
    ) -> None:
        self._generator, self._held, self._step_wise, self._on_end = generator, held, step_wise, on_end

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        uids = list(dict.fromkeys(trajectory.instance_id for trajectory in input_batch["trajectory_ids"] or ()))
        metadata = input_batch["batch_metadata"]
        is_training = metadata is None or metadata.training_phase == "train"
        if not is_training or not uids or not all(self._held.get(uid) for uid in uids):
            return await self._generator.generate(input_batch)
        rows = [row for uid in uids for row in self._held[uid].pop(0)]
        if not any(self._held.values()):
            self._on_end()
        return generator_output(rows, self._step_wise)


def generator_output(rows: Sequence[dict[str, Any]], step_wise: bool) -> GeneratorOutput:
    """Rows as they were submitted, as a generator gave them."""
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
    # Makes the metrics, too.
    return concatenate_generator_outputs([output], step_wise=step_wise)
