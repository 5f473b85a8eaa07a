"""Notices that the service has lost rows of a run that it had accepted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from gristmill import RunStatus

_log = logging.getLogger("gristmill.recorder")


class Epochs:
    """number: increases by one when rows were lost: the run's log was rolled back, or another run has its name."""

    def __init__(self) -> None:
        self.number = 0
        self._identity: tuple[str, int] | None = None
        self._accepted = 0

    def accepted(self, rows: int) -> None:
        """Notes that the service has accepted this many more rows."""
        self._accepted += rows

    async def status(self, ask: Callable[[], Awaitable[RunStatus]]) -> RunStatus:
        """Asks for the run's status, returns it, and updates `number`."""
        number, accepted = self.number, self._accepted
        status = await ask()
        if self.number == number:
            identity = status.run_id, status.generation
            if self._identity not in (None, identity) or status.rows_accepted < accepted:
                _log.warning(
                    "run %r: the service lost steps that it had accepted; open trajectories will be delivered again",
                    status.run,
                )
                self.number += 1
                self._accepted = status.rows_accepted
            self._identity = identity
        return status
