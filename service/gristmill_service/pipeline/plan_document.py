"""The public document of a plan (specification, section 10), with counts of each rule's cases, and metrics.

The document is a public format: `gristmill plan` prints it, stores contain it as JSON, and trainers read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from gristmill._wire.batch_table import BatchTable
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.credit.baselines import BaselineKey, Baselines
from gristmill_service.pipeline.figures import GroupCounts, counts_of, staleness_of
from gristmill_service.pipeline.layout.shard import Layout
from gristmill_service.pipeline.numbers import Numbers
from gristmill_service.pipeline.planning import Plan
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.balance import barrier_ratio, loads_of, shared_loads
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, RankPlan


@dataclass(frozen=True, slots=True)
class RankDocument:
    """A rank's shard of a mini-batch.

    rows: row indices in micro-batch order, -1 for padding rows. micro_batches: the positions in `rows` of each.
    shared: with `layout: prefix_tree`, how many first tokens each row shares with the previous row of its micro-batch;
    absent with other layouts.
    """

    rank: int
    rows: list[int]
    micro_batches: list[list[int]]
    shared: list[int] | None = None


@dataclass(frozen=True, slots=True)
class MiniBatchDocument:
    """An optimizer step of one model. `start:end` are its rows before any drop; the counts cover its kept rows.

    partitions: the partition of each micro-batch, which is the same on every rank; "" for rows without one. Absent if
    no row of the batch has one.
    """

    model: Model
    index: int
    start: int
    end: int
    prompts: int
    rows: int
    padding_rows: int
    loss_tokens: int
    micro_batches_per_rank: int
    ranks: list[RankDocument]
    partitions: list[str] | None = None


@dataclass(frozen=True, slots=True)
class MismatchDocument:
    """A step that joined no other step. index: the first different token in its prompt. cause: see `Mismatch`. column:
    the column with `merge: equal` that differs, if no token does; else empty."""

    uid: str
    round: int
    sample: int
    step: int
    index: int
    cause: str
    column: str = ""


@dataclass(frozen=True, slots=True)
class GroupDocument:
    uid: str
    round: int


@dataclass(frozen=True, slots=True)
class BaselineDocument:
    """The running baseline of a tag and an agent, before and after the batch."""

    tag: str
    agent: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """The plan of a batch: when and where each row trains. Row indices refer to rows after merging.

    dropped_groups: the groups that were dropped as stale or by alignment. counts: the number of cases of each rule, by
    name. metrics: the policy's metrics. merge_mismatches: the first ones of each trajectory. tags: the environment or
    task of each prompt group, in the batch's order, "" for a group without; empty if no group has one. tag_metrics:
    metrics by tag. baselines: those of the run; absent with an estimator that keeps none. steps: with `merge: tree`,
    the numbers of the steps on each row's path; absent with other modes.
    """

    batch: int
    rows_received: int
    rows: int
    prompts: int
    optimizer_steps: int
    dp_size: int
    dropped_groups: list[GroupDocument]
    mini_batches: list[MiniBatchDocument]
    counts: dict[str, int]
    metrics: dict[str, int | float]
    merge_mismatches: list[MismatchDocument]
    tags: list[str]
    tag_metrics: dict[str, dict[str, int | float]]
    baselines: list[BaselineDocument] | None = None
    steps: list[list[int]] | None = None


def encode_plan(plan: PlanDocument) -> bytes:
    """Returns the plan as JSON, in UTF-8 and on one line."""
    text = msgspec.json.encode(plan)
    for name in (b"shared", b"partitions", b"baselines", b"steps"):
        # Quotes in JSON strings are escaped, so no name can contain this text.
        text = text.replace(b',"%s":null' % name, b"")
    return text


def decode_plan(text: bytes) -> PlanDocument:
    """Returns the plan that `encode_plan` wrote. Raises msgspec.ValidationError for other text."""
    return msgspec.json.decode(text, type=PlanDocument)


def baselines_after(plan: PlanDocument) -> Baselines:
    """Returns the run's baselines after the batch."""
    return {BaselineKey(one.tag, one.agent): one.after for one in plan.baselines or ()}


def plan_document(
    plan: Plan,
    table: BatchTable,
    layouts: Mapping[Model, Layout],
    config: RunConfig,
    batch: int,
    shard_bytes: int | None,
) -> PlanDocument:
    """Returns the document of a batch. shard_bytes: the size of its shards; None if it is only planned."""
    numbers, (groups, tags) = plan.numbers, counts_of(table)
    received = numbers.received
    dropped = [received.groups[group] for mini_batch in plan.policy for group in mini_batch.dropped_groups]
    return PlanDocument(
        batch=batch,
        rows_received=numbers.rows_received,
        rows=len(numbers.rows),
        prompts=len(received.groups),
        optimizer_steps=len(plan.policy) * config.update_epochs_per_batch,
        dp_size=config.dp_size,
        dropped_groups=[GroupDocument(uid, round_) for round_, uid in [*numbers.stale, *dropped]],
        mini_batches=[_mini_batch(mini_batch, plan) for mini_batch in plan.mini_batches],
        counts=_counts(plan, len(dropped), config),
        metrics=_accuracy(table, groups) | _performance(plan, table, layouts, config, groups.tokens, shard_bytes),
        merge_mismatches=_mismatches(numbers),
        tags=received.tags,
        tag_metrics={tag: _tag(one) for tag, one in tags.items()},
        baselines=_baselines(plan),
        steps=_paths(numbers) if config.merging.branches else None,
    )


def _baselines(plan: Plan) -> list[BaselineDocument] | None:
    after = {} if plan.credit is None else plan.credit.baselines
    return [
        BaselineDocument(key.tag, key.agent, plan.baselines.get(key, 0.0), number)
        for key, number in sorted(after.items())
    ] or None


def _mini_batch(mini_batch: MiniBatchPlan, plan: Plan) -> MiniBatchDocument:
    return MiniBatchDocument(
        model=mini_batch.model,
        index=mini_batch.index,
        start=mini_batch.start,
        end=mini_batch.end,
        prompts=len(mini_batch.groups),
        rows=mini_batch.rows,
        padding_rows=mini_batch.padding_rows,
        loss_tokens=int(plan.loss_tokens[mini_batch.start : mini_batch.kept_end].sum()),
        micro_batches_per_rank=mini_batch.micro_batches_per_rank,
        ranks=[_rank(index, rank, plan.sharing) for index, rank in enumerate(mini_batch.ranks)],
        partitions=None if plan.numbers.partitions is None else plan.numbers.partitions.named(mini_batch.partitions),
    )


def _rank(index: int, rank: RankPlan, sharing: Sharing | None) -> RankDocument:
    shared = None if sharing is None else sharing.shared(rank.rows, rank.bounds[:-1]).tolist()
    return RankDocument(index, rank.rows.tolist(), rank.micro_batches, shared)


def _counts(plan: Plan, dropped: int, config: RunConfig) -> dict[str, int]:
    numbers, counts = plan.numbers, {"misaligned_groups": dropped, **plan.counts}
    if config.max_seq_len is not None:
        counts["rows_over_max_seq_len"] = int((numbers.rows.lengths > config.max_seq_len).sum())
    if config.tag_shares:
        groups = Counter(numbers.received.tags)
        wanted = config.tag_groups(len(numbers.received.groups))
        counts["tags_short"] = sum(groups[tag] < count for tag, count in wanted.items())
    return counts


def _accuracy(table: BatchTable, groups: GroupCounts) -> dict[str, int | float]:
    """Returns means of rewards and lengths. Each trajectory counts once, and padding does not count."""
    if not groups.groups:
        return {}
    staleness = staleness_of(table)
    behind = (
        {"staleness_mean": float(staleness.mean()), "staleness_max": int(staleness.max())} if staleness.size else {}
    )
    means = {name: total / terms for name, (terms, total) in table.facts["means"].items()}
    return {**groups.means, **behind, **means}


def _tag(counts: GroupCounts) -> dict[str, int | float]:
    """Returns the metrics of a tag. Padding rows have no tag, so `padding_tokens` is padding within rows only."""
    return {
        "prompts": counts.groups,
        **counts.means,
        "rows": counts.rows,
        "tokens": counts.tokens,
        "loss_tokens": counts.loss_tokens,
        "padding_tokens": counts.padding,
        "padding_share": counts.padding_share,
    }


def _performance(
    plan: Plan,
    table: BatchTable,
    layouts: Mapping[Model, Layout],
    config: RunConfig,
    tokens: int,
    shard_bytes: int | None,
) -> dict[str, int | float]:
    """Returns the cost of the policy's mini-batches, with padding listed separately. tokens: those of trained rows.

    The barrier ratio is computed from FLOPs if the configuration has `flops`, else from tokens. Shared tokens count
    once in loads and padding; `distinct_tokens` is the number of tokens without repetition.
    """
    facts, shared = table.facts, None
    elements, distinct = facts["elements"], tokens - facts["shared_tokens"]
    metrics: dict[str, int | float] = {"tokens": tokens, "padding_rows": facts["padding_rows"]}
    if plan.sharing is not None:
        metrics["distinct_tokens"] = distinct
        shared = shared_loads(plan.sharing.rounded_down(config.pad_rows_to_multiple_of), config.flops)
    loads = loads_of(config.padded(plan.numbers.rows.lengths), config.flops, plan.numbers.costs)
    metrics["barrier_ratio"] = barrier_ratio(plan.policy, loads, shared)
    metrics["padding_tokens"] = elements - distinct
    metrics["padding_share"] = (elements - distinct) / elements if elements else 0.0
    if config.cp_shards == "blocks":
        policy = layouts.get("policy")
        metrics["cp_barrier_ratio"] = 1.0 if policy is None else policy.cp_barrier_ratio(config.cp_size)
    return metrics if shard_bytes is None else metrics | {"shard_bytes": shard_bytes}


def _mismatches(numbers: Numbers) -> list[MismatchDocument]:
    steps, bounds = numbers.received.steps, numbers.received.trajectory_bounds
    found = numbers.breaks.mismatches
    keys = [steps.key(int(bounds[mismatch.trajectory])) for mismatch in found]
    return [
        MismatchDocument(key.uid, key.round, key.sample, mismatch.step, mismatch.index, mismatch.cause, mismatch.column)
        for key, mismatch in zip(keys, found, strict=True)
    ]


def _paths(numbers: Numbers) -> list[list[int]]:
    of_visits = numbers.received.steps.steps[numbers.rows.steps].tolist()
    return [of_visits[begin:end] for begin, end in pairwise(numbers.rows.edges.tolist())]
