"""A policy that is sampled with the weights that the trainer handed over last, and what it is rewarded for."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
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
        samples = [_Sample(trajectory, step) for trajectory in trajectories]
        for _ in range(TURNS):
            self._turn(samples)
        return generator_output([row for sample in samples for row in sample.rows()], step_wise=True)

    @torch.no_grad()
    def _turn(self, samples: Sequence[_Sample]) -> None:
        """Samples that were begun together have equally many words."""
        for sample in samples:
            sample.begin_turn()
        for _ in range(SAID):
            logits = self._model(torch.tensor([sample.words for sample in samples])).logits[:, -1]
            for sample, known in zip(samples, torch.log_softmax(logits, -1), strict=True):
                sample.say(known)


class _Sample:
    """One trajectory as it grows."""

    def __init__(self, trajectory: TrajectoryID, step: int) -> None:
        self._trajectory = trajectory
        self._drawn = torch.Generator().manual_seed(hash((int(trajectory.instance_id), trajectory.repetition_id, step)))
        self.words = [2 + int(trajectory.instance_id)]
        self._turns: list[Step] = []

    def begin_turn(self) -> None:
        """The environment says a word between two turns."""
        if self._turns:
            self.words.append(1)
        self._turns.append({"prompt_token_ids": list(self.words), "response_ids": [], "rollout_logprobs": []})

    def say(self, known: torch.Tensor) -> None:
        """Draws a word. known: the log-probabilities of all."""
        word = int(torch.multinomial(known.exp(), 1, generator=self._drawn))
        self.words.append(word)
        self._turns[-1]["response_ids"].append(word)
        self._turns[-1]["rollout_logprobs"].append(float(known[word]))

    def rows(self) -> Iterator[tuple[TrajectoryID, Step, bool]]:
        said = [word for turn in self._turns for word in turn["response_ids"]]
        score = sum(word < WANTED for word in said) / len(said)
        for turn in self._turns:
            is_last = turn is self._turns[-1]
            whole = turn | {"loss_masks": [1] * SAID, "rewards": score if is_last else 0.0}
            yield self._trajectory, whole, is_last


def calls_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
