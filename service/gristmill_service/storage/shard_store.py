"""The contract of stores for published batches. Implementations pass the same tests.

A batch is published as a whole: a reader sees its plan and all of its shards, or none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.pipeline.layout.iovec import Iovec
from gristmill_service.pipeline.scheduling.plan import ShardAddress


class ShardsLostError(UnavailableError):
    """A part of what was published is not there any more: the batch has to be published again, and may then be read."""


class ShardSource(Protocol):
    """A shard as the pipeline lays it out: runs of memory that make up its file, never joined."""

    @property
    def address(self) -> ShardAddress: ...

    @property
    def size(self) -> int:
        """Bytes of the whole file."""

    def iovec(self) -> Iovec:
        """The file's bytes in order. Valid while the shard lives."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    size: int
    shared_memory_path: str | None
    """A file that processes seeing this machine's memory may map, or None."""


class ShardStore(Protocol):
    """Blocking, thread-safe. Whoever has a run publishes and frees its batches; anybody reads them.

    Every method may raise UnavailableError where the store cannot be reached or this process has the run no longer,
    and FailedPreconditionError where the store refuses, or holds what this version does not read; no other error but
    those that a method names. All may be tried again. What reads may raise ShardsLostError.
    """

    is_remote: bool
    """Whether `plan` and `locate` take a round trip; else they are quick enough for the event loop."""

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        """Makes a batch visible, whole, in place of what was published under its number before, and returns the bytes
        that it takes here: what a run's room is counted in. On an error nothing of it stays.

        Raises ResourceExhaustedError where there is no room for it now, FailedPreconditionError where there never is,
        and what a shard raises while it is laid out.
        """

    def plan(self, run: str, batch: int) -> bytes:
        """Raises NotFoundError where the batch is not published, or freed."""

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        """Raises NotFoundError where the batch is not published, or freed, or has no such shard."""

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """The shard's bytes in order, in pieces of at most a few MiB. Raises as `locate` does; so does the iterator
        where the batch is freed meanwhile and this store cannot read on."""

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """The shard as this store has it compressed, frame by frame (`gristmill._wire.codecs.zstd_frames`), which are
        not looked into; None where this store has whole files. Raises as `read`."""

    def free(self, run: str, batch: int) -> None:
        """Removes a batch; one that is gone already is no error. Mappings that readers hold stay valid."""

    def delete_run(self, run: str) -> None:
        """Removes every batch of a run."""

    def sweep(self, run: str) -> None:
        """Removes what publications left that ended with their process; called after this process opened the run. It
        may take as long as looking at all keys of the store."""

    def close(self) -> None:
        """Removes everything that this process published and that must not outlive it."""


def is_published(store: ShardStore, run: str, batch: int) -> bool:
    """Whether the store has the batch, as far as it knows."""
    try:
        store.plan(run, batch)
    except (NotFoundError, ShardsLostError):
        return False
    return True
