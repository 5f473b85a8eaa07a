"""`make bench-trl`: the time of a training step that is not TRL's, compared with TRL's own preparation of the batch.

TRL makes its batch of lists of token ids, which it pads, decodes, has scored, shuffles and splits. Through gristmill
TRL does the same but for the last two; then the adapter submits the rows, the service makes shards of them, and the
adapter opens its own, makes TRL's inputs of every micro-batch and acknowledges. Nothing is sampled and no model runs.
TRL's loader of prompts counts for neither: a trainer without gristmill has it too.
TRL's environment has not all that the other benchmarks need, so that this one is run alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOTrainer

from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer
from gristmill.adapters.trl._generations import Generations
from gristmill.adapters.trl._prompts import Prompts
from tests.tools.bench.clock import Clock, Spent
from tests.tools.bench.figures import Figure, report
from tests.tools.bench.processes import served
from tests.trainers.trl.play import WORDS, config, policy, tokenizer

PROMPTS, SAMPLES, PROMPT, COMPLETION, MICRO_BATCH = 250, 8, 200, 800, 8
ROWS = PROMPTS * SAMPLES
ROUNDS = 7
TEXTS = [f"w{prompt % 60 + 2} w{prompt // 60 + 2}" for prompt in range(PROMPTS)]


class Measured(GristmillGRPOTrainer):
    """Measures what the adapter does in a step, and lets TRL prepare the same batch between two steps."""

    clock: Clock
    theirs: Any
    rounds: list[Spent]

    def get_train_dataloader(self) -> Any:
        shards: Any = super().get_train_dataloader()
        clock = self.clock

        class Timed:
            def __len__(self) -> int:
                return len(shards)

            def __iter__(self) -> Iterator[Any]:
                return clock.each("shard", iter(shards))

        return Timed()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.clock.on("generation"):
            return super()._generate_and_score_completions(inputs)

    def training_step(self, *args: Any) -> Any:
        with self.clock.on("step"):
            return super().training_step(*args)

    def end_step(self) -> bool:
        with self.clock.on("acknowledgement"):
            result = super().end_step()
        with self.clock.on("theirs"):
            self.theirs._step, self.theirs._buffered_inputs = 0, None
            self.theirs._prepare_inputs([{"prompt": text} for text in TEXTS for _ in range(SAMPLES)])
        self.rounds.append(self.clock.spent.copy())
        self.clock.spent.clear()
        return result


def figures() -> Iterator[Figure]:
    """`trl_step`: without the submission, as where workers submit. `trl_cpu`: what the trainer's process computes of
    both, which a busy machine does not change."""
    rounds = _rounds()[1:]
    parts = {
        "adapters.trl": [(_own(spent), spent["theirs"]) for spent in rounds],
        "adapters.trl_step": [(_own(spent) - spent["submission"], spent["theirs"]) for spent in rounds],
        "adapters.trl_cpu": [(_own(spent, "cpu "), spent["cpu theirs"]) for spent in rounds],
    }
    for name, pairs in parts.items():
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        bound = statistics.median(theirs for _, theirs in pairs)
        yield Figure(name, ratio, "x TRL's own batch", 0.2, bound, "s, TRL's own batch")


def _own(spent: Spent, kind: str = "") -> float:
    """The adapter's seconds of a step, waiting for the service among them. TRL's generation and its loader of prompts
    are within the wait for a shard, and not the adapter's."""
    trls = spent[f"{kind}generation"] + spent[f"{kind}prompts"]
    return spent[f"{kind}shard"] - trls + spent[f"{kind}step"] + spent[f"{kind}acknowledgement"]


def _rounds() -> list[Spent]:
    clock, submit, prompts = Clock(), Generations.submit, Prompts.batches

    def submitted(*args: Any, **named: Any) -> None:
        with clock.on("submission"):
            submit(*args, **named)

    with (
        tempfile.TemporaryDirectory() as directory,
        served() as service,
        patch.object(Generations, "submit", submitted),
        patch.object(Prompts, "batches", lambda *args: clock.each("prompts", prompts(*args))),
        # The model's part of a step.
        patch.object(GRPOTrainer, "training_step", lambda *_: torch.zeros(())),
    ):
        theirs = _trainer(GRPOTrainer, directory)
        theirs.model.train()
        ours = _trainer(Measured, directory, gristmill=Gristmill(service.grpc_address, "bench"))
        ours.clock, ours.theirs, ours.rounds = clock, theirs, []
        ours.train()
    rounds: list[Spent] = ours.rounds
    return rounds


def _trainer(kind: Any, directory: str, **named: Any) -> Any:
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(2, WORDS, PROMPT).tolist() for _ in range(PROMPTS) for _ in range(SAMPLES)]
    completions = [drawn.integers(2, WORDS, COMPLETION).tolist() for _ in range(ROWS)]
    rewards = drawn.random(ROWS).tolist()
    made = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}
    sizes = {"per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": ROWS // MICRO_BATCH}
    return kind(
        model=policy(),
        reward_funcs=lambda completions, **_: rewards,
        args=config(Path(directory), num_generations=SAMPLES, max_steps=ROUNDS + 1, **sizes),
        train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS]),
        processing_class=tokenizer(),
        rollout_func=lambda prompts, trainer: dict(made),
        **named,
    )


if __name__ == "__main__":
    sys.exit(report("adapters_trl", figures()))
