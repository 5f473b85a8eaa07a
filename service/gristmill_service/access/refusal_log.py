"""The audit log's lines of refused calls: however many there are, they do not fill a disk."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

_log = structlog.get_logger("gristmill.audit")
_EACH_S = 1.0
_MOST_KINDS = 256
_OTHERS = ("others", "various", "various")
_MOST_OF_A_NAME = 200


class RefusalLog:
    """A line per second for each caller, call and status, which says how many like it were left out before. Where these
    are very many, the others share a line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[tuple[str, str, str], float] = {}
        self._left_out: dict[tuple[str, str, str], int] = {}
        self._swept = 0.0

    def note(self, caller: str, call: str, code: str, run: str | None, rank: int | None) -> None:
        now = self._clock()
        if now >= self._swept + _EACH_S:
            self._swept = now
            self.flush()
            self._due = {kind: due for kind, due in self._due.items() if due > now}
        kind = (caller, call, code)
        if kind not in self._due and len(self._due) >= _MOST_KINDS:
            kind = _OTHERS
        if now < self._due.get(kind, 0.0):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._due[kind] = now + _EACH_S
        # Cut: a caller that is refused may send names of megabytes.
        _log.warning("refused", caller=caller, call=call, code=code, target=run and run[:_MOST_OF_A_NAME], rank=rank)

    def flush(self) -> None:
        """Logs how many were left out."""
        for (caller, call, code), count in self._left_out.items():
            _log.warning("refused, lines left out", caller=caller, call=call, code=code, count=count)
        self._left_out = {}
