"""The pipeline turns steps into a plan and shards.

It is pure: functions from arrays to arrays, without I/O, clock, randomness or global state. The same input produces the
same bytes. Data flows in one direction through the packages:

    steps -> rows (validate, filter, merge) -> credit -> scheduling -> layout -> shards

A row is a path of steps; a *visit* is one step on one path. A row's *lead* is what precedes its own elements in a
tensor, such as the prompt in a tensor of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig, with_dp_size
from gristmill_service.pipeline.credit.baselines import NO_BASELINES, Baselines
from gristmill_service.pipeline.figures import Figures, count, figures
from gristmill_service.pipeline.layout.batch_shards import shards
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.plan_document import PlanDocument, plan_document
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, ShardAddress
from gristmill_service.pipeline.scheduling.schedule import schedule
from gristmill_service.pipeline.scored_batch import ScoredBatch, StageTimer, no_timer, score_batch, with_columns
from gristmill_service.pipeline.written import ShardForm, Written, form_of, values_of_steps

__all__ = ["BuiltBatch", "build_batch", "plan_batch", "scheduled"]


@dataclass(frozen=True, slots=True, eq=False)
class BuiltBatch:
    """A batch's plan and its shards, which are laid out when they are read.

    awaits: names of the columns that trainers must write before the batch can be trained; if any, the shards are
        forward shards. forms: the required layout of columns written for each of the policy's shards; empty if no
        column is awaited.
    """

    plan: PlanDocument
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
    scored = score_batch(steps, config, policy_version, timed, begun, baselines)
    with timed("schedule"):
        mini_batches = scheduled(scored, config)
    if written is not None:
        with timed("advantage"):
            places = mini_batches
            if written_ranks != config.dp_size:
                places = scheduled(scored, with_dp_size(config, written_ranks))
            values = values_of_steps(written, scored.rows, scored.received, places, config)
            scored = with_columns(scored, values, config)
    with timed("layout"):
        laid_out = shards(scored, mini_batches, config, run=run, batch=batch)
    with timed("plan"):
        counts = count(scored, mini_batches, laid_out)
        document = plan_document(scored, mini_batches, config, batch, laid_out, counts)
    return BuiltBatch(
        document,
        laid_out,
        lambda: figures(scored, mini_batches, laid_out, config, batch, counts, steps.tokens.total),
        scored.awaits,
        {
            shard.address: form_of(shard, scored, config)
            for shard in laid_out
            if scored.awaits and shard.address.model == "policy"
        },
    )


def plan_batch(steps: Steps, config: RunConfig, *, batch: int, baselines: Baselines = NO_BASELINES) -> PlanDocument:
    """Returns a batch's plan without its shards. The table may contain only lengths, without tokens. baselines: those
    of the run before the batch."""
    scored = score_batch(steps, config, None, baselines=baselines)
    mini_batches = scheduled(scored, config)
    return plan_document(scored, mini_batches, config, batch, None, count(scored, mini_batches, None))


def scheduled(scored: ScoredBatch, config: RunConfig) -> list[MiniBatchPlan]:
    """Returns the mini-batches of all models, the policy's first."""
    partitions = None if scored.partitions is None else scored.partitions.of_rows
    return schedule(
        scored.rows.lengths, scored.row_group_bounds, config, scored.sharing, partitions, costs=scored.costs
    )
