"""Dormant runs: they have ended, and nobody calls them, so their logs are closed. A call opens them again.

The run store marks them, so that neither a restart nor another process opens them before a call does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from gristmill_service.run.run import Run
from gristmill_service.storage.run_store import RunStore

DORMANT_AFTER_S = 3600.0
"""The time without calls after which a run that has ended becomes dormant."""


class DormantRuns:
    """The dormant runs of a store.

    names: as of the last `look`, and of the changes by this process since then. describe: returns what is reported of a
    run while it is dormant.
    """

    def __init__(
        self, store: RunStore, describe: Callable[[Run], bytes], clock: Callable[[], float], after_s: float
    ) -> None:
        self.names = set[str]()
        self._store, self._describe, self._clock, self._after_s = store, describe, clock, after_s

    async def look(self) -> None:
        """Reads the names from the store."""
        self.names = {*await asyncio.to_thread(self._store.dormant)}

    def is_due(self, run: Run) -> bool:
        """Returns whether the run should become dormant now."""
        return run.is_over and not run.is_lost and self._clock() - run.called_at >= self._after_s

    async def mark(self, run: Run) -> None:
        """Marks a run that is about to be closed. Raises UnavailableError; it may then be marked, but has to be opened
        again."""
        await asyncio.to_thread(self._store.set_dormant, run.name, self._describe(run))
        self.names.add(run.name)

    async def descriptions(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Returns the descriptions of the dormant runs among these, which this process has not opened."""
        closed = [name for name in names if self._store.is_shared or name in self.names]
        return await asyncio.to_thread(self._store.descriptions, closed) if closed else {}
