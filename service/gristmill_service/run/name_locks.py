"""A lock for each name of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NameLocks:
    """Locks single names, so that a long replay or deletion does not delay other runs."""

    def __init__(self) -> None:
        self._locks: dict[str, _NameLock] = {}

    def is_locked(self, name: str) -> bool:
        """Returns whether a caller has the lock of the name, or waits for it."""
        return name in self._locks

    @asynccontextmanager
    async def locked(self, name: str) -> AsyncIterator[None]:
        entry = self._locks.setdefault(name, _NameLock())
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._locks[name]


class _NameLock:
    """The lock of one name. users: the number of callers that have the lock or wait for it."""

    def __init__(self) -> None:
        self.lock, self.users = asyncio.Lock(), 0
