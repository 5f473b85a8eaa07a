"""Random batches of prompt groups, to compare the run's advantages with those of a trainer's own code.

`COMPARED_GROUPS=10000 python -m pytest -s -k estimators` in a trainer's environment compares that many groups in each
test and prints the largest difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit.assignment import Credit
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from tests.pipeline.plans import planned
from tests.rows import make_config, make_row
from tests.strategies import Row

GROUPS = int(os.environ.get("COMPARED_GROUPS", "200"))
"""The groups of each comparison."""

FLOAT64, FLOAT32 = 1e-12, 1e-6
"""Bounds of differences, by the trainer's arithmetic."""

BATCH = 20
LONGEST = 11


class Samples(NamedTuple):
    """The samples of a batch, each of one step of `LONGEST` tokens. Untrained tokens may also stand for padding.

    uids: the prompt of each. numbers: the sample's number in its group. mask: float64 (samples, LONGEST), 1 for trained
    tokens, of which the first is one. scores: float64 (samples,).
    """

    uids: NDArray[Any]
    numbers: list[int]
    mask: Float64s
    scores: Float64s

    def at_the_end(self, scores: Float64s) -> Float64s:
        """Return the rewards of tokens if the last trained token of each sample has its score."""
        rewards = np.zeros_like(self.mask)
        rewards[np.arange(len(scores)), LONGEST - 1 - self.mask[:, ::-1].argmax(1)] = scores
        return rewards

    def rows(self, rewards: Any = None, **columns: Any) -> list[Row]:
        """Return the rows. rewards: of samples, or of their tokens. columns: the values of each sample."""
        rewards = self.scores if rewards is None else rewards
        return [
            make_row(
                uid, number, response=[7] * LONGEST, loss_mask=mask.astype(int).tolist(), reward=reward.tolist(),
                **{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in more.items()},
            )
            for uid, number, mask, reward, more in zip(
                self.uids, self.numbers, self.mask, rewards,
                [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
                or [{}] * len(self.numbers),
                strict=True,
            )
        ]  # fmt: skip


def batches(seed: int = 0, *, least: int = 2, same_size: bool = False) -> Iterator[tuple[np.random.Generator, Samples]]:
    """Yield batches of `GROUPS` groups in total, of `least` to 8 samples. Scores are real or, in every second batch, of
    few values. same_size: whether all groups of a batch have the same number of samples."""
    draw = np.random.default_rng(seed)
    for number in range(-(-GROUPS // BATCH)):
        sizes = draw.integers(least, 9, BATCH)
        sizes = np.full_like(sizes, sizes[0]) if same_size else sizes
        count = int(sizes.sum())
        mask = (draw.random((count, LONGEST)) < 0.8) & (np.arange(LONGEST) < draw.integers(1, 12, count)[:, None])
        mask[:, 0] = True
        scores = draw.normal(size=count) if number % 2 else few_values(draw, count)
        uids = np.repeat([f"p{group}" for group in range(BATCH)], sizes).astype(object)
        yield draw, Samples(uids, [at for size in sizes for at in range(size)], mask.astype(np.float64), scores)


def few_values(draw: np.random.Generator, shape: Any) -> Float64s:
    """Return 0, 0.5 or 1, which float32 holds exactly."""
    values: Float64s = draw.integers(0, 3, shape) / 2.0
    return values


def credit_of(rows: list[Row], baselines: Baselines = NO_BASELINES, **settings: Any) -> Credit:
    """Return the credit of a batch of these rows in a run with these settings."""
    groups = len({row["uid"] for row in rows})
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": 16}
    config = parse_config(make_config() | sizes | settings)
    credit = planned(from_rows(rows, columns=config.columns), config, None, baselines=baselines).credit
    assert credit is not None
    return credit


class Differences:
    """The largest difference |ours - theirs| / (1 + |theirs|) of a comparison."""

    def __init__(self, compared: str) -> None:
        self.compared, self.largest = compared, 0.0

    def add(self, ours: Any, theirs: Any) -> None:
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert ours.shape == theirs.shape
        self.largest = max(self.largest, float((np.abs(ours - theirs) / (1 + np.abs(theirs))).max(initial=0.0)))

    def check(self, bound: float) -> None:
        print(f"\n{self.compared}: largest difference {self.largest:.1e} in {GROUPS} groups")
        assert self.largest <= bound
