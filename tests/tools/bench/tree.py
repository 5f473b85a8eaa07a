"""Measures what `layout: prefix_tree` saves of the tokens that a model computes, and how long planning it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import Steps, check
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.rows.merge import Rows, merge_rows
from gristmill_service.pipeline.rows.sharing import find_sharing
from gristmill_service.pipeline.rows.validate import receive
from gristmill_service.pipeline.scheduling.schedule import schedule
from tests.tools.bench.figures import Figure
from tests.tools.bench.rollouts import rollouts
from tests.tools.bench.workloads import DP_SIZE, Workload, table

CAP = 32_768
REACHES = {"short": 1 / 1.2, "agent": 1 / 1.2, "samples": 1 / 5.9}
ROWS, GROUP, ROUNDS = 100_000, 8, 3


def figures() -> Iterator[Figure]:
    for name, reach in REACHES.items():
        work = rollouts(name)
        packed = _computed(work, {"layout": "packed"})
        ratio = _computed(work, {"layout": "prefix_tree"}) / packed
        yield Figure(f"tree.tokens_ratio.{name}", ratio, "x packed", reach, packed, "tokens, merged and packed")
    yield Figure("tree.plan_100k_s", _planning(), "s of a core", 1.0)


def _computed(work: Workload, settings: dict[str, Any]) -> int:
    """The tokens of all micro-batches of the policy, padding rows included; merged, in one optimizer step."""
    changes = {**settings, "policy_mini_batch_size": len(set(work.steps.uids)), "micro_batch": {"max_tokens": CAP}}
    config = parse_config(work.config("prefix", DP_SIZE).model_dump(mode="json", exclude_defaults=True) | changes)
    shards = build_batch(check(work.steps), config, run="bench", batch=0).shards
    return sum(shard.sequence_elements for shard in shards)


def _planning() -> float:
    """CPU seconds from merged rows to the plan, what they share included, which one thread takes: of the slowest batch
    and settings, each the best of a few rounds, as others work on this machine too."""
    slowest = 0.0
    for steps, samples in (_samples(), _turns(), _edited()):
        for dp_size in (8, 64):
            for micro_batch in ({"max_tokens": CAP}, {"size": GROUP}):
                for balance in ("none", "flops"):
                    config = _config(steps, samples, dp_size, micro_batch=micro_batch, balance=balance)
                    received = receive(steps, config)
                    rows = merge_rows(received, config)
                    groups = received.trajectory_groups[rows.trajectories]
                    bounds = np.searchsorted(groups, np.arange(len(received.groups) + 1))
                    best = min(_plan(rows, steps.tokens, bounds, config) for _ in range(ROUNDS))
                    slowest = max(slowest, best)
    return slowest


def _plan(rows: Rows, tokens: Ragged, bounds: Int64s, config: RunConfig) -> float:
    """CPU seconds."""
    start = time.process_time()
    schedule(rows.lengths, bounds, config, find_sharing(rows, tokens, bounds))
    return time.process_time() - start


def _config(steps: Steps, samples: int, dp_size: int, **settings: Any) -> RunConfig:
    groups = len(set(steps.uids))
    sizes = {"train_batch_size": groups, "policy_mini_batch_size": groups, "n_samples_per_prompt": samples}
    flops = {"linear": 1.0, "quadratic": 1e-4}
    return parse_config(
        {**sizes, "step_wise": True, "layout": "prefix_tree", "dp_size": dp_size, "flops": flops, **settings}
    )


def _samples() -> tuple[Steps, int]:
    """Groups of 8 samples of a prompt of 128 to 512 tokens."""
    return _batch(turns=1, is_edited=False), GROUP


def _turns() -> tuple[Steps, int]:
    """Groups of 8 samples of 5 turns that are not merged."""
    return _batch(turns=5, is_edited=False), GROUP


def _edited() -> tuple[Steps, int]:
    """The same where a token before the middle is another one in each turn, so that none goes on from another."""
    return _batch(turns=5, is_edited=True), GROUP


def _batch(turns: int, is_edited: bool) -> Steps:
    rng = np.random.default_rng(3)
    keys: list[tuple[str, int, int, bool]] = []
    rows: list[np.ndarray] = []
    for group in range(ROWS // (GROUP * turns)):
        prompt = rng.integers(0, 150_000, int(rng.integers(128, 512)), dtype=np.int32)
        for sample in range(GROUP):
            sequence = prompt
            for step in range(turns):
                if is_edited and step:
                    sequence = sequence.copy()
                    sequence[len(sequence) // 2 - step] += 1
                sequence = np.concatenate([sequence, rng.integers(0, 150_000, 80 + 10 * step, dtype=np.int32)])
                keys.append((f"p{group}", sample, step, step == turns - 1))
                rows.append(sequence)
    steps = table(rng, keys, rows, np.array([80 + 10 * key[2] for key in keys], np.int64))
    return replace(steps, logprobs=None)
