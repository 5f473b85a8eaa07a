"""What the rows of all runs may hold together, and what each may have of it."""

from __future__ import annotations

from gristmill_service.access.held import ANY, NOTHING, Held, Most
from gristmill_service.run.machine.decisions.admission import with_overdraft

_SHARE = 4


class RowBudget:
    """The bytes of rows that all runs of the service hold or have promised room for, and their bound.

    Runs are admitted to it one by one, so that two at the same moment may overshoot by what they then admit. Where
    there are several, each may have more as long as it holds less than four times what is free: one that takes all it
    gets leaves a fifth to the next that comes (dynamic thresholds, Choudhury and Hahne 1998).

    most_a_run: what any one may hold, whatever is free.
    """

    def __init__(self, max_bytes: int, most_a_run: Most = ANY) -> None:
        self.max_bytes, self.most_a_run = max_bytes, most_a_run
        self._held: dict[str, int] = {}
        self._by_run: dict[str, Held] = {}
        self._total = 0

    def hold(self, run: str, nbytes: int, held: Held = NOTHING) -> None:
        """The run now holds and has promised room for so many bytes, in place of what it had before. held: what it
        holds."""
        self._total += nbytes - self._held.get(run, 0)
        self._held[run], self._by_run[run] = nbytes, held

    def forget(self, run: str) -> None:
        """The run holds nothing and wants nothing any more."""
        self._total -= self._held.pop(run, 0)
        self._by_run.pop(run, None)

    def by_run(self) -> dict[str, Held]:
        """What each run holds."""
        return dict(self._by_run)

    @property
    def held(self) -> int:
        """Bytes of all runs."""
        return self._total

    def left_for(self, run: str) -> int:
        """What the run may hold and promise in all, beside the others."""
        free = self.max_bytes - self._total
        left = free + self._held.get(run, 0)
        return left if len(self._held.keys() | {run}) == 1 else min(left, _SHARE * free)

    def most_for(self, run: str) -> int:
        """What the run's rows may take, whatever was promised to them: what the others hold is kept for those."""
        return with_overdraft(self.max_bytes) - self._total + self._held.get(run, 0)
