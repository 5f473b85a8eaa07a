"""A shard's bytes: where they are, whether they may be mapped, and what their header says.

Shards are safetensors files. Owns no tensor: `gristmill.torch` makes them of what is found here.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from gristmill.errors import InvalidArgumentError
from gristmill.v1 import run_pb2, trainer_pb2

MODELS: dict[str, Any] = {"policy": run_pb2.MODEL_POLICY, "critic": run_pb2.MODEL_CRITIC}

# The length of the header stands in the file's first 8 bytes; the format allows 100 MB.
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000


class Position(NamedTuple):
    """A place in a model's training order: batch by batch, epoch by epoch over the batch, mini-batch by mini-batch."""

    batch: int
    epoch: int = 0
    mini_batch: int = 0

    def __str__(self) -> str:
        return f"batch {self.batch} epoch {self.epoch} mini-batch {self.mini_batch}"

    @classmethod
    def of(cls, message: run_pb2.Position) -> Position:
        return cls(message.batch, message.epoch, message.mini_batch)

    def message(self) -> run_pb2.Position:
        return run_pb2.Position(batch=self.batch, epoch=self.epoch, mini_batch=self.mini_batch)


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One shard of a run: what a rank trains on in one mini-batch of one model."""

    run: str
    model: str
    rank: int
    batch: int
    mini_batch: int

    def request(self) -> trainer_pb2.ReadShardRequest:
        return trainer_pb2.ReadShardRequest(
            run=self.run, model=MODELS[self.model], rank=self.rank, batch=self.batch, mini_batch=self.mini_batch
        )

    def is_of(self, metadata: dict[str, Any]) -> bool:
        """Whether a shard with this metadata is the one meant."""
        names = ("run", "model", "rank", "batch", "mini_batch")
        return all(metadata.get(name) == getattr(self, name) for name in names)


def is_mappable(path: str, size: int) -> bool:
    """Whether the service's shared memory is this machine's: a file is there, readable, and of this size."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size and os.access(path, os.R_OK)


class Header(NamedTuple):
    """The part of a shard before its tensors.

    metadata: what it says of the shard, each value read as JSON. entries: per tensor its dtype, shape and data_offsets.
    size: its bytes, from which the offsets count.
    """

    metadata: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    size: int


def read_header(file: IO[bytes], size: int, where: str) -> Header:
    """Raises InvalidArgumentError where the `size` bytes are not those of a shard."""
    try:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise ValueError(f"its header would have {length} bytes")
        entries = json.loads(file.read(length))
        metadata = {name: json.loads(value) for name, value in entries.pop("__metadata__", {}).items()}
        if "micro_batches" not in metadata:
            raise ValueError("it does not say micro_batches")
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(f"{where} ({size} bytes) is no shard of gristmill: {error}; make it anew") from None
    return Header(metadata, entries, _LENGTH_BYTES + length)
