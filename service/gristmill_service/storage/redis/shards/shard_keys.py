"""The names of shards' keys. There is no brace in those of a batch's pieces: a cluster spreads them over its slots."""

from __future__ import annotations

import re
from urllib.parse import quote

from gristmill_service.pipeline.layout.shard_address import ShardAddress


class ShardKeys:
    """Keys of one run's shards, whatever the run is called."""

    def __init__(self, prefix: str, run: str) -> None:
        self._run = f"{prefix}:{quote(run, safe='')}"

    def index(self, batch: int) -> str:
        """The key that makes a batch visible; it is in the slot of the keys that say whose the run is."""
        return f"{{{self._run}}}:batch:{batch}"

    def plan(self, nonce: str) -> str:
        return f"{self._run}:shard:{nonce}:plan"

    def piece(self, nonce: str, address: ShardAddress, number: int) -> str:
        return f"{self._run}:shard:{nonce}:{address.model}:{address.mini_batch}:{address.rank}:{number}"

    def batch_of(self, index: bytes) -> int:
        """The batch of an index's key."""
        return int(index.rpartition(b":")[2])

    def nonce_of(self, piece: bytes) -> str:
        """The publication of a key that `pieces` matches."""
        return piece.removeprefix(f"{self._run}:shard:".encode()).partition(b":")[0].decode()

    @property
    def indexes(self) -> str:
        """The pattern by which SCAN finds what makes batches visible."""
        return f"{{{self._escaped}}}:batch:*"

    @property
    def pieces(self) -> str:
        """The pattern by which SCAN finds what batches are made of."""
        return f"{self._escaped}:shard:*"

    @property
    def _escaped(self) -> str:
        return re.sub(r"([*?\[\]^\\])", r"\\\1", self._run)
