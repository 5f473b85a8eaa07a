"""An address names a shard of a batch, wherever it is laid out, stored or asked for."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill_service.config import Model


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One shard of a batch: what a rank trains on in one mini-batch of one model."""

    model: Model
    mini_batch: int
    rank: int

    @property
    def path(self) -> str:
        """The place of the shard's file within its batch, as in the offline command's output."""
        return f"{self.model}-{self.mini_batch:03d}/rank-{self.rank:03d}.safetensors"
