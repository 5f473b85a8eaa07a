"""Build sealed batches: compute and publish each in a builder thread, and record the result; retry or fail."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import numpy as np
import structlog

from gristmill._wire.columns import Array
from gristmill._wire.extras import made_whole
from gristmill._wire.steps import Steps
from gristmill.errors import (
    FailedPreconditionError,
    GristmillError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service import tracing
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline import BuiltBatch
from gristmill_service.pipeline.credit.baselines import Baselines
from gristmill_service.pipeline.plan_document import baselines_after, encode_plan
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.pipeline.written import ShardForm, Written
from gristmill_service.process_tuning import give_back_memory
from gristmill_service.run.capacity import ShardRoom
from gristmill_service.run.machine.answers import BatchState, ColumnPlace
from gristmill_service.run.machine.batch import Batch
from gristmill_service.run.machine.decisions import progress, sealing
from gristmill_service.run.machine.events import BatchFailed, BatchPublished, WrittenColumn
from gristmill_service.run.machine.state import State
from gristmill_service.run.monitor import RunMonitor
from gristmill_service.run.recent_tables import BatchNumbers, RecentTables
from gristmill_service.run.recovery import losses
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer, not_held
from gristmill_service.run.rows.row_gathering import Load, gather
from gristmill_service.run.writer import Writer
from gristmill_service.run.written_columns import values_of
from gristmill_service.storage.row_tables import Stored, steps_of
from gristmill_service.storage.run_store import RunLog
from gristmill_service.storage.shard_store import ShardStore

_log = structlog.get_logger(__name__)

# Seconds until publishing is retried after the store was full; more if the rows have to be read from the log again.
RETRY_S, _RETRY_READING_S = 1.0, 10.0
# The least pause, as a multiple of the last attempt's length.
_PAUSES = 3
# Errors by which a shard store refuses a batch. None is a reason to drop its rows.
_REFUSED = (UnavailableError, ResourceExhaustedError, FailedPreconditionError)
_EXPORTED_ROWS = 64
_EXPORTED_BYTES = 16 << 20


BuildBatch = Callable[..., BuiltBatch]
"""The pipeline, `gristmill_service.pipeline.build_batch`, or a test's replacement for it."""
_NO_NUMBERS = BatchNumbers(b"", b"")


class _Job(NamedTuple):
    """A batch to build.

    rows: empty once they are released. tables: the tables of written columns, if they are in memory.
    written: the columns that trainers wrote; None if some are missing or the batch awaits none. written_ranks: as in
    `Batch`.
    baselines: the run's before the batch.
    """

    number: int
    batch: Batch
    config: RunConfig
    rows: list[PickedRow]
    token_rewards: bool
    is_first: bool
    written: dict[ColumnPlace, WrittenColumn] | None
    written_ranks: int
    tables: dict[int, Stored | None]
    baselines: Baselines


class BatchBuilder:
    """Builds the batches of one run, one at a time.

    blocked_reason: why a sealed batch cannot be published now; empty if no batch is blocked.
    plans: the encoded plans of batches that this process published.
    forms: the forms of shards, for batches that wait for columns.
    """

    def __init__(
        self,
        name: str,
        writer: Writer,
        log: RunLog,
        store: ShardStore,
        room: ShardRoom,
        pipeline: BuildBatch,
        monitor: RunMonitor,
        clock: Callable[[], float],
        builders: Executor,
        tables: RecentTables,
    ) -> None:
        self.blocked_reason = ""
        self.retry_at = 0.0
        self.plans: dict[int, bytes] = {}
        self.forms: dict[int, Mapping[ShardAddress, ShardForm]] = {}
        self._name, self._writer, self._log, self._store, self._room = name, writer, log, store, room
        self._pipeline, self._monitor, self._clock, self._builders = pipeline, monitor, clock, builders
        self._tables = tables
        # The publication of the current batch; `abandon` cancels it unless it has begun.
        self._publication = Future[None]()
        self._computing: asyncio.Future[Any] | None = None

    async def build(self, retry: Callable[[], None]) -> bool:
        """Builds the oldest sealed batch that is not published. Returns whether there may be another.

        retry: called when another run has freed the capacity that this batch needs. A batch that fails raises nothing.
        """
        # Blocks retries until this attempt ends: the delay counts from then, and the attempt may take long.
        self.retry_at = math.inf
        withdrawn = _withdrawn(self._writer.state)
        await self._writer.commits.safe()
        if self._is_over:
            return False
        # The run builds one batch at a time: two batches could each take capacity that the other needs.
        for number in withdrawn:
            await self._discard(number)
        job = await self._next_job()
        if job is not None:
            removals, began = self._room.removals, self._clock()
            try:
                if job.tables and (lost := await asyncio.to_thread(self._writer.tables.lost, [*job.tables])):
                    # Columns, which trainers write again.
                    self._writer.go_on(losses(self._writer.state, lost))
                    return True
                with tracing.making_span(self._name, job.number):
                    started = time.monotonic()
                    await self._record(job, await self._built(job), started)
            except NotFoundError:
                # The run was deleted in the meantime.
                return False
            except _REFUSED as error:
                # The batch is valid, but the store is full, too small, does not answer, or refuses it.
                self._block(job, error, self._clock() - began)
                if isinstance(error, ResourceExhaustedError):
                    self._room.wait(removals, retry)
                return False
        # Clear it even if no batch was built, because the blocked batch may be gone.
        self.blocked_reason = ""
        return job is not None

    async def export(self, number: int | None) -> AsyncIterator[Steps]:
        """Yields the rows of a sealed batch in order, in several tables. None: those of every stored batch that did not
        fail, then those of complete groups without a batch. Raises like `progress.batch_state`, and UnavailableError
        if such a group is dropped meanwhile."""
        picked, token_rewards = self._exported(number), bool(self._writer.state.schema.token_rewards)
        # The rows are read from the log, so they must be in it.
        await self._writer.commits.safe()
        columns = self._writer.config.columns
        for batch, some in ((batch, some) for batch, rows in picked for some in _whole_trajectories(rows)):

            def read(some: list[PickedRow] = some) -> list[Steps]:
                return [*_slices(made_whole(gather(some, token_rewards, self._loaded(some)), columns))]

            try:
                parts = await asyncio.to_thread(read)
            finally:
                # Rows that were freed while they were being read may be wrong.
                self._writer.check_open()
                if batch is not None:
                    progress.batch_state(self._writer.state, batch)
                elif not self._writer.rows.has(some):
                    raise UnavailableError("a complete group was dropped while it was exported; retry")
            for part in parts:
                yield part

    def _exported(self, number: int | None) -> list[tuple[int | None, list[PickedRow]]]:
        """Returns the rows to export, by batch; None for groups without one."""
        state, rows = self._writer.state, self._writer.rows
        if number is not None:
            if progress.batch_state(state, number) is BatchState.END:
                raise progress.after_the_end(state, number)
            if number not in state.batches:
                raise FailedPreconditionError(
                    f"batch {number} is not sealed yet, so its rows are not final; retry later"
                )
            return [(number, _pick(rows, state.batches[number]))]
        picked: list[tuple[int | None, list[PickedRow]]] = [
            (number, _pick(rows, batch)) for number, batch in state.batches.items() if number not in state.failed
        ]
        groups = [state.open[key] for key in state.complete]
        if groups:
            picked.append((None, rows.pick((group, group.ordered_rows()) for group in groups)))
        if not picked:
            remedy = "export batches before they are freed" if state.finished else "retry later"
            raise FailedPreconditionError(f"no stored group is complete, so there is nothing to export; {remedy}")
        return picked

    def abandon(self) -> None:
        """Cancels the publication of the batch that is being computed, unless it has begun."""
        if self._computing is not None and self._publication.cancel():
            self._computing.cancel()

    @property
    def _is_over(self) -> bool:
        """Whether the run builds no more batches, because it was deleted or has to be reopened."""
        return self._writer.is_deleted or self._writer.is_lost

    async def _next_job(self) -> _Job | None:
        state, rows, config = self._writer.state, self._writer.rows, self._writer.config
        if self._is_over or not (waiting := state.batches_to_build):
            return None
        number = waiting[0]
        batch = state.batches[number]
        written = dict(batch.written) if batch.written and state.is_written(number) else None
        tables = {column.table: rows.table(column.table) for column in (written or {}).values()}
        is_first, token_rewards = batch.mini_batches is None, bool(state.schema.token_rewards)
        baselines = state.baselines if batch.baselines is None else batch.baselines
        picked, ranks = _pick(rows, batch), batch.written_ranks
        job = _Job(number, batch, config, picked, token_rewards, is_first, written, ranks, tables, baselines)
        # The rows are read from the log, so they must be in it.
        await self._writer.commits.safe()
        return job

    async def _built(self, job: _Job) -> BatchPublished | BatchFailed:
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()

        def release() -> None:
            # Rows share tokens only within their group, so the tables of shared tokens are included.
            tables = {one.table for one in job.rows}
            job.rows.clear()
            loop.call_soon_threadsafe(self._writer.rows.unload, tables)

        self._publication = publication = Future[None]()
        self._computing = loop.run_in_executor(self._builders, context.run, self._build, job, release, publication)
        event: BatchPublished | BatchFailed
        try:
            event, numbers, forms = await self._computing
        finally:
            self._computing = None
        if isinstance(event, BatchPublished):
            self._keep(job.number, numbers, forms)
        return event

    def _build(
        self, job: _Job, release: Callable[[], None], publication: Future[None]
    ) -> tuple[BatchPublished | BatchFailed, BatchNumbers, Mapping[ShardAddress, ShardForm]]:
        """Computes and publishes the batch, in a builder thread. Returns the event, the plan and table, and the forms
        of the published shards. Raises one of `_REFUSED` if the store cannot take it now.

        publication: may be cancelled before it begins.
        """
        self._monitor.building(job.number)
        try:
            with self._monitor.timed("gather"):
                on_copied = (lambda: _release(job, release)) if self._may_release(job) else None
                steps = gather(job.rows, job.token_rewards, self._loaded(job.rows), on_copied)
            built = self._pipeline(
                steps,
                job.config,
                run=self._name,
                batch=job.number,
                policy_version=job.batch.policy_version,
                timed=self._monitor.timed,
                written=self._written(job),
                written_ranks=job.written_ranks,
                begun=_own_sizes(job),
                baselines=job.baselines,
            )
            mini_batches: dict[Model, int] = dict.fromkeys(job.config.models, 0)
            for part in built.plan.mini_batches:
                mini_batches[part.model] += 1
            numbers = BatchNumbers(encode_plan(built.plan), built.table.encode())
            with self._monitor.timed("publish"):
                self._writer.check_open(is_internal=True)
                if not publication.set_running_or_notify_cancel():
                    raise UnavailableError("the batch was abandoned, because the run is closing; retry")
                nbytes = self._store.publish(self._name, job.number, numbers.plan, built.shards, numbers.table)
        except _REFUSED:
            raise
        except (MemoryError, OSError) as error:
            # The process is short of memory or threads, which is no reason to drop rows.
            raise UnavailableError(
                f"this process cannot build the batch now: {type(error).__name__}: {error}; it will retry"
            ) from error
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the batch's reason, not the thread's end
            if not isinstance(error, GristmillError):
                _log.exception("batch failed", run=self._name, batch=job.number)
            reason = str(error) or type(error).__name__
            if isinstance(error, NotFoundError):
                reason = f"rows of it are lost: {reason}"
            return BatchFailed(job.number, reason, keeps_rows=isinstance(error, MisalignedError)), _NO_NUMBERS, {}
        record = self._monitor.built(job.number, built.stats) if job.is_first else None
        after = dict(baselines_after(built.plan)) or None
        event = BatchPublished(job.number, mini_batches, nbytes, tuple(sorted(built.awaits)), record, after)
        return event, numbers, built.forms

    def _loaded(self, rows: Sequence[PickedRow]) -> Load:
        """Returns a function that loads tables. All tables that are not in memory are read at once, in few round
        trips."""
        tables = self._writer.tables
        return tables.get_all(numbers).__getitem__ if (numbers := not_held(rows)) else tables.get

    def _may_release(self, job: _Job) -> bool:
        """Whether the rows may leave memory, because the log has them if publishing fails. A batch that awaits columns
        keeps its rows, because it is built twice."""
        awaits = bool(job.config.written_columns) and job.written is None
        return self._log.reads_rows and not awaits

    def _written(self, job: _Job) -> Written | None:
        if job.written is None:
            return None
        written: dict[ShardAddress, dict[str, Array]] = {}
        for place, column in job.written.items():
            table = job.tables[column.table]
            stored = self._writer.tables.get(column.table) if table is None else table
            values = values_of(steps_of(stored), place.column)
            written.setdefault(ShardAddress("policy", place.mini_batch, place.rank), {})[place.column] = values
        return written

    def _keep(self, number: int, numbers: BatchNumbers, forms: Mapping[ShardAddress, ShardForm]) -> None:
        self._tables.put(self._log.run_id, number, numbers)
        others = self._writer.state.batches.keys() - {number}
        self.plans = {other: plan for other, plan in self.plans.items() if other in others} | {number: numbers.plan}
        self.forms = {other: kept for other, kept in self.forms.items() if other in others}
        if forms:
            self.forms[number] = forms

    async def _record(self, job: _Job, event: BatchPublished | BatchFailed, started: float) -> None:
        """Records the result. Removes its shards if the result is not wanted any more: the batch was given up, the run
        was deleted, or the trainer resumed with other ranks or will write columns again."""
        is_recorded = False
        try:
            is_recorded = self._writer.execute(
                lambda view: sealing.record_batch(view.state, event, job.config.dp_size, job.written), is_internal=True
            )
        finally:
            if not is_recorded and not self._writer.is_lost:
                self.plans.pop(event.batch, None)
                if isinstance(event, BatchPublished):
                    await self._discard(event.batch)
        if not is_recorded:
            # The result had replaced the forward shards, which are needed again.
            self._writer.execute(lambda view: sealing.withdraw_batch(view.state, event.batch), is_internal=True)
        elif isinstance(event, BatchPublished):
            _log_publication(self._name, job, event, time.monotonic() - started)

    async def _discard(self, number: int) -> None:
        try:
            await asyncio.to_thread(self._store.free, self._name, number)
        except (GristmillError, OSError) as error:
            # The shards are replaced when the batch is published again, or removed with the run.
            _log.warning("shards not removed", run=self._name, batch=number, reason=str(error))

    def _block(self, job: _Job, error: GristmillError, seconds: float) -> None:
        """seconds: the length of the attempt. Building a large batch over and over must not occupy a core."""
        is_new, number = not self.blocked_reason, job.number
        self.retry_at = self._clock() + max(RETRY_S if job.rows else _RETRY_READING_S, _PAUSES * seconds)
        # Stores name the run and the batch, too.
        where = f"run {self._name!r}: batch {number}"
        self.blocked_reason = f"{where} waits: {str(error).replace(f'{where} ', 'it ', 1)}"
        if is_new:
            _log.warning("batch waits", run=self._name, batch=number, reason=str(error))


def _release(job: _Job, release: Callable[[], None]) -> None:
    """Releases the memory of gathered rows, so that memory contains a large batch's rows only once."""
    if job.rows:
        release()
    give_back_memory()


def _log_publication(run: str, job: _Job, event: BatchPublished, seconds: float) -> None:
    rows, nbytes = sum(len(group.refs()) for group in job.batch.groups), event.nbytes
    _log.info("batch published", run=run, batch=job.number, rows=rows, bytes=nbytes, seconds=round(seconds, 3))


def _whole_trajectories(picked: Sequence[PickedRow]) -> Iterator[list[PickedRow]]:
    """Yields the rows in order, in lists of whole trajectories."""
    some: list[PickedRow] = []
    for one in picked:
        if len(some) >= _EXPORTED_ROWS and one.row.trajectory != some[-1].row.trajectory:
            yield some
            some = []
        some.append(one)
    yield some


def _slices(part: Steps) -> Iterator[Steps]:
    """Yields the rows in order, in tables small enough for messages of moderate size."""
    sizes = 4 * part.tokens.lengths + sum(extra.row_bytes for extra in part.extras.values())
    for column in part.token_columns:
        sizes += column.lengths * column.values.itemsize
    begin, room = 0, _EXPORTED_BYTES
    for row, size in enumerate(sizes.tolist()):
        # A row beyond the limit gets a table of its own, because more rows might exceed the message limit.
        if row > begin and size > room:
            yield part.take(np.arange(begin, row))
            begin, room = row, _EXPORTED_BYTES
        room -= size
    if len(part):
        yield part.take(np.arange(begin, len(part)))


def _own_sizes(job: _Job) -> dict[tuple[int, str], int]:
    """Returns the sizes of groups that differ from n_samples_per_prompt."""
    usual = job.config.n_samples_per_prompt
    return {group.key: group.samples for group in job.batch.groups if group.samples != usual}


def _withdrawn(state: State) -> list[int]:
    """Returns the batches whose stored shards are outdated, such as forward shards whose columns are all written."""
    return [number for number in state.batches_to_build if state.batches[number].mini_batches is not None]


def _pick(rows: RowBuffer, batch: Batch) -> list[PickedRow]:
    return rows.pick((group, group.ordered_rows()) for group in batch.groups)
