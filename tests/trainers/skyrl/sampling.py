"""A policy that is sampled with the weights that the trainer handed over last, and what it is rewarded for."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from transformers import Qwen2ForCausalLM

from tests.trainers.skyrl.play import WORDS, Step, generator_output, weights_of

TURNS, SAID = 2, 3
WANTED = WORDS // 4
"""A word below is rewarded: one of four at first."""


class Sampler(GeneratorInterface):  # type: ignore[misc]
    """Two turns, between which the environment says a word. The same weights, step and prompts give the same rollouts.

    calls: a file that has a line for each call. is_slow: takes a while, as samplers do, and not always the same.
    """

    def __init__(self, cfg: SkyRLTrainConfig, calls: Path, is_slow: bool = False) -> None:
        self._cfg, self._calls, self._is_slow = cfg, calls, is_slow
        self._model = Qwen2ForCausalLM.from_pretrained(cfg.trainer.policy.model.path, dtype=torch.float32)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        trajectories = input_batch["trajectory_ids"]
        step = input_batch["batch_metadata"].global_step
        uids = list(dict.fromkeys(trajectory.instance_id for trajectory in trajectories))
        with self._calls.open("a") as calls:
            calls.write(json.dumps({"step": step, "uids": uids}) + "\n")
        if self._is_slow:
            await asyncio.sleep(random.random() * 0.1)
        self._model.load_state_dict(weights_of(self._cfg), strict=False)
        rows = [row for trajectory in trajectories for row in self._rows(trajectory, step)]
        return generator_output(rows, step_wise=True)

    def _rows(self, trajectory: TrajectoryID, step: int) -> list[tuple[TrajectoryID, Step, bool]]:
        drawn = torch.Generator().manual_seed(hash((int(trajectory.instance_id), trajectory.repetition_id, step)))
        context = [2 + int(trajectory.instance_id)]
        rows: list[tuple[TrajectoryID, Step, bool]] = []
        said: list[int] = []
        for turn in range(TURNS):
            response, logprobs = self._say(context, drawn)
            said += response
            is_last = turn == TURNS - 1
            row: dict[str, Any] = {
                "prompt_token_ids": context,
                "response_ids": response,
                "loss_masks": [1] * len(response),
                "rollout_logprobs": logprobs,
                "rewards": sum(word < WANTED for word in said) / len(said) if is_last else 0.0,
            }
            rows.append((trajectory, row, is_last))
            context = [*context, *response, 1]
        return rows

    @torch.no_grad()
    def _say(self, context: list[int], drawn: torch.Generator) -> tuple[list[int], list[float]]:
        response: list[int] = []
        logprobs: list[float] = []
        for _ in range(SAID):
            logits = self._model(torch.tensor([context + response])).logits[0, -1]
            known = torch.log_softmax(logits, -1)
            word = int(torch.multinomial(known.exp(), 1, generator=drawn))
            response.append(word)
            logprobs.append(float(known[word]))
        return response, logprobs


def calls_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
