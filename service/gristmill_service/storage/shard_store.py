"""What a store of published batches offers; implementations pass the same test class.

A batch is published as a whole: a reader sees its plan and all of its shards, or none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gristmill_service.pipeline.iovec import Iovec
from gristmill_service.pipeline.shard_address import ShardAddress


class ShardSource(Protocol):
    """A shard as the pipeline lays it out: runs of memory that make up its file, never joined."""

    @property
    def address(self) -> ShardAddress: ...

    @property
    def size(self) -> int:
        """Bytes of the whole file."""

    def iovec(self) -> Iovec:
        """The file's bytes in order. Valid while the shard lives."""

    def compact(self) -> Iovec:
        """The bytes of its compact form in order (`gristmill._wire.compact_shards`). Valid while the shard lives."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    size: int
    shared_memory_path: str | None
    """A file that processes seeing this machine's memory may map, or None."""


class ShardStore(Protocol):
    """Blocking, thread-safe. Unknown batches and shards raise NotFoundError."""

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        """Makes a batch visible, whole, and returns the bytes that it takes here: what a run's room is counted in. On
        an error nothing of it is left.

        Raises ResourceExhaustedError where there is no room for it now, FailedPreconditionError where there never is.
        """

    def plan(self, run: str, batch: int) -> bytes: ...

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation: ...

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """The shard's bytes in order, in pieces of at most a few MiB."""

    def read_compact(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """The bytes of its compact form in order, or None where this store holds whole files only."""

    def free(self, run: str, batch: int) -> None:
        """Removes a batch; one that is gone already is no error. Mappings that readers hold stay valid."""

    def delete_run(self, run: str) -> None:
        """Removes every batch of a run."""

    def close(self) -> None:
        """Removes everything that this process published and that must not outlive it."""
