"""What a batch's groups scored, counted so that batches add up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gristmill_service.pipeline.scored_batch import ScoredBatch


class GroupCounts(NamedTuple):
    """
    score_sum: of all trajectories' scores. response_tokens: of all their steps. solved: groups of which a trajectory
    scored above 0, as `pass_at_n` has it. zero_variance: groups of several trajectories whose scores are all equal.
    """

    groups: int = 0
    trajectories: int = 0
    score_sum: float = 0.0
    response_tokens: int = 0
    solved: int = 0
    zero_variance: int = 0


def summed(counts: Iterable[GroupCounts]) -> GroupCounts:
    """The counts of all these groups together."""
    return GroupCounts(*map(sum, zip(*counts, strict=True)))


def group_counts(scored: ScoredBatch) -> dict[str, GroupCounts]:
    """Counts the groups of each tag, "" for those without one."""
    received = scored.received
    if not received.groups:
        return {}
    of_group = received.tags or [""] * len(received.groups)
    names = sorted(set(of_group))
    numbers = {name: number for number, name in enumerate(names)}
    tags = np.array([numbers[tag] for tag in of_group])
    begins, sizes = received.group_bounds[:-1], np.diff(received.group_bounds)
    highest, lowest = np.maximum.reduceat(scored.scores, begins), np.minimum.reduceat(scored.scores, begins)
    tokens = np.add.reduceat(received.steps.response_lengths, received.trajectory_bounds[:-1])
    columns = (
        np.ones(len(tags)),
        sizes,
        np.add.reduceat(scored.scores, begins),
        np.add.reduceat(tokens, begins),
        highest > 0,
        (sizes > 1) & (highest == lowest),
    )
    sums = [np.bincount(tags, column, len(names)).tolist() for column in columns]
    return {
        name: GroupCounts(int(groups), int(trajectories), score, int(responses), int(solved), int(flat))
        for name, groups, trajectories, score, responses, solved, flat in zip(names, *sums, strict=True)
    }
