"""The capacity that the runs of a service share: bytes of rows, and space in the shard store."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.quotas import NO_LIMITS, NO_USAGE, Limits, Usage
from gristmill_service.run.machine.decisions.admission import with_overdraft
from gristmill_service.storage.run_store import CheckNames

_SHARE = 4


def check_runs(most: int, check: CheckNames, names: Collection[str]) -> None:
    """Raises ResourceExhaustedError if the service may have no run in addition to those with these names, like `check`
    for the caller."""
    if len(names) >= most:
        raise ResourceExhaustedError(
            f"{len(names)} runs exist, and max_runs is {most}; delete a run, or raise max_runs"
        )
    check(names)


class RowBudget:
    """The bytes of rows that all runs store or have reserved, and their limit.

    If there are several runs, each may use at most four times the free bytes, so that a run that uses all of its share
    leaves a fifth for the next run (dynamic thresholds, Choudhury and Hahne 1998). Rows of admitted groups beyond a
    run's share use the quarter above the limit, in the same shares, and do not delay groups of other runs.

    limits_of_each: the limits of each run, whatever is free.
    """

    def __init__(self, max_bytes: int, limits_of_each: Limits = NO_LIMITS) -> None:
        self.max_bytes, self.limits_of_each = max_bytes, limits_of_each
        self._bytes: dict[str, int] = {}
        self._usage: dict[str, Usage] = {}
        self._total = self._total_of_shares = 0

    def hold(self, run: str, nbytes: int, usage: Usage = NO_USAGE) -> None:
        """Records the bytes that the run now stores or has reserved. usage: what it stores."""
        self._add(nbytes, self._bytes.get(run, 0))
        self._bytes[run], self._usage[run] = nbytes, usage

    def forget(self, run: str) -> None:
        """Removes a closed run."""
        self._add(0, self._bytes.pop(run, 0))
        self._usage.pop(run, None)

    def usage(self) -> dict[str, Usage]:
        """Returns the usage of each run."""
        return dict(self._usage)

    @property
    def held(self) -> int:
        """The bytes of all runs, stored or reserved."""
        return self._total

    def left_for(self, run: str) -> int:
        """Returns the bytes that the run may store or reserve in total."""
        return self._most(run, self._within_share(self._bytes.get(run, 0)), self.max_bytes - self._total_of_shares)

    def most_for(self, run: str) -> int:
        """Returns the bytes that the run's rows may use: at least its reserved bytes, and more if there are free
        ones."""
        own = self._bytes.get(run, 0)
        return max(own, self._most(run, own, with_overdraft(self.max_bytes) - self._total))

    def _most(self, run: str, own: int, free: int) -> int:
        return free + own if len(self._bytes.keys() | {run}) == 1 else min(free + own, _SHARE * free)

    def _add(self, nbytes: int, before: int) -> None:
        self._total += nbytes - before
        self._total_of_shares += self._within_share(nbytes) - self._within_share(before)

    def _within_share(self, nbytes: int) -> int:
        return min(nbytes, self.max_bytes * _SHARE // (_SHARE + 1))


class ShardRoom:
    """Wakes runs that found the shard store full when another run frees space. removals: counts the removals of shards;
    read it before trying to publish."""

    def __init__(self) -> None:
        self.removals = 0
        # A run that retries by itself waits again each time, and counts once.
        self._waiting: dict[Callable[[], None], None] = {}

    def wait(self, removals: int, retry: Callable[[], None]) -> None:
        """Calls `retry` once, at the next removal, or immediately if there was one since `removals` was read."""
        if self.removals != removals:
            retry()
        else:
            self._waiting[retry] = None

    def removed(self) -> None:
        """Records that shards were removed, and wakes the waiting runs."""
        self.removals += 1
        waiting, self._waiting = self._waiting, {}
        for retry in waiting:
            retry()
