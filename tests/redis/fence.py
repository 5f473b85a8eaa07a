"""Stands for the owner of every run, where it does not matter who that is."""

from __future__ import annotations

import redis


class OpenFence:
    def __init__(self, client: redis.Redis | redis.RedisCluster) -> None:
        self._client = client
        self.claims = 1

    def claim(self, run: str) -> int:
        return self.claims

    def replace(self, run: str, key: str, value: bytes) -> bytes:
        before = self._client.get(key)
        assert not isinstance(before, str)
        self._client.set(key, value)
        return before or b""

    def remove(self, run: str, key: str) -> bytes:
        before = self._client.get(key)
        assert not isinstance(before, str)
        self._client.delete(key)
        return before or b""
