"""The pipeline turns steps into a plan, a table of numbers, and shards.

It is pure: functions from arrays to arrays, without I/O, clock, randomness or global state. The same input produces the
same bytes. Data flows in one direction:

    steps -> numbers (validate, filter, merge) -> plan (credit, scheduling) -> table, and with the steps -> shards

Numbers, plan and table have no tokens.

A row is a path of steps; a *visit* is one step on one path. A row's *lead* is what precedes its own elements in a
tensor, such as the prompt in a tensor of whole sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gristmill._wire.batch_table import BatchTable
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig, with_dp_size
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.figures import Figures, figures, padding_shares
from gristmill_service.pipeline.layout.batch_shards import layouts_of, shards
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.numbers import numbers_of
from gristmill_service.pipeline.plan_document import PlanDocument, plan_document
from gristmill_service.pipeline.planning import make_plan, scheduled, with_columns
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.pipeline.stages import StageTimer, no_timer
from gristmill_service.pipeline.table import table_of
from gristmill_service.pipeline.written import ShardForm, Written, form_of, values_of_steps

__all__ = ["BuiltBatch", "build_batch", "plan_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class BuiltBatch:
    """A batch's plan, its table, and its shards, which are laid out when they are read.

    awaits: names of the columns that trainers must write before the batch can be trained; if any, the shards are
        forward shards. forms: the required layout of columns written for each of the policy's shards; empty if no
        column is awaited.
    """

    plan: PlanDocument
    table: BatchTable
    shards: Sequence[Shard]
    stats: Callable[[], Figures]
    """Computes the figures, on demand because few callers need them."""
    awaits: frozenset[str] = frozenset()
    forms: Mapping[ShardAddress, ShardForm] = field(default_factory=dict)


def build_batch(
    steps: Steps,
    config: RunConfig,
    *,
    run: str,
    batch: int,
    policy_version: int | None = None,
    timed: StageTimer = no_timer,
    written: Written | None = None,
    written_ranks: int = 0,
    begun: Mapping[tuple[int, str], int] | None = None,
    baselines: Baselines = NO_BASELINES,
) -> BuiltBatch:
    """Returns the plan and the shards of one batch.

    written: all columns that trainers wrote. None while one is missing: the shards are then forward shards, without the
        tensors that depend on missing columns. written_ranks: the number of ranks for whose shards they were written.
    policy_version: the current version, for staleness; None (offline): the largest version in the batch.
    begun: the number of samples of each group that was begun with its own number, by round and uid; None (offline):
        unknown.
    baselines: those of the run before the batch; `BuiltBatch.plan` has those after it.
    timed: returns the context in which to run the stage with this name.
    Raises InvalidArgumentError if the rows violate a rule or cannot be aligned.
    """
    numbers, received = numbers_of(steps, config, policy_version, timed)
    plan = make_plan(numbers, received, config, begun=begun, baselines=baselines, timed=timed)
    if written is not None:
        with timed("advantage"):
            ranks = with_dp_size(config, written_ranks)
            places = plan.mini_batches if written_ranks == config.dp_size else scheduled(plan, ranks)
            values = values_of_steps(written, numbers.rows, received, places, config)
            received = replace(received, steps=replace(received.steps, extras={**received.steps.extras, **values}))
            plan = with_columns(plan, received, config)
    with timed("layout"):
        layouts = layouts_of(plan, config)
        laid_out = shards(plan, received, layouts, config, run=run, batch=batch)
    with timed("plan"):
        table = table_of(plan, received, layouts, config)
        size = sum(shard.size for shard in laid_out)
        document = plan_document(plan, table, layouts, config, batch, size)
    return BuiltBatch(
        document,
        table,
        laid_out,
        lambda: figures(table, batch, padding_shares(plan, table, config), _column_bytes(laid_out)),
        plan.awaits,
        {
            shard.address: form_of(shard, plan, received, config)
            for shard in laid_out
            if plan.awaits and shard.address.model == "policy"
        },
    )


def plan_batch(
    steps: Steps, config: RunConfig, *, batch: int, baselines: Baselines = NO_BASELINES
) -> tuple[PlanDocument, BatchTable]:
    """Returns a batch's plan and its table, without shards. The rows may have only lengths, without tokens. baselines:
    those of the run before the batch."""
    numbers, received = numbers_of(steps, config)
    plan = make_plan(numbers, received, config, baselines=baselines)
    layouts = layouts_of(plan, config)
    table = table_of(plan, received, layouts, config)
    return plan_document(plan, table, layouts, config, batch, None), table


def _column_bytes(laid_out: Sequence[Shard]) -> Counter[str]:
    return sum((Counter(shard.column_bytes) for shard in laid_out), Counter[str]())
