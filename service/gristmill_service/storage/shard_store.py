"""The contract of shard stores, which store published batches. All implementations pass the same tests.

A batch is published atomically: a reader sees its plan and all of its shards, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.pipeline.layout.iovec import Iovec
from gristmill_service.pipeline.scheduling.plan import ShardAddress


class ShardsLostError(UnavailableError):
    """A part of a published batch is gone: the batch has to be published again, and can then be read."""


class ShardSource(Protocol):
    """A shard as the pipeline lays it out: the byte ranges of its file, never joined."""

    @property
    def address(self) -> ShardAddress: ...

    @property
    def size(self) -> int:
        """The bytes of the whole file."""

    def iovec(self) -> Iovec:
        """The file's bytes in order. Valid while the shard lives."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    size: int
    shared_memory_path: str | None
    """A file that processes of this machine may map, or None."""


class ShardStore(Protocol):
    """A store of published batches; blocking and thread-safe. The owner of a run publishes and frees its batches; any
    process reads them.

    Every method may raise UnavailableError if the store cannot be reached or this process no longer owns the run, and
    FailedPreconditionError if the store refuses, or has a format that this version cannot read; otherwise only the
    errors that it names. All methods may be retried. Methods that read may raise ShardsLostError.
    """

    is_remote: bool
    """Whether `plan` and `locate` take a round trip; else they are quick enough for the event loop."""

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource]) -> int:
        """Publishes a batch atomically, in place of an earlier one of its number, and returns the bytes that it takes
        in the store, which count against the run's limit. After an error nothing of it stays.

        Raises ResourceExhaustedError if there is no space for it now, FailedPreconditionError if there never will be,
        and errors of laying out a shard.
        """

    def plan(self, run: str, batch: int) -> bytes:
        """Returns a batch's plan. Raises NotFoundError if the batch is not published, or freed."""

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        """Locates a shard. Raises NotFoundError if the batch is not published, or freed, or has no such shard."""

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Returns the shard's bytes in order, in pieces of at most a few MiB. Raises as `locate` does; so does the
        iterator if the batch is freed meanwhile and this store cannot continue."""

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """Returns the shard's compressed frames as they are stored (`gristmill._wire.codecs.zstd_frames`); None if this
        store has uncompressed files. Raises as `read`."""

    def free(self, run: str, batch: int) -> None:
        """Removes a batch; a missing one is no error. Existing mappings of readers stay valid."""

    def delete_run(self, run: str) -> None:
        """Removes every batch of a run."""

    def sweep(self, run: str) -> None:
        """Removes what unfinished publications of dead processes left; called after this process opened the run. May
        scan all keys of the store."""

    def close(self) -> None:
        """Removes everything that this process published and that must not outlive it."""


def is_published(store: ShardStore, run: str, batch: int) -> bool:
    """Returns whether the store has the batch, as far as it knows."""
    try:
        store.plan(run, batch)
    except (NotFoundError, ShardsLostError):
        return False
    return True
