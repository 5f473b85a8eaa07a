"""The three workloads of the benchmarks, generated from a fixed seed as arrays.

short: 3,509 rows of 640 multi-turn trajectories, turns of 80 to 320 tokens. agent: 1,845 rows of 256 trajectories, up
to 24k tokens, a tenth of the turns breaking the prefix. anti: 512 rows, a short prompt with a long response and the
reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig, parse_config

DP_SIZE = 8


@dataclass(frozen=True)
class Workload:
    name: str
    steps: Steps
    samples: int

    def config(self, merge: str, dp_size: int = DP_SIZE) -> RunConfig:
        prompts = len(set(self.steps.uids))
        return parse_config(
            {
                "train_batch_size": prompts,
                "n_samples_per_prompt": self.samples,
                "policy_mini_batch_size": prompts // 4,
                "step_wise": True,
                "merge": merge,
                "loss_reduction": "token_mean",
                "dp_size": dp_size,
                "micro_batch": {"size": 4},
            }
        )

    @property
    def input_bytes(self) -> int:
        return sum(column.values.nbytes for column in self.columns())

    def columns(self) -> list[Ragged]:
        steps = self.steps
        return [column for column in (steps.tokens, steps.loss_mask, steps.logprobs) if column is not None]


@dataclass(frozen=True)
class Turns:
    """Token counts of one trajectory: its prompt, then per turn a response and the observation that follows."""

    prompt: int
    responses: list[int]
    observations: list[int]
    breaks: list[bool]


def workload(name: str) -> Workload:
    rng = np.random.default_rng(7)
    return {"short": _short, "agent": _agent, "anti": _anti}[name](rng)


def uniform(rows: int, length: int) -> Workload:
    """Single-turn rows of one length, half of it response, eight samples a prompt."""
    rng, half = np.random.default_rng(7), length // 2
    turns = [Turns(length - half, [half], [0], [False]) for _ in range(rows)]
    return Workload(f"uniform {rows} x {length}", _steps(rng, turns, samples=8), 8)


def _short(rng: np.random.Generator) -> Workload:
    counts = _counts(rng, rows=3509, trajectories=640, most=12)
    turns = [
        Turns(
            int(rng.integers(100, 300)),
            rng.integers(80, 320, count).tolist(),
            rng.integers(20, 60, count).tolist(),
            [False] * count,
        )
        for count in counts
    ]
    return Workload("short", _steps(rng, turns, samples=5), 5)


def _agent(rng: np.random.Generator) -> Workload:
    counts = _counts(rng, rows=1845, trajectories=256, most=16)
    turns = []
    for count in counts:
        budget = int(rng.integers(4_000, 22_000))
        responses = np.maximum(16, rng.dirichlet(np.ones(count)) * budget * 0.6).astype(int).tolist()
        observations = np.maximum(8, rng.dirichlet(np.ones(count)) * budget * 0.4).astype(int).tolist()
        turns.append(Turns(int(rng.integers(500, 2_000)), responses, observations, (rng.random(count) < 0.1).tolist()))
    return Workload("agent", _steps(rng, turns, samples=8), 8)


def _anti(rng: np.random.Generator) -> Workload:
    turns = [
        Turns(
            int(rng.integers(200, 800)),
            [int(rng.integers(6_000, 10_000)), int(rng.integers(200, 800))],
            [int(rng.integers(20, 200)), 0],
            [False, False],
        )
        for _ in range(256)
    ]
    return Workload("anti", _steps(rng, turns, samples=8), 8)


def _counts(rng: np.random.Generator, rows: int, trajectories: int, most: int) -> list[int]:
    """Turns of each trajectory, at least 1 and `rows` in all."""
    counts = np.ones(trajectories, np.int64)
    while (missing := rows - int(counts.sum())) > 0:
        open_ = np.flatnonzero(counts < most)
        counts[rng.choice(open_, size=min(missing, len(open_)), replace=False)] += 1
    return counts.tolist()


def _steps(rng: np.random.Generator, trajectories: list[Turns], samples: int) -> Steps:
    rows, responses = [], []
    keys: list[tuple[str, int, int, bool]] = []
    for index, turns in enumerate(trajectories):
        sequence = rng.integers(0, 150_000, turns.prompt, dtype=np.int32)
        for step, length in enumerate(turns.responses):
            response = rng.integers(0, 150_000, length, dtype=np.int32)
            keys.append((f"p{index // samples}", index % samples, step, step == len(turns.responses) - 1))
            rows.append(np.concatenate([sequence, response]))
            responses.append(length)
            observation = rng.integers(0, 150_000, turns.observations[step], dtype=np.int32)
            sequence = np.concatenate([sequence, response, observation])
            if turns.breaks[step]:
                # What a chat template does when it strips the last turn's thinking: the sequence differs from there on.
                sequence = sequence.copy()
                sequence[-(length + len(observation)) :] += 1
    return table(rng, keys, rows, np.array(responses, np.int64))


def table(
    rng: np.random.Generator, keys: list[tuple[str, int, int, bool]], rows: list[np.ndarray], responses: np.ndarray
) -> Steps:
    count, tokens = len(keys), Ragged.from_arrays(rows, np.int32)
    total = int(responses.sum())
    last = np.array([key[3] for key in keys])
    return Steps(
        uids=[key[0] for key in keys],
        rounds=np.zeros(count, np.int32),
        samples=np.array([key[1] for key in keys], np.int32),
        steps=np.array([key[2] for key in keys], np.int32),
        attempts=np.zeros(count, np.int32),
        is_last_steps=last,
        stop_reasons=["stop"] * count,
        policy_versions=np.zeros(count, np.int32),
        tokens=tokens,
        prompt_lengths=tokens.lengths - responses,
        loss_mask=Ragged.from_lengths(np.ones(total, np.uint8), responses),
        logprobs=Ragged.from_lengths(-rng.random(total, dtype=np.float32), responses),
        rewards=np.where(last, rng.random(count), 0.0),
        token_rewards=None,
        rewards_pending=np.zeros(count, np.bool_),
    )
