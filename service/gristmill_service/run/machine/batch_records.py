"""What a run's log keeps of its batches for good: a small record of each, which outlives rows, shards and processes.

Records hold sums, so that two of them are one of both batches. Where there are many, each two neighbours become one: a
run of any length keeps at most `MOST`, and its totals stay exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

from gristmill_service.pipeline.group_counts import GroupCounts, summed

MOST = 1024
MOST_TAGS = 8


class BatchRecord(NamedTuple):
    """Batches `first` to `last`, of which `batches` were published, counted as `BatchStats` counts.

    at: when the last of them was published, in seconds since 1970.
    rows: as they came; merged: those that went into others; trained, padding: rows of shards.
    tokens: of trained rows; elements: of `sequences`, with padding. distinct: tokens that are laid out.
    breaks: steps that joined none. stale: versions behind, summed over `versioned` trajectories; stalest: the most.
    Seconds are those since the record before: in all, those in which workers waited for room, those in which a rank
    of the policy waited (their mean), and those in each stage of building.
    tags: the groups of each tag, of the 8 that have most; none where no group has one.
    """

    first: int
    last: int
    batches: int
    at: float
    groups: GroupCounts
    rows: int
    merged: int
    trained: int
    padding: int
    tokens: int
    distinct: int
    elements: int
    loss_tokens: int
    breaks: int
    stale: int
    versioned: int
    stalest: int
    seconds: float
    workers_waited: float
    ranks_waited: float
    stages: dict[str, float]
    tags: dict[str, GroupCounts]


def keep(records: list[BatchRecord], record: BatchRecord) -> None:
    """Adds the record to those before it, and halves their number where they are too many: all but the last are of
    equally many batches."""
    if records and records[-1].batches < records[0].batches:
        records[-1] = joined(records[-1], record)
    else:
        records.append(record)
    if len(records) > MOST:
        paired = [joined(*pair) for pair in list(pairwise(records))[::2]]
        records[:] = paired + records[2 * len(paired) :]


def total(records: Iterable[BatchRecord]) -> BatchRecord | None:
    """One record of all; None where there is none."""
    found = list(records)
    return reduce(joined, found) if found else None


def joined(one: BatchRecord, other: BatchRecord) -> BatchRecord:
    """The record of both. other: of later batches."""
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in BatchRecord._fields
        if name not in ("first", "last", "at", "groups", "stalest", "stages", "tags")
    }
    return BatchRecord(
        first=one.first,
        last=other.last,
        at=other.at,
        groups=summed([one.groups, other.groups]),
        stalest=max(one.stalest, other.stalest),
        stages={name: one.stages.get(name, 0.0) + other.stages.get(name, 0.0) for name in one.stages | other.stages},
        tags=most_frequent(
            {tag: summed(tags[tag] for tags in (one.tags, other.tags) if tag in tags) for tag in one.tags | other.tags}
        ),
        **sums,
    )


def most_frequent(tags: dict[str, GroupCounts]) -> dict[str, GroupCounts]:
    """The figures of the tags that have most groups."""
    counted = Counter({tag: counts.groups for tag, counts in sorted(tags.items())})
    return {tag: tags[tag] for tag in sorted(dict(counted.most_common(MOST_TAGS)))}
