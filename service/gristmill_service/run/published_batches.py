"""Read a run's published batches from the shard store. Batches that the store has lost are built again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import structlog

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.off_loop import each
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.machine.decisions import progress, sealing
from gristmill_service.run.recent_tables import BatchNumbers
from gristmill_service.run.writer import Writer
from gristmill_service.storage.run_store import OwnedElsewhereError
from gristmill_service.storage.shard_store import ShardLocation, ShardsLostError, ShardStore

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

HAVE_SHARDS = (BatchState.PUBLISHED, BatchState.FORWARD)
"""The states of a batch that has shards in the store."""


class PublishedBatches:
    """The published batches of one run."""

    def __init__(self, name: str, writer: Writer, store: ShardStore) -> None:
        self._name, self._writer, self._store = name, writer, store

    async def plan(self, batch: int) -> bytes | None:
        """Returns the batch's plan; None while the batch is being rebuilt. Raises NotFoundError if it was freed."""
        return await self._document(self._store.plan, batch)

    async def numbers(self, batch: int) -> BatchNumbers | None:
        """Returns the batch's plan and table, like `plan`."""
        plan, table = await self.plan(batch), await self._document(self._store.table, batch)
        # The batch may have been published again in between, for another number of ranks.
        if plan is None or table is None or plan != await self.plan(batch):
            return None
        return BatchNumbers(plan, table)

    async def _document(self, read: Callable[[str, int], bytes], batch: int) -> bytes | None:
        try:
            with self._rebuilding(batch):
                # In a thread, because a table may have many megabytes.
                return await asyncio.to_thread(read, self._name, batch)
        except NotFoundError:
            self._check_withdrawn(batch)
            return None

    async def locate(self, batch: int, address: ShardAddress) -> ShardLocation | None:
        """Returns the shard's location; None while its batch is being rebuilt. Raises NotFoundError like `plan`."""
        try:
            with self._rebuilding(batch):
                return await self._ask(self._store.locate, self._name, batch, address)
        except NotFoundError:
            self._check_withdrawn(batch)
            return None

    async def read(self, batch: int, address: ShardAddress) -> AsyncIterator[bytes]:
        """Returns the shard's file in pieces."""
        with self._reading(batch):
            pieces = await asyncio.to_thread(self._store.read, self._name, batch, address)
        return self._read_on(batch, pieces)

    async def read_frames(self, batch: int, address: ShardAddress) -> AsyncIterator[bytes] | None:
        """Returns the shard's compressed frames; None if the store has uncompressed files."""
        with self._reading(batch):
            pieces = await asyncio.to_thread(self._store.read_frames, self._name, batch, address)
        return None if pieces is None else self._read_on(batch, pieces)

    async def _read_on(self, batch: int, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        with self._reading(batch):
            async for piece in each(pieces):
                yield piece

    async def _ask(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the store, in a thread if the call takes a round trip."""
        if self._store.is_remote:
            return await asyncio.to_thread(method, *args, **kwargs)
        return method(*args, **kwargs)

    def _check_withdrawn(self, batch: int) -> None:
        """Withdraws a batch that should be published but is not in the store, so that it is rebuilt. Raises
        NotFoundError if it was freed."""
        if progress.batch_state(self._writer.state, batch) in HAVE_SHARDS:
            self._withdraw(batch, "the store does not have it")

    @contextmanager
    def _rebuilding(self, batch: int) -> Iterator[None]:
        """Withdraws the batch if the store has lost a part of it, so that it is rebuilt. Raises the store's error."""
        try:
            yield
        except ShardsLostError as error:
            self._withdraw(batch, str(error))
            raise

    @contextmanager
    def _reading(self, batch: int) -> Iterator[None]:
        """Like `_rebuilding`, but raises UnavailableError if the shards are missing because they are being rebuilt."""
        try:
            with self._rebuilding(batch):
                yield
        except NotFoundError:
            self._writer.check_open()
            if progress.batch_state(self._writer.state, batch) is BatchState.PENDING:
                raise UnavailableError(f"run {self._name!r}: batch {batch} is not published yet; retry") from None
            raise

    def _withdraw(self, batch: int, reason: str) -> None:
        # If the batch is back in the store by now, it is built once more, with the same bytes.
        if self._writer.execute(lambda view: sealing.withdraw_batch(view.state, batch), is_internal=True):
            _log.warning("shards lost, batch rebuilding", run=self._name, batch=batch, reason=reason)


def whole_or(elsewhere: OwnedElsewhereError, read: Callable[..., Any], *args: Any) -> Any:
    """Returns the pieces of a shard. If the shard is missing, raises the error that names the run's owner, which can
    rebuild the shard or report the reason."""
    try:
        pieces: Iterator[bytes] | None = read(*args)
        if pieces is None:
            return pieces
        first = next(pieces, b"")
    except (ShardsLostError, NotFoundError):
        raise elsewhere from None
    return chain([first], pieces)
