"""Warns of a step for a group that the client did not begin, if it began others: the uid is probably misspelled."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_log = logging.getLogger("gristmill")

_LIMIT = 100_000
"""The most groups that are recorded, about 10 MB. A client that begins more groups logs no warning."""


class BegunGroups:
    """The groups that one client began."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._keys: set[tuple[int, str]] = set()
        self._warns = True

    def add(self, round_: int, uids: Iterable[str]) -> None:
        if self._warns:
            self._keys.update((round_, uid) for uid in uids)
        if len(self._keys) > _LIMIT:
            self._stop()

    def check(self, round_: int, uid: str) -> None:
        """Logs a warning, once per client, if the client began groups but not this one."""
        if self._warns and self._keys and (round_, uid) not in self._keys:
            _log.warning(
                "run %r: this client begins groups, but did not begin uid %r of round %d: the first step begins its "
                "group even if there is no capacity, and a batch may wait for its other samples; correct the uid if "
                "it is misspelled, or pass it to begin_groups first",
                self._run,
                uid,
                round_,
            )
            self._stop()

    def clear(self) -> None:
        self._keys.clear()

    def _stop(self) -> None:
        self._warns = False
        self._keys.clear()
