"""Workloads in which the samples of a prompt share it, as they do in training; generated from a fixed seed.

short: 128 prompts of 5 samples, 3,509 turns. agent: 32 of 8, 2 to 12 turns and up to 24,000 tokens, one prompt in ten
with an edited token. anti: 32 of 8, two turns with responses of 5,000 and 400. samples: 16 of 16 in one turn, prompts
of 4,096 tokens and responses of 512.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.tools.bench.workloads import Workload, table

VOCABULARY = 150_000
EDITED = 0.1
NAMES = ("short", "agent", "anti", "samples")


@dataclass(frozen=True)
class Turns:
    """Of one trajectory: tokens of each turn's response, and of the observation that follows. is_edited: whether a
    token of the turn's prompt is another than before."""

    responses: list[int]
    observations: list[int]
    is_edited: list[bool]


def rollouts(name: str) -> Workload:
    rng = np.random.default_rng(11)
    prompts, samples, of_prompts = {
        "short": (128, 5, (150, 400)),
        "agent": (32, 8, (500, 2_000)),
        "anti": (32, 8, (200, 800)),
        "samples": (16, 16, (4_096, 4_096)),
    }[name]
    trajectories = list({"short": _short, "agent": _agent, "anti": _anti, "samples": _samples}[name](rng))
    keys: list[tuple[str, int, int, bool]] = []
    rows: list[np.ndarray] = []
    for prompt in range(prompts):
        shared = _tokens(rng, int(rng.integers(*of_prompts, endpoint=True)))
        for sample in range(samples):
            turns = trajectories[prompt * samples + sample]
            last = len(turns.responses) - 1
            keys += [(f"p{prompt}", sample, step, step == last) for step in range(last + 1)]
            rows += _rows(rng, shared, turns)
    responses = np.array([length for turns in trajectories for length in turns.responses], np.int64)
    return Workload(name, table(rng, keys, rows, responses), samples)


def _rows(rng: np.random.Generator, prompt: np.ndarray, turns: Turns) -> Iterator[np.ndarray]:
    sequence = prompt
    for response, observation, is_edited in zip(turns.responses, turns.observations, turns.is_edited, strict=True):
        if is_edited:
            sequence = sequence.copy()
            sequence[rng.integers(len(sequence))] += 1
        sequence = np.concatenate([sequence, _tokens(rng, response)])
        yield sequence
        sequence = np.concatenate([sequence, _tokens(rng, observation)])


def _short(rng: np.random.Generator) -> Iterator[Turns]:
    for count in _turn_counts(rng):
        responses, observations = (
            rng.integers(50, 200, count, endpoint=True),
            rng.integers(30, 80, count, endpoint=True),
        )
        yield Turns(responses.tolist(), observations.tolist(), [False] * count)


def _turn_counts(rng: np.random.Generator) -> list[int]:
    """1 to 10 turns of each of 640 trajectories, 3,509 in all."""
    counts = rng.integers(1, 10, 640, endpoint=True)
    while missing := 3509 - int(counts.sum()):
        step = 1 if missing > 0 else -1
        at = int(rng.integers(len(counts)))
        counts[at] = min(max(counts[at] + step, 1), 10)
    turns: list[int] = counts.tolist()
    return turns


def _agent(rng: np.random.Generator) -> Iterator[Turns]:
    for _ in range(32 * 8):
        count = int(rng.integers(2, 12, endpoint=True))
        responses, observations = rng.integers(100, 1_100, count), rng.integers(50, 700, count)
        edited = [False, *(rng.random(count - 1) < EDITED).tolist()]
        yield Turns(responses.tolist(), observations.tolist(), edited)


def _anti(rng: np.random.Generator) -> Iterator[Turns]:
    for _ in range(32 * 8):
        yield Turns([5_000, 400], rng.integers(20, 200, 2).tolist(), [False, False])


def _samples(rng: np.random.Generator) -> Iterator[Turns]:
    for _ in range(16 * 16):
        yield Turns([512], [0], [False])


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)
