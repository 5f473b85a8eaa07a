"""The figures of a batch: sums of its table, so that those of several batches can be added.

The plan shows some of them, metrics count them, and a run's log stores them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import add
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill._wire.batch_table import BatchTable
from gristmill._wire.columns import Int64s
from gristmill._wire.row_fields import UNKNOWN
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.planning import Plan

LEVELS = ("laid_out", "packed", "micro_batch", "shard", "mini_batch", "batch")
MOST_TAGS = 8
MOST_MEANS = 65


class GroupCounts(msgspec.Struct, array_like=True, frozen=True):
    """Counts of groups. Each trajectory counts once, and rows and tokens as often as they are trained in an epoch.

    score_sum, reward_sum: sums over all trajectories. response_tokens: the sum over all their steps. solved: groups
    with a trajectory that scored above 0. zero_variance: groups of several trajectories with equal scores. padding:
    padding tokens within rows.
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
    mismatches: the breaks by cause, see `rows.breaks`. column_bytes: of the shards of all models, by declared column.
    padding_shares: of the last batch, as it is laid out, and as `packed` and each `pad_width` would be.
    staleness: trajectories with a known policy version, by how many versions they are behind; not in logs.
    means: the mean score of each agent, the mean of each component of rewards, and the running baselines after the
        batch, under their names in the plan's metrics.

    A log has the fields in this order: a new one comes last, and has a default.
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


def counts_of(table: BatchTable) -> tuple[GroupCounts, dict[str, GroupCounts]]:
    """Counts all groups, and those of each tag if any group has one."""
    of_groups, tags = table.groups["tag"], table.texts["tags"]
    [every] = _counted(table, np.zeros_like(of_groups), 1)
    return every, dict(sorted(zip(tags, _counted(table, of_groups, len(tags)), strict=True))) if any(tags) else {}


def _counted(table: BatchTable, parts: NDArray[Any], count: int) -> list[GroupCounts]:
    """Counts the groups of each part, of all at once: a batch may have a tag per group. parts: int (groups,), the part
    of each group."""
    rows, trajectories = table.rows, table.trajectories
    owners, is_trained = parts[trajectories["group"]], rows["policy.rank"] >= 0
    of_rows, lengths = owners[rows["trajectory"][is_trained]], rows["length"][is_trained]
    best = np.zeros(len(parts))
    np.maximum.at(best, trajectories["group"], trajectories["score"])

    def sums(of: NDArray[Any], values: NDArray[Any] | None = None) -> NDArray[Any]:
        return np.bincount(of, values, count)

    def whole(of: NDArray[Any], values: NDArray[Any]) -> Int64s:
        return sums(of, values).astype(np.int64)

    columns = {
        "groups": sums(parts),
        "trajectories": sums(owners),
        "score_sum": sums(owners, trajectories["score"]),
        "response_tokens": whole(owners, trajectories["response"]),
        "solved": whole(parts, best > 0),
        "zero_variance": whole(parts, table.groups["zero_variance"]),
        "reward_sum": sums(owners, trajectories["reward"]),
        "rows": sums(of_rows),
        "tokens": whole(of_rows, lengths),
        "loss_tokens": whole(of_rows, rows["trained"][is_trained]),
        "padding": whole(of_rows, rows["policy.width"][is_trained] - lengths),
    }
    each = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [GroupCounts(**dict(zip(columns, numbers, strict=True))) for numbers in each]


def staleness_of(table: BatchTable) -> Int64s:
    """Returns how many versions each trajectory with a known policy version is behind."""
    behind: Int64s = table.trajectories["behind"].astype(np.int64)
    return behind[behind > UNKNOWN]


def causes_of(table: BatchTable) -> Counter[str]:
    """Returns how many breaks have each cause."""
    return Counter(table.texts["causes"][cause] for cause in table.breaks["cause"].tolist())


def figures(
    table: BatchTable, batch: int, padding_shares: Mapping[str, float], column_bytes: Mapping[str, int]
) -> Figures:
    """Returns a batch's figures, without times: sums of its table. padding_shares: see `padding_shares`. column_bytes:
    of the shards, by declared column."""
    groups, tags = counts_of(table)
    facts, staleness, lengths = table.facts, staleness_of(table), table.rows["length"]
    versions, trajectories = np.unique(staleness, return_counts=True)
    causes = causes_of(table)
    return Figures(
        first=batch,
        last=batch,
        groups=groups,
        rows=facts["rows_received"],
        merged=facts["steps"] - len(lengths),
        trained=groups.rows,
        padding=facts["padding_rows"],
        tokens=groups.tokens,
        distinct=groups.tokens - facts["shared_tokens"],
        elements=facts["elements"],
        loss_tokens=groups.loss_tokens,
        breaks=causes.total(),
        stale=int(staleness.sum()),
        versioned=len(staleness),
        stalest=int(staleness.max(initial=0)),
        tags=tags,
        stale_rows=facts["rows_received"] - facts["steps"],
        stale_tokens=facts["tokens_received"] - facts["fresh_tokens"],
        misaligned_rows=len(lengths) - groups.rows,
        misaligned_tokens=_total(lengths) - groups.tokens,
        merged_tokens=facts["fresh_tokens"] - _total(lengths),
        realigned_tokens=facts["realigned_tokens"],
        mismatches=dict(causes),
        column_bytes=dict(column_bytes),
        padding_shares=dict(padding_shares),
        staleness=dict(zip(versions.tolist(), trajectories.tolist(), strict=True)),
        means={name: Mean(*mean) for name, mean in facts["means"].items()},
    )


def padding_shares(plan: Plan, table: BatchTable, config: RunConfig) -> dict[str, float]:
    """Returns the share of padding in the policy's shards as they are laid out, as `packed`, and with each
    `pad_width`."""
    elements = table.facts["elements"]
    if not elements:
        return {}
    lengths = np.append(plan.numbers.rows.lengths, config.padding_row_tokens)
    ranks = [rank for part in plan.policy for rank in part.ranks]
    placed = lengths[np.concatenate([rank.rows for rank in ranks])]
    begins = np.cumsum([0, *(len(rank.rows) for rank in ranks)])
    edges = {
        "micro_batch": np.concatenate([begin + rank.bounds[:-1] for begin, rank in zip(begins, ranks, strict=False)]),
        "shard": begins[:-1],
        "mini_batch": begins[: -1 : len(plan.policy[0].ranks)],
        "batch": begins[:1],
    }
    sizes = {level: _elements(placed, edge, config.pad_to_multiple_of) for level, edge in edges.items()}
    trained = _total(table.rows["length"][table.rows["policy.rank"] >= 0])
    laid_out = 1 - (trained - table.facts["shared_tokens"]) / elements
    shares = {level: 1 - trained / size for level, size in [("packed", int(placed.sum())), *sizes.items()]}
    return {"laid_out": laid_out, **shares}


def _elements(lengths: Int64s, begins: Int64s, multiple: int) -> int:
    """Counts the elements of rows in blocks, each as wide as its longest row."""
    widths = -(-np.maximum.reduceat(lengths, begins) // multiple) * multiple
    return int((widths * np.diff(np.append(begins, len(lengths)))).sum())


def _total(values: NDArray[Any]) -> int:
    return int(values.sum(dtype=np.int64))


def _sum(one: Any, other: Any) -> Any:
    """Adds numbers, counts of groups, or dictionaries of these."""
    if isinstance(one, dict):
        both = one.keys() & other.keys()
        return one | other | {key: _sum(one[key], other[key]) for key in both}
    return one + other
