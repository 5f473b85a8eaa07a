"""Measures how little ranks wait for each other when rows are balanced by FLOPs, and how long planning takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline.scheduling.balance import barrier_ratio, loads_of
from gristmill_service.pipeline.scheduling.schedule import schedule
from tests.tools.bench.figures import Figure, seconds

REFERENCE = Path(__file__).parents[2] / "reference" / "balance.json"
ROWS = 100_000
GROUP = 8
ROUNDS = 3


def figures() -> Iterator[Figure]:
    """The bound of a barrier ratio is 1: no rank ever waits."""
    reference = json.loads(REFERENCE.read_text())
    cap, flops, lengths = reference["cap"], reference["flops"], np.array(reference["lengths"])
    for dp_size, reach in ((8, 1.008), (64, 1.13)):
        config = _config(len(lengths), dp_size, micro_batch={"max_tokens": cap}, balance="flops", flops=flops)
        plans = schedule(lengths, np.arange(len(lengths) + 1), config)
        ratio = barrier_ratio(plans, loads_of(lengths, config.flops))
        yield Figure(f"barrier.dp{dp_size}", ratio, "x mean", reach, 1.0, "x mean")
    yield Figure("plan.100k_s", _planning(cap, flops), "s", 0.5)


def _planning(cap: int, flops: dict[str, float]) -> float:
    """Seconds of the slowest distribution; each is the best of a few rounds, as others work on this machine too."""
    slowest = 0.0
    bounds = np.arange(0, ROWS + 1, GROUP)
    for lengths in _distributions(cap):
        for dp_size in (8, 64):
            for micro_batch in ({"max_tokens": cap}, {"size": GROUP}):
                for balance in ("none", "flops"):
                    config = _config(ROWS // GROUP, dp_size, micro_batch=micro_batch, balance=balance, flops=flops)
                    best = min(seconds(lambda: schedule(lengths, bounds, config)) for _ in range(ROUNDS))  # noqa: B023
                    slowest = max(slowest, best)
    return slowest


def _distributions(cap: int) -> Iterator[Int64s]:
    """Log-normal, uniform, all equal, half the cap, just over half of it, short ones, and full caps to 99.9%."""
    random = np.random.default_rng(0)
    yield np.minimum(random.lognormal(8, 1, ROWS).astype(np.int64) + 1, cap)
    yield random.integers(1, cap, ROWS)
    yield np.full(ROWS, cap // 8 - 100)
    yield np.full(ROWS, cap // 2)
    yield np.full(ROWS, cap // 2 + 1)
    yield random.integers(1, 300, ROWS)
    full = cap - cap // 1000
    cuts = np.sort(random.integers(1, full, (ROWS // 5, 4)), axis=1)
    parts = np.diff(np.hstack([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), full)])).ravel()
    yield np.maximum(parts, 1)
    yield random.permutation(np.maximum(parts, 1))


def _config(groups: int, dp_size: int, **settings: Any) -> RunConfig:
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": GROUP}
    return parse_config({**sizes, "dp_size": dp_size, **settings})
