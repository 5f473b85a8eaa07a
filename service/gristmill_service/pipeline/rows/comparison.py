"""Comparison groups: the trajectories that an estimator compares with each other (specification, section 14)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s


class Comparison(NamedTuple):
    """Groups of trajectories, or of steps.

    numbers: int64 (trajectories,), the group of each, -1 for one in no group. order: int64, the trajectories of all
    groups, those of the first group before those of the next, in their order. bounds: int64 (groups + 1,): group g is
    `order[bounds[g]:bounds[g + 1]]`.
    """

    numbers: Int64s
    order: Int64s
    bounds: Int64s

    @classmethod
    def of(cls, numbers: Int64s) -> Comparison:
        """Returns the groups of equal numbers; -1 is in no group."""
        order = np.argsort(numbers, kind="stable")
        order = order[numbers[order] >= 0]
        bounds = np.append(np.flatnonzero(np.diff(numbers[order], prepend=-1)), len(order))
        ranks = np.full(len(numbers), -1)
        ranks[order] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        return cls(ranks, order, bounds)

    def by_size(self) -> Iterator[Int64s]:
        """Yields the groups of each size as their trajectories; int64 (groups, size)."""
        sizes = np.diff(self.bounds)
        for size in np.flatnonzero(np.bincount(sizes)).tolist():
            yield self.order[self.bounds[:-1][sizes == size][:, np.newaxis] + np.arange(size)]

    def ranges(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the lowest and the highest value of each group; (groups,) each."""
        ordered, begins = values[self.order], self.bounds[:-1]
        return np.minimum.reduceat(ordered, begins), np.maximum.reduceat(ordered, begins)

    def differ(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns whether each group has two different values; (groups,)."""
        lowest, highest = self.ranges(values)
        different: NDArray[np.bool_] = lowest != highest
        return different


def comparison_groups(
    trajectory_groups: Int64s,
    group_bounds: Int64s,
    agents: Sequence[str] | None,
    episodes: Sequence[str] | None,
    episode_agents: Collection[str],
) -> Comparison:
    """Returns the comparison groups of a batch: prompt groups, divided by agent, and by episode for `episode_agents`.

    agents, episodes: (trajectories,); None if there are none.
    """
    count = len(trajectory_groups)
    if agents is None:
        return Comparison(trajectory_groups, np.arange(count), group_bounds)
    keys = zip(trajectory_groups.tolist(), compared_by(agents, episodes or [""] * count, episode_agents), strict=True)
    numbers: dict[Any, int] = {}
    return Comparison.of(np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, count))


def compared_by(
    agents: Iterable[str], episodes: Iterable[str], episode_agents: Collection[str]
) -> list[tuple[str, str]]:
    """Returns, for each trajectory of a prompt group, what those that it is compared with have in common."""
    return [
        (agent, episode if agent in episode_agents else "") for agent, episode in zip(agents, episodes, strict=True)
    ]
