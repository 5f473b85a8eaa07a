"""How a sealed batch becomes shards: computed outside the lock, published, and told; or postponed, or failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import FailedPreconditionError, GristmillError, ResourceExhaustedError, UnavailableError
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.batch_stats import BatchStats
from gristmill_service.pipeline.plan_document import PlanDocument, encode_plan
from gristmill_service.pipeline.stage_timer import StageTimer
from gristmill_service.run.kept import KeptRun, OnSealed
from gristmill_service.run.machine import progress
from gristmill_service.run.machine.admission import RowBudget
from gristmill_service.run.machine.events import BatchFailed, BatchPublished
from gristmill_service.run.machine.state import Batch
from gristmill_service.run.patience import PatientStore
from gristmill_service.run.row_buffer import PickedRow, gather
from gristmill_service.storage.run_store import RunLog
from gristmill_service.storage.shard_store import ShardSource

_log = structlog.get_logger(__name__)

# A batch that could not be stored is tried again after this.
_RETRY_S = 1.0
_EXPORTED_ROWS = 64


class BuiltBatch(Protocol):
    """What the pipeline makes of a batch."""

    @property
    def plan(self) -> PlanDocument: ...

    @property
    def shards(self) -> Sequence[ShardSource]: ...

    @property
    def stats(self) -> Callable[[], BatchStats]: ...


class BuildBatch(Protocol):
    """The pipeline, `gristmill_service.pipeline.build_batch`."""

    def __call__(
        self, steps: Steps, config: RunConfig, *, run: str, batch: int, policy_version: int | None, timed: StageTimer
    ) -> BuiltBatch: ...


class MakingRun(KeptRun):
    """A run that makes its batches."""

    def __init__(
        self,
        name: str,
        config: RunConfig,
        store: PatientStore,
        book: RunLog,
        build_batch: BuildBatch,
        on_sealed: OnSealed,
        clock: Callable[[], float],
        budget: RowBudget,
    ) -> None:
        super().__init__(name, config, store, book, on_sealed, clock, budget)
        self._build_batch = build_batch

    def make_batch(self, number: int) -> None:
        """Computes and publishes a sealed batch. Blocks as long as that takes; never raises for the batch's sake."""
        with self._locked() as state:
            batch = state.batches.get(number)
            if self.is_deleted or self.is_lost or batch is None or batch.is_published:
                return
            config, picked = self.config, self._pick(batch)
            token_rewards = bool(state.form.token_rewards)
            is_first = batch.mini_batches is None
        started = time.monotonic()
        self.meters.started(number)
        try:
            with self.meters.timed("gather"):
                steps = gather(picked, token_rewards, self._book.get)
            built = self._build_batch(
                steps,
                config,
                run=self.name,
                batch=number,
                policy_version=batch.policy_version,
                timed=self.meters.timed,
            )
            mini_batches: dict[Model, int] = dict.fromkeys(config.models, 0)
            for part in built.plan.mini_batches:
                mini_batches[part.model] += 1
            with self.meters.timed("publish"):
                nbytes = self._store.publish(
                    self.name, number, encode_plan(built.plan), built.shards, lambda: self._closed is None
                )
            if is_first:
                self.meters.made(number, built.stats)
            self._settle_batch(BatchPublished(number, mini_batches, nbytes), config)
        except (UnavailableError, ResourceExhaustedError) as error:
            # Nothing is wrong with the batch: what keeps it has no room for it, or does not answer.
            self._postpone(number, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the batch's reason, not the thread's end
            if not isinstance(error, GristmillError):
                _log.exception("batch failed", run=self.name, batch=number)
            self._fail(BatchFailed(number, str(error) or type(error).__name__), config)
            return
        if not self._postponed:
            self.trouble = ""
        seconds = round(time.monotonic() - started, 3)
        _log.info("batch published", run=self.name, batch=number, rows=len(picked), bytes=nbytes, seconds=seconds)

    def _pick(self, batch: Batch) -> list[PickedRow]:
        return self._rows.pick(row for group in batch.groups for row in group.ordered_rows())

    def _fail(self, event: BatchFailed, config: RunConfig) -> None:
        try:
            self._settle_batch(event, config)
        except UnavailableError as error:
            self._postpone(event.batch, error)

    def _postpone(self, number: int, error: GristmillError) -> None:
        with self._lock:
            if self._closed is not None or self.is_lost:
                return
            self._postponed[number] = self._clock() + _RETRY_S
            first, self.trouble = not self.trouble, f"run {self.name!r}: batch {number} waits: {error}"
        if first:
            _log.warning("batch waits", run=self.name, batch=number, reason=str(error))

    def _settle_batch(self, event: BatchPublished | BatchFailed, config: RunConfig) -> None:
        """Says what became of a batch. Raises UnavailableError where the book does not take it; its shards are gone
        then, as they are where nobody wants them any more."""
        is_told = is_wanted = False
        # Who opens the run anew, or deletes it, waits until what nobody wants is gone.
        with self._removing:
            try:
                with self._locked() as state:
                    is_wanted = not self.is_lost and not self.is_deleted and event.batch in state.batches
                    if is_wanted and config.dp_size == state.dp_size:
                        self._commit([event])
                        is_told = True
            finally:
                if self.is_deleted:
                    # Published after the run's other batches were removed.
                    self._store.delete_run(self.name)
                elif not is_told:
                    self._store.free(self.name, event.batch)
        if is_wanted and not is_told:
            # The trainer came back with other ranks meanwhile.
            self._on_sealed(self, event.batch)

    def export(self, number: int) -> Iterator[Steps]:
        """The rows of a sealed batch in their order, some at a time. Raises as `batch` does."""
        with self._deciding() as state:
            progress.batch_state(state, number)
            if number not in state.batches:
                raise FailedPreconditionError(f"batch {number} is not sealed yet; its rows are not decided")
            picked = self._pick(state.batches[number])
            token_rewards = bool(state.form.token_rewards)
        for start in range(0, len(picked), _EXPORTED_ROWS):
            yield gather(picked[start : start + _EXPORTED_ROWS], token_rewards, self._book.get)
