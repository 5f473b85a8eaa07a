"""The public document of a plan (specification, section 10), with counts of each rule's cases, and metrics.

The document is a public format: `gristmill plan` prints it, stores contain it as JSON, and trainers read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.credit.baselines import BaselineKey, Baselines
from gristmill_service.pipeline.figures import Counts, GroupCounts
from gristmill_service.pipeline.layout.shard import Shard, cp_barrier_ratio
from gristmill_service.pipeline.rows.sharing import Sharing
from gristmill_service.pipeline.scheduling.balance import barrier_ratio, loads_of, shared_loads
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, RankPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch


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
    scored: ScoredBatch,
    mini_batches: Sequence[MiniBatchPlan],
    config: RunConfig,
    batch: int,
    laid_out: Sequence[Shard] | None,
    counts: Counts,
) -> PlanDocument:
    """Returns the document of a batch. laid_out: its shards, for the cost of padding; None if it is only planned."""
    received = scored.received
    policy = [mini_batch for mini_batch in mini_batches if mini_batch.model == "policy"]
    dropped = [received.groups[group] for mini_batch in policy for group in mini_batch.dropped_groups]
    return PlanDocument(
        batch=batch,
        rows_received=scored.rows_received,
        rows=len(scored.rows),
        prompts=len(received.groups),
        optimizer_steps=len(policy) * config.update_epochs_per_batch,
        dp_size=config.dp_size,
        dropped_groups=[GroupDocument(uid, round_) for round_, uid in [*scored.stale, *dropped]],
        mini_batches=[_mini_batch(mini_batch, scored) for mini_batch in mini_batches],
        counts=_counts(scored, len(dropped), config),
        metrics=_accuracy(scored, counts) | _performance(scored, policy, config, laid_out, counts.groups.tokens),
        merge_mismatches=_mismatches(scored),
        tags=received.tags,
        tag_metrics={tag: _tag(one, laid_out is not None) for tag, one in counts.tags.items()},
        baselines=_baselines(scored),
        steps=_paths(scored) if config.merging.branches else None,
    )


def _baselines(scored: ScoredBatch) -> list[BaselineDocument] | None:
    after = {} if scored.credit is None else scored.credit.baselines
    return [
        BaselineDocument(*key, scored.baselines.get(key, 0.0), number) for key, number in sorted(after.items())
    ] or None


def _mini_batch(mini_batch: MiniBatchPlan, scored: ScoredBatch) -> MiniBatchDocument:
    return MiniBatchDocument(
        model=mini_batch.model,
        index=mini_batch.index,
        start=mini_batch.start,
        end=mini_batch.end,
        prompts=len(mini_batch.groups),
        rows=mini_batch.rows,
        padding_rows=mini_batch.padding_rows,
        loss_tokens=int(scored.loss_tokens[mini_batch.start : mini_batch.kept_end].sum()),
        micro_batches_per_rank=mini_batch.micro_batches_per_rank,
        ranks=[_rank(index, rank, scored.sharing) for index, rank in enumerate(mini_batch.ranks)],
        partitions=None if scored.partitions is None else scored.partitions.named(mini_batch.partitions),
    )


def _rank(index: int, rank: RankPlan, sharing: Sharing | None) -> RankDocument:
    shared = None if sharing is None else sharing.shared(rank.rows, rank.bounds[:-1]).tolist()
    return RankDocument(index, rank.rows.tolist(), rank.micro_batches, shared)


def _counts(scored: ScoredBatch, dropped: int, config: RunConfig) -> dict[str, int]:
    counts = {"misaligned_groups": dropped, **scored.counts}
    if config.max_seq_len is not None:
        counts["rows_over_max_seq_len"] = int((scored.rows.lengths > config.max_seq_len).sum())
    if config.tag_shares:
        groups = Counter(scored.received.tags)
        wanted = config.tag_groups(len(scored.received.groups))
        counts["tags_short"] = sum(groups[tag] < count for tag, count in wanted.items())
    return counts


def _accuracy(scored: ScoredBatch, counts: Counts) -> dict[str, int | float]:
    """Returns means of rewards and lengths. Each trajectory counts once, and padding does not count."""
    if not counts.groups.groups:
        return {}
    staleness = scored.staleness
    behind = (
        {"staleness_mean": float(staleness.mean()), "staleness_max": int(staleness.max())} if staleness.size else {}
    )
    return {**counts.groups.means, **behind, **{name: mean.value for name, mean in counts.means.items()}}


def _tag(counts: GroupCounts, is_laid_out: bool) -> dict[str, int | float]:
    """Returns the metrics of a tag. Padding rows have no tag, so `padding_tokens` is padding within rows only."""
    padding = {"padding_tokens": counts.padding, "padding_share": counts.padding_share} if is_laid_out else {}
    return {
        "prompts": counts.groups,
        **counts.means,
        "rows": counts.rows,
        "tokens": counts.tokens,
        "loss_tokens": counts.loss_tokens,
        **padding,
    }


def _performance(
    scored: ScoredBatch,
    policy: Sequence[MiniBatchPlan],
    config: RunConfig,
    laid_out: Sequence[Shard] | None,
    tokens: int,
) -> dict[str, int | float]:
    """Returns the cost of the policy's shards, with padding listed separately. tokens: the tokens of trained rows."""
    if laid_out is None:
        return performance(scored, policy, config, tokens, None)
    elements = sum(shard.sequence_elements for shard in laid_out if shard.address.model == "policy")
    figures = performance(scored, policy, config, tokens, elements)
    if config.cp_shards == "blocks":
        figures["cp_barrier_ratio"] = cp_barrier_ratio(laid_out, config.cp_size)
    return figures | {"shard_bytes": sum(shard.size for shard in laid_out)}


def performance(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], config: RunConfig, tokens: int, elements: int | None
) -> dict[str, int | float]:
    """Returns the cost of the policy's mini-batches. tokens: those of trained rows. elements: those of `sequences`,
    including padding; None if nothing is laid out.

    The barrier ratio is computed from FLOPs if the configuration has `flops`, else from tokens. Shared tokens count
    once in loads and padding; `distinct_tokens` is the number of tokens without repetition.
    """
    figures: dict[str, int | float] = {"tokens": tokens, "padding_rows": sum(part.padding_rows for part in policy)}
    distinct, shared = tokens, None
    if scored.sharing is not None:
        figures["distinct_tokens"] = distinct = tokens - scored.sharing.shared_tokens(policy)
        shared = shared_loads(scored.sharing.rounded_down(config.pad_rows_to_multiple_of), config.flops)
    loads = loads_of(config.padded(scored.rows.lengths), config.flops, scored.costs)
    figures["barrier_ratio"] = barrier_ratio(policy, loads, shared)
    if elements is not None:
        figures["padding_tokens"] = elements - distinct
        figures["padding_share"] = (elements - distinct) / elements if elements else 0.0
    return figures


def _mismatches(scored: ScoredBatch) -> list[MismatchDocument]:
    steps, bounds = scored.received.steps, scored.received.trajectory_bounds
    keys = [steps.key(int(bounds[mismatch.trajectory])) for mismatch in scored.mismatches]
    return [
        MismatchDocument(key.uid, key.round, key.sample, mismatch.step, mismatch.index, mismatch.cause, mismatch.column)
        for key, mismatch in zip(keys, scored.mismatches, strict=True)
    ]


def _paths(scored: ScoredBatch) -> list[list[int]]:
    rows = scored.rows
    numbers = scored.received.steps.steps[rows.steps].tolist()
    return [numbers[begin:end] for begin, end in pairwise(rows.edges.tolist())]
