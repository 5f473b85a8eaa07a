"""Runs that are worth looking at: batches of known rows, ranks on their way, groups that are late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import Position
from tests.on_loop import Run, Runs
from tests.tools.bench.workloads import Workload

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 2},
    "step_wise": True,
    "merge": "prefix",
    "dp_size": 2,
}


def turn(
    uid: str, sample: int, step: int, prompt: Sequence[int], response: Sequence[int], **more: Any
) -> dict[str, Any]:
    """One row, the last of its trajectory unless set otherwise."""
    return {
        "uid": uid,
        "sample": sample,
        "step": step,
        "is_last_step": True,
        "prompt_token_ids": list(prompt),
        "response_ids": list(response),
        "loss_mask": [1] * len(response),
        "reward": float(sample),
    } | more


def group(uid: str) -> list[dict[str, Any]]:
    """Sample 0: two turns that merge, with two tokens of observation. Sample 1: two that do not, for token 13 came back
    as 99."""
    return [
        turn(uid, 0, 0, [1, 2, 3], [4, 5], is_last_step=False, reward=0.0),
        turn(uid, 0, 1, [1, 2, 3, 4, 5, 6, 7], [8], reward=0.0),
        turn(uid, 1, 0, [10, 11], [12, 13, 14], is_last_step=False, reward=0.0),
        turn(uid, 1, 1, [10, 11, 12, 99, 14, 15], [16, 17]),
    ]


_REQUEST_ROWS = 10_000


def settings(workload: Workload, *, merge: str, dp_size: int, **more: Any) -> RunConfig:
    config = workload.config(merge, dp_size)
    return RunConfig.model_validate({**config.model_dump(), **more})


def published(runs: Runs, name: str, config: RunConfig | dict[str, Any], tables: Sequence[Steps]) -> Run:
    """A run whose batches of these rows are all published: each table is a batch, and comes a request at a time."""
    runs.create(name, config)
    run: Run = runs.get(name)
    for table in tables:
        run.begin_groups(0, list(dict.fromkeys(table.uids)))
        for begin in range(0, len(table), _REQUEST_ROWS):
            run.submit(table.take(np.arange(begin, min(begin + _REQUEST_ROWS, len(table)))))
    until(lambda: run.status().batches_published == len(tables))
    return run


def until(holds: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def scored(steps: Steps, seed: int = 3) -> Steps:
    """With rewards of 0, 0.5 or 1 at the end, so that some groups are all alike."""
    rng = np.random.default_rng(seed)
    return replace(steps, rewards=np.where(steps.is_last_steps, rng.choice([0.0, 0.5, 1.0], len(steps)), 0.0))


def acknowledge(run: Run, rank: int, mini_batch: int, *, batch: int = 0, commit: bool = False) -> None:
    run.acknowledge("policy", rank, Position(batch, 0, mini_batch), 0, commit)
