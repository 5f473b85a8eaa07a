"""The names of shards' keys. There is no brace in those of a batch's pieces: a cluster spreads them over its slots."""

from __future__ import annotations

import re
from urllib.parse import quote

from gristmill_service.pipeline.shard_address import ShardAddress


class ShardKeys:
    """Keys of one run's shards, whatever the run is called."""

    def __init__(self, prefix: str, run: str) -> None:
        self._run = f"{prefix}:{quote(run, safe='')}"

    def index(self, batch: int) -> str:
        """What makes a batch visible; beside the keys that say whose the run is."""
        return f"{{{self._run}}}:batch:{batch}"

    def plan(self, nonce: str) -> str:
        return f"{self._run}:shard:{nonce}:plan"

    def piece(self, nonce: str, address: ShardAddress, number: int) -> str:
        return f"{self._run}:shard:{nonce}:{address.model}:{address.mini_batch}:{address.rank}:{number}"

    @property
    def patterns(self) -> tuple[str, str]:
        """What SCAN finds all of the run's keys by: first what makes batches visible, then what they are made of."""
        run = re.sub(r"([*?\[\]^\\])", r"\\\1", self._run)
        return f"{{{run}}}:batch:*", f"{run}:shard:*"
