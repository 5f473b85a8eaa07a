"""Addresses of shards, and the headers of their files.

Shards are safetensors files. `gristmill.torch` reads their tensors.
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

# The first 8 bytes of a file are the length of its header. The limit of safetensors is 100 MB.
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000


class Position(NamedTuple):
    """A position in a model's training order: batch by batch, epoch by epoch within a batch, then mini-batch by
    mini-batch."""

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
    """Identifies the shard that a rank trains in one mini-batch of one model."""

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
        """Returns whether the metadata is of the addressed shard."""
        names = ("run", "model", "rank", "batch", "mini_batch")
        return all(metadata.get(name) == getattr(self, name) for name in names)


def is_mappable(path: str, size: int) -> bool:
    """Returns whether the service's shared memory is on this machine: the path is a readable file of this size."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size and os.access(path, os.R_OK)


class Header(NamedTuple):
    """The header of a shard file.

    metadata: the values are parsed from JSON. entries: the dtype, shape and data_offsets of each tensor. size: the
        bytes of the header; data_offsets are relative to its end.
    """

    metadata: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    size: int


def read_header(file: IO[bytes], size: int, where: str) -> Header:
    """Reads the header of a file of `size` bytes. Raises InvalidArgumentError if the file is not a shard."""
    try:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise ValueError(f"the length of its header is {length}")
        entries = json.loads(file.read(length))
        metadata = {name: json.loads(value) for name, value in entries.pop("__metadata__", {}).items()}
        if "micro_batches" not in metadata:
            raise ValueError("its metadata has no micro_batches")
    except (ValueError, AttributeError, TypeError) as error:
        message = f"{where} ({size} bytes) is not a shard of gristmill: {error}; write it again"
        raise InvalidArgumentError(message) from None
    return Header(metadata, entries, _LENGTH_BYTES + length)
