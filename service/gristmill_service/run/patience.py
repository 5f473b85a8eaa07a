"""The store as the runs of a service use it: a batch that finds it full waits for another to be removed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gristmill.errors import NotFoundError, ResourceExhaustedError
from gristmill_service.pipeline.shard_address import ShardAddress
from gristmill_service.storage.shard_store import ShardLocation, ShardSource, ShardStore

_LOOK_S, _PATIENCE_S = 1.0, 5.0


class PatientStore:
    """Thread-safe. One for all runs of a store: what any of them gives back is room for whichever waits."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._held: set[tuple[str, int]] = set()
        self._looks = 0

    def publish(
        self, run: str, batch: int, plan: bytes, shards: Sequence[ShardSource], is_wanted: Callable[[], bool]
    ) -> int:
        """As the store's, but waits for room a while, where any batch of any run is held.

        Raises ResourceExhaustedError where none is, where this one is not wanted any more (asked after each `wake`),
        and after the while: other runs have batches, too.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            with self._changed:
                looks, room_may_come = self._looks, bool(self._held)
            try:
                nbytes = self._store.publish(run, batch, plan, shards)
            except ResourceExhaustedError:
                if not room_may_come or not is_wanted():
                    raise
                if time.monotonic() >= deadline:
                    raise
                with self._changed:
                    # What was removed since the attempt began is not waited for; others may make room, too.
                    if self._looks == looks:
                        self._changed.wait(_LOOK_S)
                continue
            with self._changed:
                self._held.add((run, batch))
            return nbytes

    def wake(self) -> None:
        """Whoever waits tries again, and gives up where it is not wanted any more."""
        with self._changed:
            self._looks += 1
            self._changed.notify_all()

    def holds(self, run: str, batch: int) -> bool:
        """Whether the store still has a batch that was published before this process was."""
        try:
            self._store.plan(run, batch)
        except NotFoundError:
            return False
        with self._changed:
            self._held.add((run, batch))
        return True

    def plan(self, run: str, batch: int) -> bytes:
        return self._store.plan(run, batch)

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        return self._store.locate(run, batch, address)

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        return self._store.read(run, batch, address)

    def read_compact(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        return self._store.read_compact(run, batch, address)

    def free(self, run: str, batch: int) -> None:
        try:
            self._store.free(run, batch)
        finally:
            self._forget({(run, batch)})

    def delete_run(self, run: str) -> None:
        try:
            self._store.delete_run(run)
        finally:
            with self._changed:
                found = {held for held in self._held if held[0] == run}
            self._forget(found)

    def _forget(self, batches: set[tuple[str, int]]) -> None:
        with self._changed:
            self._held -= batches
        self.wake()
