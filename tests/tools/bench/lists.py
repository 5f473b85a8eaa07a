"""From Python lists to published shards: what a step-wise generator output costs, over converting each distinct token
once, reading the rows and writing the shards once.

`python -m tests.tools.bench lists` measures, in one process and without a wire. Agents' loops add to their lists, so
that turns have the same numbers in memory; `.apart`: every turn's are its own, as JSON gives them. Next to the elapsed
time stands what both compute, which a busy machine changes less.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill.converters import from_skyrl
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.rows.joins import common_prefix
from gristmill_service.storage.shard_files import write_shards
from tests.tools.bench.figures import Figure
from tests.tools.bench.once import distinct_tokens
from tests.tools.bench.pipeline import TMPFS, read_once, write_once
from tests.tools.bench.rollouts import rollouts
from tests.tools.bench.workloads import Workload

NAMES = ("short", "agent", "anti")
ROUNDS = 7
_CHUNK = 8 << 20


def figures() -> Iterator[Figure]:
    for name in NAMES:
        work = rollouts(name)
        for kind, reach in (("", 2.0), (".apart", None)):
            measured = _measured(work, generator_output(work, is_apart=bool(kind)))
            yield Figure(
                f"once.lists_ratio.{name}{kind}", measured.ratio, "x bound", reach, measured.bound_s * 1e3, "ms"
            )
            cpu = measured.cpu_bound_s * 1e3
            yield Figure(f"once.lists_cpu_ratio.{name}{kind}", measured.cpu_ratio, "x bound", None, cpu, "ms of a core")


class _Measured(NamedTuple):
    """Medians of rounds: ours over the bound, and the bound; elapsed, and of all threads of the process."""

    ratio: float
    bound_s: float
    cpu_ratio: float
    cpu_bound_s: float


def generator_output(work: Workload, is_apart: bool) -> dict[str, Any]:
    """The rows as a step-wise generator returns them. is_apart: whether no two rows have the same numbers in memory."""
    steps = work.steps
    tokens = _apart(steps) if is_apart else _going_on(steps)
    splits = steps.prompt_lengths.tolist()
    assert steps.logprobs is not None, "workloads have them"
    return {
        "uids": list(steps.uids),
        "samples": steps.samples.tolist(),
        "prompt_token_ids": [row[:split] for row, split in zip(tokens, splits, strict=True)],
        "response_ids": [row[split:] for row, split in zip(tokens, splits, strict=True)],
        "loss_masks": [row.tolist() for row in steps.loss_mask.arrays()],
        "rollout_logprobs": [row.tolist() for row in steps.logprobs.arrays()],
        "rewards": steps.rewards.tolist(),
        "is_last_step": steps.is_last_steps.tolist(),
    }


def _apart(steps: Steps) -> list[list[int]]:
    return [row.tolist() for row in steps.tokens.arrays()]


def _going_on(steps: Steps) -> list[list[int]]:
    """Each row with what it has in common with the one before: the step before, or another sample of its prompt."""
    prompts: list[list[int]] = []
    before, known = np.empty(0, np.int32), list[int]()
    for row in steps.tokens.arrays():
        common = common_prefix(before, row)
        before, known = row, known[:common] + row[common:].tolist()
        prompts.append(known)
    return prompts


def published(output: dict[str, Any], work: Workload, target: Path) -> int:
    """The whole way once; the bytes of the shards."""
    batch = built(output, work)
    target.mkdir()
    return sum(write_shards(target, batch.shards).values())


def built(output: dict[str, Any], work: Workload) -> BuiltBatch:
    """The way as far as the batch, of which no shard is written."""
    steps = from_rows(from_skyrl(output))
    return build_batch(steps, work.config("prefix"), run="bench", batch=0)


def _measured(work: Workload, output: dict[str, Any]) -> _Measured:
    distinct = work.steps.tokens.values[: distinct_tokens(work)].tolist()
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        target, size = Path(directory) / "batch", 0

        def ours() -> None:
            nonlocal size
            size = published(output, work, target)
            shutil.rmtree(target)

        warm = np.ones(_CHUNK, np.uint8)

        def bound() -> None:
            array("i", distinct)
            for column in work.columns():
                read_once(column.values)
            write_once(Path(directory) / "bound", warm, size)

        ours()
        bound()
        rounds = [(*spent(ours), *spent(bound)) for _ in range(ROUNDS)]
    return _Measured(
        statistics.median(ours_s / bound_s for ours_s, _, bound_s, _ in rounds),
        statistics.median(bound_s for _, _, bound_s, _ in rounds),
        statistics.median(ours_cpu / bound_cpu for _, ours_cpu, _, bound_cpu in rounds),
        statistics.median(bound_cpu for _, _, _, bound_cpu in rounds),
    )


def spent(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds elapsed, and of all threads of the process."""
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - cpu
