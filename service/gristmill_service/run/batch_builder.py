"""Sealed batches become shards: computed on a worker's thread, published, and recorded; or tried again, or failed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

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
from gristmill_service.pipeline.figures import Figures
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.pipeline.plan_document import PlanDocument, encode_plan
from gristmill_service.pipeline.scheduling.schedule import MisalignedError
from gristmill_service.pipeline.stage_timer import StageTimer
from gristmill_service.pipeline.written import ShardForm, Written
from gristmill_service.process_tuning import give_back_memory
from gristmill_service.run.machine.answers import ColumnPlace
from gristmill_service.run.machine.commands.command import Command
from gristmill_service.run.machine.commands.trainer_commands import RecordBatch, WithdrawBatch
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.events import BatchFailed, BatchPublished, WrittenColumn
from gristmill_service.run.machine.state import Batch, State
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer, not_held
from gristmill_service.run.rows.row_gathering import Load, gather
from gristmill_service.run.shard_room import ShardRoom
from gristmill_service.run.writing.effects import Effects
from gristmill_service.run.writing.monitor import RunMonitor
from gristmill_service.run.writing.writer import Writer
from gristmill_service.run.written_columns import values_of
from gristmill_service.storage.row_tables import Stored, steps_of
from gristmill_service.storage.run_store import LogLostError, RunLog
from gristmill_service.storage.shard_store import ShardSource, ShardStore

_log = structlog.get_logger(__name__)

# A batch that could not be stored is tried again after this; later, where its rows have to be read again for it.
RETRY_S, _RETRY_READING_S = 1.0, 10.0
_EXPORTED_ROWS = 64
_EXPORTED_BYTES = 16 << 20


class PublishableBatch(Protocol):
    """What the pipeline makes of a batch. awaits, forms: as `gristmill_service.pipeline.BuiltBatch` has them."""

    @property
    def plan(self) -> PlanDocument: ...

    @property
    def shards(self) -> Sequence[ShardSource]: ...

    @property
    def stats(self) -> Callable[[], Figures]: ...

    @property
    def awaits(self) -> frozenset[str]: ...

    @property
    def forms(self) -> Mapping[ShardAddress, ShardForm]: ...


class BuildBatch(Protocol):
    """The pipeline, `gristmill_service.pipeline.build_batch`."""

    def __call__(
        self,
        steps: Steps,
        config: RunConfig,
        *,
        run: str,
        batch: int,
        policy_version: int | None,
        timed: StageTimer,
        written: Written | None = None,
        begun: Mapping[tuple[int, str], int] | None = None,
    ) -> PublishableBatch: ...


class _Job(NamedTuple):
    """A batch to build, as it was when it was begun.

    rows: none once they were let go. written: what trainers wrote, all that it awaits; None while some of it lacks, and
    where it awaits nothing. tables: those of it that are held.
    """

    number: int
    batch: Batch
    config: RunConfig
    rows: list[PickedRow]
    token_rewards: bool
    is_first: bool
    written: dict[ColumnPlace, WrittenColumn] | None
    tables: dict[int, Stored | None]


class BatchBuilder:
    """One run's. `build` is called by one thread at a time.

    blocked_reason: why a sealed batch cannot be published now; empty while none is blocked. plans: of the batches that
    this process published, encoded. forms: of those of them that wait for columns, how these have to stand.
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
    ) -> None:
        self.blocked_reason = ""
        self.retry_at = 0.0
        self.plans: dict[int, bytes] = {}
        self.forms: dict[int, Mapping[ShardAddress, ShardForm]] = {}
        # Held while shards are written: what is deleted must not be written to.
        self._publishing = threading.Lock()
        self._name, self._writer, self._log, self._store, self._room = name, writer, log, store, room
        self._pipeline, self._monitor, self._clock = pipeline, monitor, clock

    def build(self, perform: Callable[[Effects], None], retry: Callable[[], None]) -> None:
        """Builds the oldest batch that is sealed and not published, where there is one.

        perform: sees to effects. retry: has `build` called again: for the next batch, behind those of other runs that
        wait for a thread, or when there may be room. Never raises for a batch's sake.
        """
        # A next try is due some time after this one, which may take long, has failed.
        self.retry_at = math.inf
        # Together they may hold the room that the first of them needs.
        for number in self._writer.read(_withdrawn):
            self._discard(number)
        job = self._next_job()
        if job is not None:
            removals = self._room.removals
            try:
                with tracing.making_span(self._name, job.number):
                    started = time.monotonic()
                    self._record(job, self._build(job), started, perform)
            except NotFoundError:
                # The run was deleted meanwhile.
                return
            except (UnavailableError, ResourceExhaustedError) as error:
                # Nothing is wrong with the batch: what stores it has no room for it, or does not answer.
                self._block(job, error)
                if isinstance(error, ResourceExhaustedError):
                    self._room.wait(removals, retry)
                return
            retry()
        # Also where the batch that was blocked is wanted no more.
        self.blocked_reason = ""

    def wait_for_publication(self) -> None:
        """After the run was closed: returns when nothing of it is written to the store any more."""
        with self._publishing:
            pass

    def export(self, number: int) -> Iterator[Steps]:
        """The rows of a sealed batch in their order, some at a time. Raises as `progress.batch_state` does."""

        def pick(state: State, rows: RowBuffer) -> tuple[list[PickedRow], bool]:
            progress.batch_state(state, number)
            if number not in state.batches:
                raise FailedPreconditionError(f"batch {number} is not sealed yet; its rows are not decided")
            return _pick(rows, state.batches[number]), bool(state.schema.token_rewards)

        picked, token_rewards = self._writer.read(pick)
        columns = self._writer.config.columns
        for some in _whole_trajectories(picked):
            try:
                part = made_whole(gather(some, token_rewards, self._loaded(some)), columns)
            finally:
                # Rows that were freed while they were read may be zeros.
                self._writer.check_open()
                self._writer.read(lambda state, rows: progress.batch_state(state, number))
            yield from _slices(part)

    def _next_job(self) -> _Job | None:
        def find(state: State, rows: RowBuffer) -> _Job | None:
            for number in state.batches_to_build:
                batch = state.batches[number]
                config, is_first = self._writer.config, batch.mini_batches is None
                token_rewards = bool(state.schema.token_rewards)
                written = dict(batch.written) if config.written_columns and _is_written(batch, config) else None
                tables = {column.table: rows.table(column.table) for column in (written or {}).values()}
                return _Job(number, batch, config, _pick(rows, batch), token_rewards, is_first, written, tables)
            return None

        try:
            self._writer.check_open(is_internal=True)
        except GristmillError:
            return None
        return self._writer.read(find)

    def _build(self, job: _Job) -> BatchPublished | BatchFailed:
        """Computes and publishes the batch. Raises UnavailableError or ResourceExhaustedError where it cannot be stored
        now."""
        self._monitor.building(job.number)
        try:
            with self._monitor.timed("gather"):
                let_go = (lambda: self._let_go(job)) if self._may_let_go(job) else None
                steps = gather(job.rows, job.token_rewards, self._loaded(job.rows), let_go)
            built = self._pipeline(
                steps,
                job.config,
                run=self._name,
                batch=job.number,
                policy_version=job.batch.policy_version,
                timed=self._monitor.timed,
                written=self._written(job),
                begun=_own_sizes(job),
            )
            mini_batches: dict[Model, int] = dict.fromkeys(job.config.models, 0)
            for part in built.plan.mini_batches:
                mini_batches[part.model] += 1
            plan = encode_plan(built.plan)
            with self._publishing, self._monitor.timed("publish"):
                self._writer.check_open(is_internal=True)
                nbytes = self._store.publish(self._name, job.number, plan, built.shards)
        except (UnavailableError, ResourceExhaustedError):
            raise
        except (MemoryError, OSError) as error:
            # The process is short of something for now; the rows are not to be dropped for it.
            raise UnavailableError(
                f"this process cannot build the batch now: {type(error).__name__}: {error}"
            ) from error
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the batch's reason, not the thread's end
            if not isinstance(error, GristmillError):
                _log.exception("batch failed", run=self._name, batch=job.number)
            reason = str(error) or type(error).__name__
            return BatchFailed(job.number, reason, keeps_rows=isinstance(error, MisalignedError))
        record = self._monitor.built(job.number, built.stats) if job.is_first else None
        self._keep(job.number, plan, built.forms)
        return BatchPublished(job.number, mini_batches, nbytes, tuple(sorted(built.awaits)), record)

    def _loaded(self, rows: Sequence[PickedRow]) -> Load:
        """Gives the tables of the rows that nobody holds. They are read at once: one by one, each would be a round trip
        where the log is elsewhere."""
        return self._log.get_all(numbers).__getitem__ if (numbers := not_held(rows)) else self._log.get

    def _may_let_go(self, job: _Job) -> bool:
        """Whether the log has the rows, too, from which they are read where the batch cannot be published now. A batch
        that awaits columns is built twice."""
        awaits = bool(job.config.written_columns) and job.written is None
        return self._log.reads_rows and not self._log.maps_rows and not awaits

    def _let_go(self, job: _Job) -> None:
        """Gives the memory of gathered rows back, so that a large batch's rows are not held twice."""
        if job.rows:
            # Rows with which others begin are of their groups, and so among them.
            self._writer.leave_tables({one.table for one in job.rows})
            job.rows.clear()
        give_back_memory()

    def _written(self, job: _Job) -> Written | None:
        if job.written is None:
            return None
        found: dict[ShardAddress, dict[str, Array]] = {}
        for place, column in job.written.items():
            table = job.tables[column.table]
            stored = self._log.get(column.table) if table is None else table
            values = values_of(steps_of(stored), place.column)
            found.setdefault(ShardAddress("policy", place.mini_batch, place.rank), {})[place.column] = values
        return found

    def _keep(self, number: int, plan: bytes, forms: Mapping[ShardAddress, ShardForm]) -> None:
        held = self._writer.read(lambda state, rows: set(state.batches)) - {number}
        self.plans = {other: encoded for other, encoded in self.plans.items() if other in held} | {number: plan}
        self.forms = {other: kept for other, kept in self.forms.items() if other in held}
        if forms:
            self.forms[number] = forms

    def _record(
        self, job: _Job, event: BatchPublished | BatchFailed, started: float, perform: Callable[[Effects], None]
    ) -> None:
        """Records what became of the batch. Where nobody wants it any more, or not so, its shards are removed: it was
        given up, the run was deleted, or the trainer came back, with other ranks or to write columns anew."""
        may_be_recorded = False
        try:
            may_be_recorded = self._execute(RecordBatch(event, job.config, job.written), perform)
        except LogLostError:
            # Whoever opens the run next finds the shards, or publishes the batch again in their place.
            may_be_recorded = True
            raise
        else:
            if may_be_recorded and isinstance(event, BatchPublished):
                _log_publication(self._name, job, event, time.monotonic() - started)
        finally:
            if not may_be_recorded:
                self.plans.pop(event.batch, None)
                if isinstance(event, BatchPublished):
                    self._discard(event.batch)
        if not may_be_recorded:
            # Its forward shards, which count again, were replaced.
            self._execute(WithdrawBatch(event.batch), perform)

    def _execute(self, command: Command[bool], perform: Callable[[Effects], None]) -> bool:
        ticket, effects = self._writer.execute(command)
        if effects is not None:
            perform(effects)
        return ticket.result()

    def _discard(self, number: int) -> None:
        try:
            self._store.free(self._name, number)
        except (GristmillError, OSError) as error:
            # They are replaced when the batch is published again, or go with the run.
            _log.warning("shards not removed", run=self._name, batch=number, reason=str(error))

    def _block(self, job: _Job, error: GristmillError) -> None:
        is_new, number = not self.blocked_reason, job.number
        self.retry_at = self._clock() + (RETRY_S if job.rows else _RETRY_READING_S)
        self.blocked_reason = f"run {self._name!r}: batch {number} waits: {error}"
        if is_new:
            _log.warning("batch waits", run=self._name, batch=number, reason=str(error))


def _log_publication(run: str, job: _Job, event: BatchPublished, seconds: float) -> None:
    rows, nbytes = sum(len(group.refs()) for group in job.batch.groups), event.nbytes
    _log.info("batch published", run=run, batch=job.number, rows=rows, bytes=nbytes, seconds=round(seconds, 3))


def _whole_trajectories(picked: Sequence[PickedRow]) -> Iterator[list[PickedRow]]:
    """The rows in their order, some trajectories at a time."""
    some: list[PickedRow] = []
    for one in picked:
        if len(some) >= _EXPORTED_ROWS and one.row.trajectory != some[-1].row.trajectory:
            yield some
            some = []
        some.append(one)
    yield some


def _slices(part: Steps) -> Iterator[Steps]:
    """The rows in their order, as many at a time as make a message of moderate size."""
    sizes = 4 * part.tokens.lengths + sum(extra.row_bytes for extra in part.extras.values())
    for column in part.token_columns:
        sizes += column.lengths * column.values.itemsize
    begin, room = 0, _EXPORTED_BYTES
    for row, size in enumerate(sizes.tolist()):
        # One that is larger is alone: with others it might be more than a message takes.
        if row > begin and size > room:
            yield part.take(np.arange(begin, row))
            begin, room = row, _EXPORTED_BYTES
        room -= size
    if len(part):
        yield part.take(np.arange(begin, len(part)))


def _is_written(batch: Batch, config: RunConfig) -> bool:
    """Whether trainers wrote all columns for all shards of the policy."""
    if batch.mini_batches is None:
        return False
    return len(batch.written) == batch.mini_batches["policy"] * config.dp_size * len(config.written_columns)


def _own_sizes(job: _Job) -> dict[tuple[int, str], int]:
    """The sizes of groups that were begun with a number of samples of their own."""
    usual = job.config.n_samples_per_prompt
    return {group.key: group.samples for group in job.batch.groups if group.samples != usual}


def _withdrawn(state: State, rows: RowBuffer) -> list[int]:
    """Batches whose shards are not what ranks need any more, forward shards too when all is written."""
    return [number for number in state.batches_to_build if state.batches[number].mini_batches is not None]


def _pick(rows: RowBuffer, batch: Batch) -> list[PickedRow]:
    return rows.pick((group, group.ordered_rows()) for group in batch.groups)
