"""The figures of a batch: the outcomes of its rows and tokens, and the scores of its groups.

They are a record of sums, so that the figures of several batches can be added. The plan shows some of them, metrics
count them, and a run's log stores them. Shards do not contain them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.layout.columns import Block
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.rows.joins import breaks
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch

CAUSES = ("prompt", "response", "truncated", "column", "further")
LEVELS = ("laid_out", "packed", "micro_batch", "shard", "mini_batch", "batch")
MOST_TAGS = 8
MOST_MEANS = 65


class GroupCounts(msgspec.Struct, array_like=True, frozen=True):
    """Counts of groups. Each trajectory counts once, and rows and tokens as often as they are trained in an epoch.

    score_sum, reward_sum: sums over all trajectories. response_tokens: the sum over all their steps. solved: groups
    with a trajectory that scored above 0. zero_variance: groups of several trajectories with equal scores. padding:
    padding tokens within rows. Older logs end with `zero_variance`.
    """

    groups: int = 0
    trajectories: int = 0
    score_sum: float = 0.0
    response_tokens: int = 0
    solved: int = 0
    zero_variance: int = 0
    reward_sum: float = 0.0
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    padding: int = 0

    def __add__(self, other: GroupCounts) -> GroupCounts:
        return GroupCounts(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    @property
    def means(self) -> dict[str, int | float]:
        """Means of rewards and lengths, by name in plans."""
        return {
            "trajectories": self.trajectories,
            "score_mean": self.score_sum / self.trajectories,
            "reward_mean": self.reward_sum / self.trajectories,
            "pass_at_n": self.solved / self.groups,
            "response_length_mean": self.response_tokens / self.trajectories,
        }

    @property
    def padding_share(self) -> float:
        return self.padding / (self.padding + self.tokens) if self.padding else 0.0


class Mean(msgspec.Struct, array_like=True, frozen=True):
    """A mean, as a sum and the number of its terms."""

    terms: int
    total: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.terms + other.terms, self.total + other.total)

    @property
    def value(self) -> float:
        return self.total / self.terms


class Figures(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Figures of batches `first` to `last`, of which `batches` were published. They count the policy's mini-batches,
    and each row once, however many epochs there are.

    at: the time at which the last of them was published, in seconds since 1970.
    rows: submitted ones; merged: rows that merging saved; trained; padding: padding rows.
    tokens: of trained rows; distinct: without repeated ones, if rows share tokens; elements: of `sequences`, with
        padding; loss_tokens: with loss_mask 1.
    breaks: steps that joined none. stale: versions behind, summed over `versioned` trajectories; stalest: the maximum.
    seconds: since the previous record; workers_waited, ranks_waited: those in which workers waited for capacity, and in
        which the policy's ranks waited (their mean). stages: those in each stage of building.
    tags: counts of each tag's groups, "" for those without; empty if no group has one. Logs keep `MOST_TAGS`.
    stale_rows, misaligned_rows, and their tokens: of groups dropped for that reason. merged_tokens: saved by merging.
        realigned_tokens: sampled ones in no row, because a later prompt has other tokens in their place.
    mismatches: the breaks by cause, see `break_causes`. column_bytes: of the shards of all models, by declared column.
    padding_shares: of the last batch, as it is laid out, and as `packed` and each `pad_width` would be.
    staleness: trajectories with a known policy version, by how many versions they are behind; not in logs.
    means: see `Counts`.

    A log has the fields in this order: a new one comes last, and has a default. Older logs end with `tags`.
    """

    first: int
    last: int
    batches: int = 1
    at: float = 0.0
    groups: GroupCounts = GroupCounts()
    rows: int = 0
    merged: int = 0
    trained: int = 0
    padding: int = 0
    tokens: int = 0
    distinct: int = 0
    elements: int = 0
    loss_tokens: int = 0
    breaks: int = 0
    stale: int = 0
    versioned: int = 0
    stalest: int = 0
    seconds: float = 0.0
    workers_waited: float = 0.0
    ranks_waited: float = 0.0
    stages: dict[str, float] = {}
    tags: dict[str, GroupCounts] = {}
    stale_rows: int = 0
    stale_tokens: int = 0
    misaligned_rows: int = 0
    misaligned_tokens: int = 0
    merged_tokens: int = 0
    realigned_tokens: int = 0
    mismatches: dict[str, int] = {}
    column_bytes: dict[str, int] = {}
    padding_shares: dict[str, float] = {}
    staleness: dict[int, int] = {}
    means: dict[str, Mean] = {}

    @property
    def submitted_tokens(self) -> int:
        return self.tokens + self.merged_tokens + self.stale_tokens + self.misaligned_tokens

    @property
    def padding_tokens(self) -> int:
        return self.elements - self.distinct

    def joined(self, later: Figures) -> Figures:
        """Returns the combined figures of both."""
        sums = {
            name: _sum(getattr(self, name), getattr(later, name))
            for name in self.__struct_fields__
            if name not in ("first", "last", "at", "stalest", "padding_shares", "staleness")
        }
        return Figures(
            first=self.first,
            last=later.last,
            at=later.at,
            stalest=max(self.stalest, later.stalest),
            padding_shares=later.padding_shares,
            **(sums | {"tags": most_frequent(sums["tags"])}),
        )


def most_frequent(tags: Mapping[str, GroupCounts]) -> dict[str, GroupCounts]:
    """Returns the counts of the tags with the most groups."""
    groups = Counter({tag: counts.groups for tag, counts in sorted(tags.items())})
    return {tag: tags[tag] for tag in sorted(dict(groups.most_common(MOST_TAGS)))}


class Counts(NamedTuple):
    """Counts of a batch's groups: all, and those of each tag. means: the mean score of each agent, the mean of each
    component of rewards, and the running baselines after the batch, under their names in the plan's metrics; at most
    `MOST_MEANS` of each kind."""

    groups: GroupCounts
    tags: dict[str, GroupCounts]
    means: dict[str, Mean]


def _means_by_name(scored: ScoredBatch) -> dict[str, Mean]:
    terms: dict[str, list[float]] = {}
    scores, received = scored.scores.tolist(), scored.received
    for agent, score in zip(received.agents or (), scores, strict=False):
        terms.setdefault(f"agents/{agent or 'none'}/score_mean", []).append(score)
    for components in received.components or ():
        for name, number in components.items():
            terms.setdefault(f"components/{name}/mean", []).append(number)
    after = {} if scored.credit is None else scored.credit.baselines
    for (tag, agent), baseline in sorted(after.items())[:MOST_MEANS]:
        terms[f"baselines/{tag or 'none'}/{agent or 'none'}"] = [baseline]
    return {name: Mean(len(numbers), math.fsum(numbers)) for name, numbers in terms.items()}


def count(scored: ScoredBatch, mini_batches: Sequence[MiniBatchPlan], laid_out: Sequence[Shard] | None) -> Counts:
    """Counts all groups, and those of each tag if any group has one. laid_out: None if the batch is only planned."""
    policy = [part for part in mini_batches if part.model == "policy"]
    received, scores, lengths, means = scored.received, scored.scores, scored.rows.lengths, _means_by_name(scored)
    if not received.groups:
        return Counts(GroupCounts(), {}, means)
    begins, sizes = received.group_bounds[:-1], np.diff(received.group_bounds)
    best = np.maximum.reduceat(scores, begins)
    differ = np.zeros(len(sizes), np.bool_)
    differ[received.trajectory_groups[received.compared.differ(scores)[received.compared.numbers]]] = True
    flat = (sizes > 1) & ~differ
    responses = np.add.reduceat(received.steps.response_lengths, received.trajectory_bounds[:-1])
    rewards = np.add.reduceat(received.steps.rewards, received.trajectory_bounds[:-1])
    kept = np.zeros(len(scored.rows), np.bool_)
    for part in policy:
        kept[part.start : part.kept_end] = True
    padding = np.zeros_like(lengths) if laid_out is None else _row_padding(scored, policy, laid_out)

    def counted(groups: NDArray[np.bool_]) -> GroupCounts:
        trajectories, rows = groups[received.trajectory_groups], kept & groups[scored.row_groups]
        return GroupCounts(
            groups=int(groups.sum()),
            trajectories=int(trajectories.sum()),
            score_sum=float(scores[trajectories].sum()),
            response_tokens=int(responses[trajectories].sum()),
            solved=int((best[groups] > 0).sum()),
            zero_variance=int(flat[groups].sum()),
            reward_sum=float(rewards[trajectories].sum()),
            rows=int(rows.sum()),
            tokens=int(lengths[rows].sum()),
            loss_tokens=int(scored.loss_tokens[rows].sum()),
            padding=int(padding[rows].sum()),
        )

    tags = np.array(received.tags)
    by_tag = {tag: counted(tags == tag) for tag in sorted(set(received.tags))} if any(received.tags) else {}
    return Counts(counted(np.ones(len(received.groups), np.bool_)), by_tag, means)


def figures(
    scored: ScoredBatch,
    mini_batches: Sequence[MiniBatchPlan],
    laid_out: Sequence[Shard],
    config: RunConfig,
    batch: int,
    counts: Counts,
    tokens_submitted: int,
) -> Figures:
    """Returns a batch's figures, without times. tokens_submitted: prompt and response tokens of all submitted rows,
    including stale groups."""
    policy = [part for part in mini_batches if part.model == "policy"]
    groups, tags, means = counts
    steps, rows, staleness = scored.received.steps, scored.rows, scored.staleness
    fresh, merged = steps.tokens.total, int(rows.lengths.sum())
    elements = sum(shard.sequence_elements for shard in laid_out if shard.address.model == "policy")
    distinct = groups.tokens - (0 if scored.sharing is None else scored.sharing.shared_tokens(policy))
    mismatches = break_causes(scored, config)
    versions, trajectories = np.unique(staleness, return_counts=True)
    return Figures(
        first=batch,
        last=batch,
        groups=groups,
        rows=scored.rows_received,
        merged=len(steps) - len(rows),
        trained=groups.rows,
        padding=sum(part.padding_rows for part in policy),
        tokens=groups.tokens,
        distinct=distinct,
        elements=elements,
        loss_tokens=groups.loss_tokens,
        breaks=sum(mismatches.values()),
        stale=int(staleness.sum()),
        versioned=len(staleness),
        stalest=int(staleness.max(initial=0)),
        tags=tags,
        stale_rows=scored.rows_received - len(steps),
        stale_tokens=tokens_submitted - fresh,
        misaligned_rows=len(rows) - groups.rows,
        misaligned_tokens=merged - groups.tokens,
        merged_tokens=fresh - merged,
        realigned_tokens=scored.counts.get("realigned_tokens", 0),
        mismatches=mismatches,
        column_bytes=dict(sum((Counter(shard.column_bytes) for shard in laid_out), Counter())),
        padding_shares=_padding_shares(scored, policy, config, groups.tokens, 1 - distinct / elements)
        if elements
        else {},
        staleness=dict(zip(versions.tolist(), trajectories.tolist(), strict=True)),
        means=means,
    )


def _row_padding(scored: ScoredBatch, policy: Sequence[MiniBatchPlan], laid_out: Sequence[Shard]) -> Int64s:
    """Counts the elements of `sequences` that are padding in each row, without padding rows."""
    placed = np.concatenate([rank.rows for part in policy for rank in part.ranks])
    lengths = scored.rows.lengths
    widths = [
        lengths[placed[block.begin : block.end]] + _tails(shard, block)
        if block.widths is None
        else np.full(block.end - block.begin, block.widths["sequence"])
        for shard in laid_out
        if shard.address.model == "policy"
        for block in shard.blocks
    ]
    rows, padding = placed[placed >= 0], np.zeros_like(lengths)
    padding[rows] = np.concatenate(widths)[placed >= 0] - lengths[rows]
    return padding


def _tails(shard: Shard, block: Block) -> Int64s | int:
    """Returns the padding after each row of a block on a token axis."""
    tails = shard.placed.placement.tails
    return 0 if tails is None else tails[block.begin : block.end]


def break_causes(scored: ScoredBatch, config: RunConfig) -> dict[str, int]:
    """Counts steps that joined no other, by cause. Only the first such steps of a trajectory are examined; `further`
    counts the others."""
    if not config.merging.joins:
        return {}
    causes = Counter[str](mismatch.cause for mismatch in scored.mismatches)
    in_all = len(breaks(scored.received, scored.rows.first))
    return {**causes, "further": in_all - causes.total()}


def _padding_shares(
    scored: ScoredBatch, policy: Sequence[MiniBatchPlan], config: RunConfig, trained: int, laid_out: float
) -> dict[str, float]:
    lengths = np.append(scored.rows.lengths, config.padding_row_tokens)
    ranks = [rank for part in policy for rank in part.ranks]
    placed = lengths[np.concatenate([rank.rows for rank in ranks])]
    begins = np.cumsum([0, *(len(rank.rows) for rank in ranks)])
    edges = {
        "micro_batch": np.concatenate([begin + rank.bounds[:-1] for begin, rank in zip(begins, ranks, strict=False)]),
        "shard": begins[:-1],
        "mini_batch": begins[: -1 : len(policy[0].ranks)],
        "batch": begins[:1],
    }
    sizes = {level: _elements(placed, edge, config.pad_to_multiple_of) for level, edge in edges.items()}
    shares = {level: 1 - trained / size for level, size in [("packed", int(placed.sum())), *sizes.items()]}
    return {"laid_out": laid_out, **shares}


def _elements(lengths: Int64s, begins: Int64s, multiple: int) -> int:
    """Counts the elements of rows in blocks, each as wide as its longest row."""
    widths = -(-np.maximum.reduceat(lengths, begins) // multiple) * multiple
    return int((widths * np.diff(np.append(begins, len(lengths)))).sum())


def _sum(one: Any, other: Any) -> Any:
    """Adds numbers, counts of groups, or dictionaries of these."""
    if isinstance(one, dict):
        both = one.keys() & other.keys()
        return one | other | {key: _sum(one[key], other[key]) for key in both}
    return one + other
