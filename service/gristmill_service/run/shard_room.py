"""Room in a shard store that several runs fill: a run that found it full is told when another gives room back."""

from __future__ import annotations

from collections.abc import Callable


class ShardRoom:
    """One for all runs of a store."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._removals = 0

    @property
    def removals(self) -> int:
        """How often shards were removed: read it before trying to publish."""
        return self._removals

    def wait(self, removals: int, retry: Callable[[], None]) -> None:
        """Calls `retry` once, at the next removal; at once where there was one since `removals` was read."""
        is_late = self._removals != removals
        if not is_late:
            self._waiting.append(retry)
        if is_late:
            retry()

    def removed(self) -> None:
        """Shards were removed from the store."""
        self._removals += 1
        waiting, self._waiting = self._waiting, []
        for retry in waiting:
            retry()
