"""One run, on the event loop. Every API call ends here, either as a command to the run's writer or as a read.

I/O and work that grows with the number of tokens run in threads; only the loop uses the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from gristmill._wire.codecs.row_codec import Prefixes, Sent
from gristmill._wire.columns import Array
from gristmill._wire.extras import check_extras
from gristmill._wire.steps import Steps, TrajectoryKey, check
from gristmill.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.credit.kl import check_credit_columns
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.background import Background
from gristmill_service.run.batch_builder import BatchBuilder
from gristmill_service.run.machine.answers import (
    Admission,
    Admissions,
    BatchAnswer,
    BatchState,
    ColumnPlace,
    GroupAnswer,
    Moved,
    Outcome,
    Position,
    Resumed,
    RewardUpdate,
    RunStatus,
    Sealed,
    ShardAnswer,
    Taken,
)
from gristmill_service.run.machine.decisions import aborts, admission, columns, ingest, progress, rewards, sealing
from gristmill_service.run.machine.decisions.admission import FindQuota, Room
from gristmill_service.run.machine.decisions.begin import begin
from gristmill_service.run.machine.decisions.pacing import asks
from gristmill_service.run.machine.decisions.resume import Checkpoint, resume
from gristmill_service.run.machine.described_rows import RowKeys, values_digest
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.state import Decision, State
from gristmill_service.run.machine.status import group_answers, group_keys, status
from gristmill_service.run.open_rows import read_open_row
from gristmill_service.run.published_batches import HAVE_SHARDS, PublishedBatches
from gristmill_service.run.recent_tables import BatchNumbers, gone
from gristmill_service.run.recovery import Recovered, recover
from gristmill_service.run.rows.declared_prefixes import Prepared, TokenSums, prepare, steps_before
from gristmill_service.run.shared import Shared
from gristmill_service.run.waiters import Condition
from gristmill_service.run.writer import NO_TABLES, Effects, Writer
from gristmill_service.run.written_columns import SentColumns, loaded, table_of, written_before
from gristmill_service.storage.run_store import LogLostError, RunLog

# Larger requests compute their digests in a thread; switching to one takes about 0.1 ms.
_LARGE_BYTES = 1 << 20

T = TypeVar("T")


class Run:
    """A run. Use `open` to create one from its log.

    created_with: the configuration that the run was created with. `config` is the current one, because a trainer may
        resume with another dp_size. called_at: when the run was last called, or was opened.
    """

    @classmethod
    async def open(cls, name: str, config: RunConfig, log: RunLog, shared: Shared) -> Run:
        """Opens the run: drops groups whose rows are lost, and rebuilds batches without shards.

        Raises InvalidArgumentError for a log that this version cannot read, and UnavailableError if the log cannot be
        read or written now; the run is then unusable.
        """
        run = cls(name, config, log, shared, await asyncio.to_thread(recover, name, config, log, shared.store))
        await run._writer.commits.safe()
        log.note_generation(run._writer.state.generation)
        return run

    def __init__(self, name: str, config: RunConfig, log: RunLog, shared: Shared, opened: Recovered) -> None:
        self.name, self.run_id, self.created_with = name, log.run_id, config
        self._log, self._store, clock = log, shared.store, shared.clock
        self.called_at = clock()
        state, rows, tables, events = opened
        # The run's clock, which times out stragglers, stops while the run is closed.
        offset = state.now - clock()

        def now() -> float:
            return clock() + offset

        self.monitor = shared.make_monitor(clock, now)
        threads = (shared.log_threads, shared.snapshot_thread)
        self._writer = writer = Writer(
            name, state, rows, tables, config, log, self.monitor, shared.budget, clock, now, *threads
        )
        self._builder = BatchBuilder(
            name,
            writer,
            log,
            shared.store,
            shared.room,
            shared.pipeline,
            self.monitor,
            clock,
            shared.builders,
            shared.tables,
        )
        self._background = Background(name, writer, self._builder, log, shared.store, shared.room, clock)
        self._published = PublishedBatches(name, writer, shared.store)
        writer.on_effects, self.compaction = self._background.perform, writer.compaction
        self._duplicates, self._sums, self.tables = 0, TokenSums(), shared.tables
        writer.begin(events)
        # The previous process may have died after recording that a batch is freed and before removing its shards.
        freed = range(max(0, state.freed - self.config.max_buffered_batches), state.freed)
        self._background.perform(Effects(builds=True, freed=[*freed]))
        self._background.look_through(shared.looking)

    # --- Rollout workers

    async def begin_groups(
        self,
        round_: int,
        uids: Sequence[str],
        n_samples: Sequence[int] = (),
        tags: Sequence[str] = (),
        find_quota: FindQuota | None = None,
    ) -> Admissions:
        """Admits groups in order, as far as there is capacity.

        n_samples: the number of samples of each group; 0 for the run's. tags: the environment or task of each group;
            "" for none. Either list may be empty. find_quota: returns the caller's quota; None if it has none.
        """
        wanted = admission.new_groups(round_, uids, n_samples, tags)
        begun = await self._execute(lambda view: admission.begin_groups(view, wanted, find_quota))
        self.monitor.asked_for_groups(Admission.NO_ROOM not in begun.admissions)
        return begun

    def checked(self, sent: Sent) -> Steps:
        """Checks each row of a request against the rules for single rows. Raises InvalidArgumentError."""
        steps, config = check(sent.steps), self._writer.config
        if steps.extras or config.columns:
            check_extras(steps, config.columns, None if sent.prefixes is None else sent.prefixes.lengths)
            check_credit_columns(steps, config)
        return steps

    async def submit(
        self, steps: Steps, prefixes: Prefixes | None = None, find_quota: FindQuota | None = None, by_row: bool = False
    ) -> Taken:
        """Stores rows that `checked` returned. Returns their outcomes.

        prefixes: the first tokens that rows omit because the step before has them. find_quota: returns the caller's
            quota; None if it has none. by_row: whether invalid rows are refused one by one, instead of the whole
            request. Raises PrefixUnknownError if the run does not have the step before.
        """
        if not steps.uids:
            return Taken([])
        self._writer.check_open()
        self._log.check()
        table = next(self._writer.table_numbers)
        rows, sums = await self._prepared(table, steps, prefixes)
        taken = await self._execute(
            lambda view: ingest.take_rows(view, steps, rows, find_quota, by_row), {table: steps}
        )
        self._sums.note(rows, taken.outcomes, sums)
        self._duplicates += taken.outcomes.count(Outcome.DUPLICATE)
        self.monitor.received(taken.outcomes, steps)
        return taken

    async def _prepared(self, table: int, steps: Steps, prefixes: Prefixes | None) -> Prepared:
        keys, writer = RowKeys.of(steps), self._writer
        repeated = writer.config.repeated_columns if steps.extras else {}
        before = {} if prefixes is None else steps_before(writer.state, writer.rows, self._sums, keys, prefixes)
        reads_rows = any(step.picked is not None for step in before.values())
        if reads_rows:
            # Only tables that are in the log can be read.
            await writer.commits.safe()
        if reads_rows or 4 * steps.tokens.total > _LARGE_BYTES:
            return await asyncio.to_thread(prepare, table, steps, keys, prefixes, before, repeated, writer.tables.get)
        return prepare(table, steps, keys, prefixes, before, repeated, writer.tables.get)

    async def set_rewards(self, updates: Sequence[RewardUpdate]) -> int:
        digests = [b"" if update.token_values is None else values_digest(update.token_values) for update in updates]
        return await self._execute(lambda view: rewards.set_rewards(view.state, updates, digests))

    async def abort_trajectories(
        self, trajectories: Sequence[TrajectoryKey], reason: str, attempt: int | None = None
    ) -> int:
        return await self._execute(
            lambda view: aborts.abort_trajectories(view.state, view.config, trajectories, reason, attempt)
        )

    async def abort_groups(self, round_: int, uids: Sequence[str], reason: str) -> int:
        keys = [GroupKey(round_, uid) for uid in uids]
        return await self._execute(lambda view: aborts.abort_groups(view.state, keys, reason))

    async def seal(self, batch: int | None) -> Sealed:
        await self._background.check_complete()
        return await self._execute(lambda view: sealing.seal_batch(view.state, view.config, batch))

    async def finish(self) -> int:
        await self._background.check_complete()
        return await self._execute(lambda view: sealing.finish(view.state, view.config))

    # --- Trainer ranks

    async def policy_version(self) -> int:
        return await self._read(lambda state: state.policy_version)

    async def announce(self, version: int) -> None:
        await self._execute(lambda view: progress.announce(view.state, version))

    async def batch(
        self, number: int, ranks: Collection[int] = (), trains: Model | None = None, incarnation: int = 0
    ) -> BatchAnswer:
        """Returns a batch's state. ranks: the ranks for which the answer lists missing columns; empty for all. trains:
        the model whose ranks want to train the batch, as this incarnation; None if the caller only reads."""

        def look_up(state: State) -> tuple[BatchState, list[ColumnPlace]]:
            if trains is not None:
                for rank in set(ranks):
                    progress.check_caller(state, trains, rank, incarnation)
            batch_state = progress.batch_state(state, number)
            if trains is not None and batch_state is BatchState.PENDING:
                progress.check_not_ahead(state, trains, ranks, number)
            if trains == "policy":
                self._writer.ask(set(ranks or range(state.dp_size)), number)
            return batch_state, state.missing(number, ranks) if batch_state is BatchState.FORWARD else []

        batch_state, awaits = await self._read(look_up)
        if batch_state not in HAVE_SHARDS:
            return BatchAnswer(batch_state)
        plan = self._builder.plans.get(number) or await self._published.plan(number)
        return BatchAnswer(BatchState.PENDING) if plan is None else BatchAnswer(batch_state, plan, awaits)

    async def numbers(self, number: int) -> BatchNumbers:
        """Returns the plan and the table of a published batch, or of one that was freed lately.

        Raises UnavailableError while the batch is sealed and not published, NotFoundError if it is not sealed, or is
        freed and its table no longer kept; and like `batch`.
        """
        kept = self.tables.get(self.run_id, number)
        try:
            answer = await self.batch(number)
        except NotFoundError:
            self._writer.check_open()
            if kept is None:
                raise gone(number) from None
            return kept
        if answer.state is BatchState.END:
            raise progress.after_the_end(self._writer.state, number)
        numbers = None if answer.state not in HAVE_SHARDS else kept or await self._published.numbers(number)
        if numbers is None:
            error = UnavailableError if number in self._writer.state.batches else NotFoundError
            raise error(f"batch {number} is not published yet; retry later")
        return numbers

    async def shard(
        self,
        model: Model,
        rank: int,
        position: Position | None,
        incarnation: int,
        is_forward: bool = False,
        waits: bool = False,
    ) -> ShardAnswer:
        """Returns a rank's shard. is_forward: whether the caller accepts the forward shard while the batch waits for
        columns. waits: whether the call may wait."""

        def look_up(state: State) -> tuple[BatchState, Position, int]:
            progress.check_caller(state, model, rank, incarnation)
            self.monitor.asked_for_shard(state, model, rank)
            wanted = progress.next_of(state, model, rank) if position is None else position
            batch_state = progress.shard_state(state, model, rank, wanted, is_forward=is_forward)
            if model == "policy" and asks(state, rank, position, batch_state, waits=waits):
                self._writer.ask([rank], wanted.batch)
            return batch_state, wanted, state.models[model].incarnation

        batch_state, wanted, current = await self._read(look_up)
        if batch_state not in HAVE_SHARDS:
            return ShardAnswer(batch_state, wanted, incarnation=current)
        address = ShardAddress(model, wanted.mini_batch, rank)
        location = await self._published.locate(wanted.batch, address)
        if location is None:
            return ShardAnswer(BatchState.PENDING, wanted, incarnation=current)
        self.monitor.gave_shard(model, rank, location.size)
        return ShardAnswer(batch_state, wanted, address, location, current)

    async def read_shard(self, batch: int, address: ShardAddress) -> AsyncIterator[bytes]:
        """Returns the shard's file in pieces."""
        self._writer.check_open()
        return await self._published.read(batch, address)

    async def read_shard_frames(self, batch: int, address: ShardAddress) -> AsyncIterator[bytes] | None:
        """Returns the shard's compressed frames; None if the store has uncompressed files."""
        self._writer.check_open()
        return await self._published.read_frames(batch, address)

    async def export(self, number: int | None) -> AsyncIterator[Steps]:
        """Yields rows in several tables, see `BatchBuilder.export`."""
        self._writer.check_open()
        async for steps in self._builder.export(number):
            yield steps

    async def open_row(self, key: GroupKey, sample: int, step: int) -> Steps:
        """Returns a row of a group that is not sealed. Raises NotFoundError if there is none; see `read_open_row`."""
        self._writer.check_open()
        return await read_open_row(self._writer, key, sample, step)

    async def write(
        self, batch: int, mini_batch: int, rank: int, incarnation: int, tensors: Mapping[str, Array]
    ) -> int:
        """Stores columns of one policy shard. Returns how many columns the batch's shards still wait for.

        tensors: with the names and shapes of the tensors in the shard.
        """
        self._writer.check_open()
        address = ShardAddress("policy", mini_batch, rank)
        sent = await asyncio.to_thread(SentColumns, self.name, batch, address, tensors, self.config)
        lacking = None
        while lacking is None:
            self._writer.check_open()
            state, forms = self._writer.state, self._builder.forms.get(batch, {})
            siblings = columns.written_siblings(state, batch, sent.digests)
            new = columns.unwritten(state, batch, incarnation, sent.digests)
            others = loaded(written_before(batch, state, self._writer.rows), self._writer.tables)
            # Only tables that are in the log can be read.
            await self._writer.commits.safe()
            values = await asyncio.to_thread(sent.values, new, forms, others)
            lacking = await self._write(batch, incarnation, sent, values, siblings)
        return lacking

    async def _write(
        self,
        batch: int,
        incarnation: int,
        sent: SentColumns,
        values: Mapping[ColumnPlace, Array],
        siblings: frozenset[ColumnPlace],
    ) -> int | None:
        numbers = [next(self._writer.table_numbers) for _ in values]
        columns_of = zip(numbers, values.items(), strict=True)
        tables = {number: table_of(place.column, column_values) for number, (place, column_values) in columns_of}
        written = sent.described(values, numbers)
        return await self._execute(
            lambda view: columns.write_columns(view.state, batch, incarnation, written, siblings), tables
        )

    async def acknowledge(
        self, model: Model, rank: int, position: Position, incarnation: int, commit: bool, *, alone: bool = False
    ) -> Moved:
        how = rank, position, incarnation, commit
        return await self._execute(lambda view: progress.acknowledge(view.state, model, *how, alone=alone))

    async def commit(self, model: Model, position: Position, incarnation: int, rank: int | None = None) -> Moved:
        return await self._execute(lambda view: progress.commit(view.state, model, position, incarnation, rank))

    async def resume(
        self, model: Model, checkpoint: Checkpoint, launch: str, dp_size: int = 0, rank: int | None = None
    ) -> Resumed:
        how = checkpoint, launch, dp_size, self.run_id, rank
        return await self._execute(lambda view: resume(view.state, view.config, model, *how))

    async def begin(self, model: Model, ranks: Sequence[int]) -> Resumed:
        return await self._execute(lambda view: begin(view.state, model, ranks, self.run_id))

    # --- Everyone

    @property
    def config(self) -> RunConfig:
        """The current configuration."""
        return self._writer.config

    def read(self, function: Callable[[State, Room], T]) -> T:
        """Calls the function with the state, even if the run is closed. It must be fast and change nothing."""
        return function(self._writer.state, self._writer.room())

    async def status(self) -> RunStatus:
        return await self._read(self.status_of)

    def status_of(self, state: State) -> RunStatus:
        """Returns the status for this state, for use with `_read`."""
        room = self._writer.room().groups
        return status(state, self.name, self.run_id, config=self.config, room=room, duplicates=self._duplicates)

    async def archived(self) -> int:
        return await self._read(lambda state: len(state.closed.archive))

    async def groups(self, named: Sequence[GroupKey] | None = None) -> AsyncIterator[list[GroupAnswer]]:
        """Yields the groups that are not archived, closed ones first, or the named ones; other calls run in between."""
        for keys in await self._read(lambda state: group_keys(state, named)):
            yield await self._read(partial(group_answers, keys))

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        """Calls `wake` once, when the condition is met; immediately if it is met already, or if the run accepts no
        calls. Cancel it with `stop_waiting`."""
        self._writer.wait(condition, wake)

    def stop_waiting(self, condition: Condition, wake: Callable[[], None]) -> None:
        self._writer.waiters.remove(condition, wake)

    @property
    def blocked_reason(self) -> str:
        """Why a sealed batch cannot be published now; empty if no batch is blocked."""
        return self._builder.blocked_reason

    @property
    def log_bytes(self) -> int:
        """The size of the event log, in bytes."""
        return self._log.log_bytes

    @property
    def lease(self) -> float | None:
        """The seconds for which this process owns the run without renewing its lease; None if it needs no lease."""
        return self._log.lease

    # --- Time, and the end

    def tick(self) -> None:
        """Closes or drops groups that timed out, and retries tasks that failed before."""
        if self.is_lost:
            self._writer.waiters.wake_all()
            return
        self._writer.wake_for_room()
        has_timeouts = self.config.group_timeout_s is not None or self.config.tag_timeout_s is not None
        if has_timeouts and self._writer.state.open and self._writer.closed is None:
            self._writer.execute(aborts.close_stragglers)
        self._background.try_again()

    async def work_on_log(self, work: Callable[[RunLog], None]) -> None:
        """Calls `work` in a thread. Raises UnavailableError; then the log may be lost, and the run with it."""
        try:
            await asyncio.to_thread(work, self._log)
        except LogLostError:
            self._writer.lose()
            raise

    async def close(self, error: GristmillError) -> None:
        """Makes every call raise this error from now on, and wakes waiting callers. Returns when no append is
        running."""
        self._writer.close(error)
        await self._writer.commits.close()
        await self._writer.compaction.close()

    def abandon_build(self) -> None:
        """After `close`: cancels the publication of the batch that is being computed, to speed up `wait_idle`."""
        self._builder.abandon()

    async def wait_idle(self) -> None:
        """After `close`: returns when no background task of the run is running."""
        await self._background.idle()

    async def close_log(self) -> None:
        """After `close`, when no batch is being built: releases the log and all memory. Idempotent."""
        self._writer.release()
        self._builder.plans.clear()
        self._builder.forms.clear()
        await asyncio.to_thread(self._log.close)

    @property
    def is_deleted(self) -> bool:
        return self._writer.is_deleted

    @property
    def is_lost(self) -> bool:
        """Whether the log has to be reopened, by this process or another."""
        return self._writer.is_lost

    @property
    def is_over(self) -> bool:
        """Whether nothing remains to be done, and the log contains all of the run."""
        return self._log.reads_rows and self._writer.is_over and self._background.is_idle

    def lose(self) -> None:
        """Marks the run as one that has to be reopened."""
        self._writer.lose()

    async def _execute(self, decide: Callable[[Writer], Decision[T]], tables: Mapping[int, Steps] = NO_TABLES) -> T:
        """Decides a call of a client. Returns when the answer is durable."""
        self._writer.check_open()
        try:
            return self._writer.execute(decide, tables)
        finally:
            # Wait even if the call was refused, because the refusal may depend on events that are not in the log yet.
            await self._writer.commits.safe()

    async def _read(self, function: Callable[[State], T]) -> T:
        """Reads the state for a client. Returns when everything that was read is durable, so that no client sees
        something that may still be lost."""
        self._writer.check_open()
        try:
            return function(self._writer.state)
        finally:
            await self._writer.commits.safe()
