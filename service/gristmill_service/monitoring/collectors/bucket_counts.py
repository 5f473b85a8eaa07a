"""Values counted by size, as Prometheus takes histograms: how many were at most each bound, and their sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""From a small batch's stage to what waits for a trainer or a full disk."""
VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


class BucketCounts:
    """Not thread-safe: whoever counts into it holds its owner's lock, and hands out copies.

    bounds: ascending; values above the last one are counted, too.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.add(value)

    def copy(self) -> BucketCounts:
        copied = BucketCounts(self.bounds)
        copied.sum, copied._counts = self.sum, self._counts.copy()
        return copied

    def up_to(self) -> list[tuple[str, int]]:
        """Each bound as a label, and how many values were at most that."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found
