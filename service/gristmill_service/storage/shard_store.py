"""The interface of shard stores, which store published batches. All implementations pass the same tests.

A batch is published atomically: a reader sees its plan, its table and all of its shards, or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.pipeline.layout.iovec import Iovec
from gristmill_service.pipeline.scheduling.plan import ShardAddress


class ShardsLostError(UnavailableError):
    """A part of a published batch is lost. The batch must be republished, and can then be read."""


class ShardSource(Protocol):
    """A shard from the pipeline: the byte ranges of its file, which are never joined."""

    @property
    def address(self) -> ShardAddress: ...

    @property
    def size(self) -> int:
        """The size of the whole file in bytes."""

    def iovec(self) -> Iovec:
        """Returns the file's bytes in order. They are valid while the shard exists."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    size: int
    shared_memory_path: str | None
    """The path of a file that processes on this machine can map, or None."""


class ShardStore(Protocol):
    """A store of published batches; blocking and thread-safe. The owner of a run publishes and frees its batches; any
    process reads them.

    Every method may raise UnavailableError if the store is unreachable or this process no longer owns the run, and
    FailedPreconditionError if the store rejects the call, or has a format that this version cannot read; in addition,
    the errors in its docstring. All methods may be retried. Methods that read may raise ShardsLostError.
    """

    is_remote: bool
    """Whether `plan` and `locate` take a round trip. If not, they are fast enough for the event loop."""

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource], table: bytes = b"") -> int:
        """Publishes a batch with its plan and table atomically, and replaces an earlier batch of the same number.
        Returns the bytes that it uses in the store, which count against the run's limit. After an error, the store
        contains no part of the batch.

        Raises ResourceExhaustedError if there is no space for it, even if it is larger than the whole store, because
        people enlarge stores; and errors from laying out a shard.
        """

    def plan(self, run: str, batch: int) -> bytes:
        """Returns a batch's plan. Raises NotFoundError if the batch is not published, or already freed."""

    def table(self, run: str, batch: int) -> bytes:
        """Returns a batch's table. Raises like `plan`."""

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        """Locates a shard. Raises NotFoundError if the batch is not published, or already freed, or lacks the shard."""

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Returns the shard's bytes in order, in pieces of at most a few MiB. Raises like `locate`; so does the
        iterator if the batch is freed in the meantime and this store cannot continue."""

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """Returns the shard's stored compressed frames (`gristmill._wire.codecs.zstd_frames`); None if this store's
        files are uncompressed. Raises like `read`."""

    def free(self, run: str, batch: int) -> None:
        """Removes a batch, if it exists. Existing mappings of readers stay valid."""

    def delete_run(self, run: str) -> None:
        """Removes every batch of a run."""

    def sweep(self, runs: Collection[str]) -> None:
        """Removes leftovers of unfinished publications of dead processes. Called after this process opened the runs.
        May scan all keys of the store."""

    def close(self) -> None:
        """Removes everything that this process published and that must not outlive it."""


def is_published(store: ShardStore, run: str, batch: int) -> bool:
    """Returns whether the store has the batch."""
    try:
        store.plan(run, batch)
    except (NotFoundError, ShardsLostError):
        return False
    return True
