"""The runs of this process, and the threads that work for them: one that makes sealed batches, one that keeps time."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from gristmill.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import mill as pipeline_mill
from gristmill_service.run.admission import RowBudget
from gristmill_service.run.log import MemoryLog
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.run import Mill, Run
from gristmill_service.store.base import Store

_log = structlog.get_logger(__name__)

_LONGEST_NAME = 128
_TICK_S = 0.2
_MAX_ROW_BYTES = 8 << 30


class Runs:
    """Thread-safe. Owns its threads, not the store. max_row_bytes: what rows of all runs together may hold."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        mill: Mill = pipeline_mill,
        max_row_bytes: int = _MAX_ROW_BYTES,
    ) -> None:
        self._store, self._clock, self._mill = PatientStore(store), clock, mill
        self._budget = RowBudget(max_row_bytes)
        self._lock = threading.Lock()
        self._deleting = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._closing = False
        self._sealed: queue.SimpleQueue[tuple[Run, int] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._sealer = threading.Thread(target=self._make_batches, name="gristmill-sealer", daemon=True)
        self._timer = threading.Thread(target=self._keep_time, name="gristmill-timer", daemon=True)
        self._sealer.start()
        self._timer.start()

    def create(self, name: str, config: Mapping[str, Any] | RunConfig) -> tuple[list[str], bool]:
        """Warnings about the configuration, and whether this call created the run."""
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise InvalidArgumentError(f"run is {name!r}; a name has 1 to {_LONGEST_NAME} printable characters")
        parsed = config if isinstance(config, RunConfig) else parse_config(config)
        with self._lock:
            self._check_serving()
            run = self._runs.get(name)
            if run is None:
                self._runs[name] = self._make_run(name, parsed)
            elif run.is_deleted:
                raise UnavailableError(f"run {name!r} is being deleted; create it again when that is done")
            elif run.config != parsed:
                raise AlreadyExistsError(
                    f"run {name!r} exists with another configuration: {_difference(run.config, parsed)}"
                )
        return parsed.warnings(), run is None

    def get(self, name: str) -> Run:
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                known = ", ".join(sorted(self._runs)[:10]) or "none"
                raise NotFoundError(f"run {name!r} does not exist; create it first (there are: {known})")
            return run

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._runs)

    def delete(self, name: str) -> None:
        """Returns when nothing of the run is left, so that its name can be another run's."""
        with self._deleting:
            run = self.get(name)
            run.close(NotFoundError(f"run {name!r} was deleted"))
            self._store.delete_run(name)
            with self._lock:
                del self._runs[name]

    def tick(self) -> None:
        """Closes or drops what has waited too long, in every run."""
        for name in self.names():
            try:
                self.get(name).tick()
            except NotFoundError:
                continue

    def close(self, timeout_s: float) -> None:
        """Takes no more calls, finishes the batches that are sealed, and wakes who waits. The store stays open."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            runs = list(self._runs.values())
        self._stopped.set()
        for run in runs:
            run.close(UnavailableError("the service is shutting down; ask again when it is back"))
        self._sealed.put(None)
        self._sealer.join(timeout_s)
        self._timer.join()

    def _make_run(self, name: str, config: RunConfig) -> Run:
        return Run(name, config, self._store, MemoryLog(), self._mill, self._enqueue, self._clock, self._budget)

    def _enqueue(self, run: Run, batch: int) -> None:
        self._sealed.put((run, batch))

    def _make_batches(self) -> None:
        while (item := self._sealed.get()) is not None:
            run, batch = item
            try:
                run.make_batch(batch)
            except Exception:  # noqa: BLE001
                # One batch must not end the making of all others.
                _log.exception("batch could not be made", run=run.name, batch=batch)

    def _keep_time(self) -> None:
        while not self._stopped.wait(_TICK_S):
            try:
                self.tick()
            except Exception:  # noqa: BLE001
                _log.exception("tick failed")

    def _check_serving(self) -> None:
        if self._closing:
            raise UnavailableError("the service is shutting down; ask again when it is back")


def _difference(one: RunConfig, other: RunConfig) -> str:
    before, after = json.loads(one.model_dump_json()), json.loads(other.model_dump_json())
    changed = [
        f"{name} was {before[name]!r} and is now {after[name]!r}" for name in before if before[name] != after[name]
    ]
    return ", ".join(changed)
