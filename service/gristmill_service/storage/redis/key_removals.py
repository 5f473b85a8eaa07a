"""Keys that nothing names any more, until Redis has removed them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from gristmill_service.storage.redis.row_values import unlink
from gristmill_service.storage.redis.servers.connection import Client

_KEYS_AT_ONCE = 500


class KeyRemovals:
    """Thread-safe. A key that is added stays until a removal of it has succeeded."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # Guards the list, which several runs' threads add to while others wait for Redis.
        self._lock = threading.Lock()
        self._keys: list[str] = []

    def add(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._keys += keys

    def run(self) -> None:
        """Removes all keys but those that another thread is removing. Raises redis-py's errors; what was not removed
        is tried again by the next call."""
        while keys := self._take():
            try:
                unlink(self._client, keys)
            except BaseException:
                self.add(keys)
                raise

    def _take(self) -> list[str]:
        with self._lock:
            taken = self._keys[-_KEYS_AT_ONCE:]
            del self._keys[-_KEYS_AT_ONCE:]
            return taken
