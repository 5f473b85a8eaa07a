"""The pipeline: steps in, a plan and shards out, on one screen.

Pure: functions of arrays to arrays, without I/O, clock, randomness or global state; the same input gives the same
bytes. Each stage is a module, in the order data flows:

    steps -> validate -> filters -> merge -> advantage -> schedule -> layout -> shards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.batch_stats import BatchStats, take_census
from gristmill_service.pipeline.layout import Shard
from gristmill_service.pipeline.plan import MiniBatchPlan
from gristmill_service.pipeline.plan_document import plan_document
from gristmill_service.pipeline.schedule import schedule
from gristmill_service.pipeline.scored_batch import ScoredBatch, prepare
from gristmill_service.pipeline.shards import shards
from gristmill_service.pipeline.stage_timer import Timed, untimed

__all__ = ["Batch", "mill", "plan"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a batch became: its plan as a JSON-able document, and its shards, laid out as they are read."""

    plan: dict[str, Any]
    shards: Sequence[Shard]
    census: Callable[[], BatchStats]
    """Counted when asked for: few ask."""


def mill(
    steps: Steps,
    config: RunConfig,
    *,
    run: str,
    batch: int,
    policy_version: int | None = None,
    timed: Timed = untimed,
) -> Batch:
    """One batch's steps to its plan and shards.

    policy_version: the current one, for staleness; None (offline) takes the largest in the batch.
    timed: what each stage is run within.
    Raises InvalidArgumentError when the rows break a rule or cannot be aligned.
    """
    prepared = prepare(steps, config, policy_version, timed)
    with timed("schedule"):
        mini_batches = _schedule(prepared, config)
    with timed("layout"):
        laid_out = shards(prepared, mini_batches, config, run=run, batch=batch)
    with timed("plan"):
        document = plan_document(prepared, mini_batches, config, batch, laid_out)
    return Batch(document, laid_out, lambda: take_census(prepared, mini_batches, laid_out, config, steps.tokens.total))


def plan(steps: Steps, config: RunConfig, *, batch: int) -> dict[str, Any]:
    """The plan of a batch alone; also of a table that has lengths and no tokens."""
    prepared = prepare(steps, config, None)
    return plan_document(prepared, _schedule(prepared, config), config, batch, None)


def _schedule(prepared: ScoredBatch, config: RunConfig) -> list[MiniBatchPlan]:
    return schedule(prepared.rows.lengths, prepared.row_group_bounds, config)
