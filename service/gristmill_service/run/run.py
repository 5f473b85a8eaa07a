"""One run, thread-safe. Every call of the API ends here, as a command to the run's writer or as a read.

Work per token (storing rows, digests, gathering, the pipeline) happens in the calling thread or a worker's, never in
the writer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import structlog

from gristmill._wire.codecs.row_codec import Prefixes, Sent
from gristmill._wire.columns import Array
from gristmill._wire.extras import check_extras
from gristmill._wire.steps import Steps, TrajectoryKey, check
from gristmill.errors import GristmillError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.credit.kl import check_credit_columns
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.run import recovery
from gristmill_service.run.batch_builder import BatchBuilder, BuildBatch
from gristmill_service.run.housekeeping import Housekeeping
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
)
from gristmill_service.run.machine.commands import rollout_commands, trainer_commands
from gristmill_service.run.machine.commands.command import Barrier, Command, FindQuota
from gristmill_service.run.machine.commands.trainer_commands import Checkpoint
from gristmill_service.run.machine.decisions import columns, progress
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.events import GroupKey, NewGroup
from gristmill_service.run.machine.queries.conditions import Condition
from gristmill_service.run.machine.queries.status import all_groups, status
from gristmill_service.run.machine.row_digests import values_digest
from gristmill_service.run.machine.state import State
from gristmill_service.run.open_rows import read_open_row
from gristmill_service.run.request_limits import check_begun, check_submitted
from gristmill_service.run.row_intake import RowIntake
from gristmill_service.run.shard_room import ShardRoom
from gristmill_service.run.workers import TaskQueue
from gristmill_service.run.writing.monitor import RunMonitor
from gristmill_service.run.writing.row_budget import RowBudget
from gristmill_service.run.writing.writer import Writer
from gristmill_service.run.written_columns import SentColumns, written_before
from gristmill_service.storage.run_store import LogLostError, RunLog
from gristmill_service.storage.shard_store import ShardsLostError, ShardStore, is_published

_log = structlog.get_logger(__name__)
# Asked once a submission: structlog itself would first bind and format what nobody reads.
_logs = logging.getLogger(__name__).isEnabledFor

# The states of a batch that has shards in the store.
_THERE = (BatchState.PUBLISHED, BatchState.FORWARD)

T = TypeVar("T")
MakeMonitor = Callable[[Callable[[], float], Callable[[], float]], RunMonitor]


class Shared(NamedTuple):
    """What the runs of a service share.

    pipeline: makes shards of a sealed batch. make_monitor(clock, now): now is the run's own time. clock: seconds, as
    `time.monotonic`. builders, workers: threads for building batches, and for what is short.
    """

    store: ShardStore
    room: ShardRoom
    budget: RowBudget
    pipeline: BuildBatch
    make_monitor: MakeMonitor
    clock: Callable[[], float]
    builders: TaskQueue
    workers: TaskQueue


class Run:
    """The run that its log describes, from its beginning or from where the log ends.

    config: as the run was created; `self.config` is what holds now, for a trainer may come back with another dp_size.
    Raises InvalidArgumentError for a log that this version does not read.
    """

    def __init__(self, name: str, config: RunConfig, log: RunLog, shared: Shared) -> None:
        self.name, self.run_id, self.created_with = name, log.run_id, config
        self._log, self._store, clock = log, shared.store, shared.clock
        state, self._rollback = recovery.replayed(log, config)
        # Only time in which workers could have come counts for stragglers.
        offset = state.now - clock()

        def now() -> float:
            return clock() + offset

        self.monitor = shared.make_monitor(clock, now)
        self._writer = Writer(name, state, config, log, self.monitor, shared.budget, clock, now)
        self._builder = BatchBuilder(
            name, self._writer, log, shared.store, shared.room, shared.pipeline, self.monitor, clock
        )
        self._housekeeping = Housekeeping(
            name, self._writer, self._builder, log, shared.store, shared.room, shared.builders, shared.workers, clock
        )
        self._duplicates = 0
        self._intake = RowIntake(self._writer, log.get)

    def start(self) -> None:
        """Goes on where the log ends: drops what was lost, and has batches built whose shards are not there.

        Raises UnavailableError where the log cannot be written; the run is of no use then.
        """
        state, rows = self._writer.state, self._writer.rows
        is_stored = partial(is_published, self._store, self.name)
        found = recovery.recovered(state, rows, self._log, is_stored, self.config.shared_columns)
        if self._rollback is not None:
            found.append(self._rollback)
            _log.error("run rolled back: its log is shorter than promised", run=self.name, run_id=self.run_id)
        effects = self._writer.begin(found)
        self._log.note_generation(state.generation)
        # The process before may have died between recording that a batch is freed and removing it.
        effects.freed += range(max(0, state.freed - self.config.max_buffered_batches), state.freed)
        effects.builds = True
        self._housekeeping.perform(effects)

    # --- Rollout workers

    def begin_groups(
        self,
        round_: int,
        uids: Sequence[str],
        n_samples: Sequence[int] = (),
        tags: Sequence[str] = (),
        quota: FindQuota | None = None,
    ) -> Admissions:
        """n_samples: of how many samples each is made, 0 for as many as the run says; tags: the environment or task of
        each, or "". Either may be empty. quota: the caller's, where it has one."""
        check_begun(round_, uids)
        for name, given in (("n_samples", n_samples), ("tags", tags)):
            if len(given) not in (0, len(uids)):
                raise InvalidArgumentError(
                    f"{name} has {len(given)} entries for {len(uids)} uids; give one each, or none"
                )
        sizes, names = n_samples or [0] * len(uids), tags or [""] * len(uids)
        wanted = [
            NewGroup(GroupKey(round_, uid), samples, tag) for uid, samples, tag in zip(uids, sizes, names, strict=True)
        ]
        begun = self._execute(rollout_commands.BeginGroups(wanted, quota))
        self.monitor.asked_for_groups(Admission.NO_ROOM not in begun.admissions)
        return begun

    def checked(self, sent: Sent) -> Steps:
        """Rows as they came, if each obeys the rules that concern it alone. Raises InvalidArgumentError."""
        left_out = None if sent.prefixes is None else sent.prefixes.lengths
        return check_extras(check(sent.steps), self.config.columns, left_out)

    def submit(self, steps: Steps, prefixes: Prefixes | None = None, quota: FindQuota | None = None) -> list[Outcome]:
        """prefixes: with what the steps before them begin, where they came without it. quota: the caller's, where it
        has one. Raises PrefixUnknownError where such a step is not at hand."""
        if not len(steps):
            return []
        check_submitted(steps)
        self._writer.check_open()
        check_credit_columns(steps, self.config)
        outcomes = self._intake.take(steps, prefixes, self.config.shared_columns, self._execute, quota)
        self._duplicates += outcomes.count(Outcome.DUPLICATE)
        self.monitor.received(outcomes, steps)
        if _logs(logging.DEBUG):
            _log_submission(self.name, steps, outcomes)
        return outcomes

    def set_rewards(self, rewards: Sequence[RewardUpdate]) -> int:
        digests = [b"" if update.token_values is None else values_digest(update.token_values) for update in rewards]
        return self._execute(rollout_commands.SetRewards(rewards, digests))

    def abort_trajectories(self, trajectories: Sequence[TrajectoryKey], reason: str) -> int:
        return self._execute(rollout_commands.AbortTrajectories(trajectories, reason))

    def abort_groups(self, round_: int, uids: Sequence[str], reason: str) -> int:
        return self._execute(rollout_commands.AbortGroups([GroupKey(round_, uid) for uid in uids], reason))

    def seal(self, batch: int | None) -> Sealed:
        return self._execute(rollout_commands.SealBatch(batch))

    def finish(self) -> int:
        return self._execute(rollout_commands.FinishRun())

    # --- Trainer ranks

    @property
    def policy_version(self) -> int:
        return self._read(lambda state: state.policy_version)

    def announce(self, version: int) -> None:
        self._execute(trainer_commands.AnnounceVersion(version))

    def batch(self, number: int, ranks: Collection[int] = (), trains: Model | None = None) -> BatchAnswer:
        """ranks: of whose shards it tells what they lack; none: of all. trains: the model whose ranks want to train it;
        None: who asks only reads."""

        def find(state: State) -> tuple[BatchState, list[ColumnPlace]]:
            found = progress.batch_state(state, number)
            if trains is not None and found is BatchState.PENDING:
                progress.check_not_ahead(state, trains, ranks, number)
            return found, state.missing(number, ranks) if found is BatchState.FORWARD else []

        found, awaits = self._read(find)
        if found not in _THERE:
            return BatchAnswer(found)
        plan = self._builder.plans.get(number)
        if plan is None:
            try:
                with self._mending(number):
                    plan = self._store.plan(self.name, number)
            except NotFoundError:
                self._check_withdrawn(number)
                return BatchAnswer(BatchState.PENDING)
        return BatchAnswer(found, plan, awaits)

    def shard(
        self, model: Model, rank: int, position: Position | None, incarnation: int, *, is_forward: bool = False
    ) -> ShardAnswer:
        """is_forward: whether the forward shard is wanted, too, while the batch waits for columns."""

        def find(state: State) -> tuple[BatchState, Position, int]:
            progress.check_caller(state, model, rank, incarnation)
            self.monitor.asked_for_shard(state, model, rank)
            wanted = progress.next_of(state, model, rank) if position is None else position
            found = progress.shard_state(state, model, rank, wanted, is_forward=is_forward)
            return found, wanted, state.models[model].incarnation

        found, wanted, current = self._read(find)
        if found not in _THERE:
            return ShardAnswer(found, wanted, incarnation=current)
        address = ShardAddress(model, wanted.mini_batch, rank)
        try:
            location = self._store.locate(self.name, wanted.batch, address)
        except NotFoundError:
            self._check_withdrawn(wanted.batch)
            return ShardAnswer(BatchState.PENDING, wanted, incarnation=current)
        self.monitor.gave_shard(model, rank, location.size)
        return ShardAnswer(found, wanted, address, location, current)

    def _check_withdrawn(self, number: int) -> None:
        """For a batch that was published a moment ago and is not in the store: returns where it is built anew, to come
        again. Raises NotFoundError where it was freed."""
        if self._read(lambda state: progress.batch_state(state, number)) in _THERE:
            self._withdraw(number, "the store does not have it")

    @contextmanager
    def _mending(self, number: int) -> Iterator[None]:
        """Has the batch built anew where the store turns out to have lost a part of it; the error is raised on."""
        try:
            yield
        except ShardsLostError as error:
            self._withdraw(number, str(error))
            raise

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """As `_mending`; and where the shards are not there because they are built anew, that is what is said."""
        try:
            with self._mending(number):
                yield
        except NotFoundError:
            if self._read(lambda state: progress.batch_state(state, number)) is BatchState.PENDING:
                raise UnavailableError(f"run {self.name!r}: batch {number} is not published yet; ask again") from None
            raise

    def _withdraw(self, number: int, reason: str) -> None:
        # It may be there again: then it is built once more, to the same bytes.
        if self._execute(trainer_commands.WithdrawBatch(number)):
            _log.warning("shards are lost, and the batch is built again", run=self.name, batch=number, reason=reason)

    def read_shard(self, batch: int, address: ShardAddress) -> Iterator[bytes]:
        self._writer.check_open()
        with self._reading(batch):
            pieces = self._store.read(self.name, batch, address)
        return self._read_on(batch, pieces)

    def read_shard_frames(self, batch: int, address: ShardAddress) -> Iterator[bytes] | None:
        """The shard's compressed frames, or None where the store has whole files."""
        self._writer.check_open()
        with self._reading(batch):
            pieces = self._store.read_frames(self.name, batch, address)
        return None if pieces is None else self._read_on(batch, pieces)

    def _read_on(self, batch: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
        with self._reading(batch):
            yield from pieces

    def export(self, number: int) -> Iterator[Steps]:
        """The rows of a sealed batch in their order, some at a time. Raises as `batch` does."""
        self._writer.check_open()
        return self._builder.export(number)

    def open_row(self, key: GroupKey, sample: int, step: int) -> Steps:
        """A row of a group that is not sealed. Raises NotFoundError where there is none; see `read_open_row`."""
        self._writer.check_open()
        return read_open_row(self._writer, self._log, key, sample, step)

    def write(self, batch: int, mini_batch: int, rank: int, incarnation: int, tensors: Mapping[str, Array]) -> int:
        """Takes columns that a trainer writes for one of the policy's shards. Answers how many columns of shards the
        batch lacks then.

        tensors: by the names that the shard's would have, and in their shape.
        """
        self._writer.check_open()
        sent = SentColumns(self.name, batch, ShardAddress("policy", mini_batch, rank), tensors, self.config)
        others = written_before(batch, self._writer, self._log)
        lacking = None
        while lacking is None:
            beside = self._read(lambda state: columns.beside(state, batch, sent.digests))
            new = self._read(lambda state: columns.unwritten(state, batch, incarnation, sent.digests))
            with sent.staged(new, self._builder.forms.get(batch, {}), self._writer, others) as stored:
                lacking = self._execute(trainer_commands.WriteColumns(batch, incarnation, stored, beside))
        return lacking

    def acknowledge(self, model: Model, rank: int, position: Position, incarnation: int, commit: bool) -> Moved:
        return self._execute(trainer_commands.Acknowledge(model, rank, position, incarnation, commit))

    def commit(self, model: Model, position: Position, incarnation: int) -> Moved:
        return self._execute(trainer_commands.Commit(model, position, incarnation))

    def resume(self, model: Model, checkpoint: Checkpoint, launch: str, dp_size: int = 0) -> Resumed:
        """dp_size: 0 for as many ranks as before."""
        return self._execute(trainer_commands.Resume(model, checkpoint, launch, dp_size, self.run_id))

    # --- Everyone

    @property
    def config(self) -> RunConfig:
        """As it holds now."""
        return self._writer.config

    def read(self, function: Callable[[State, Room], T]) -> T:
        """Reads the state for a moment, also that of a closed run. The function must be quick and change nothing."""
        return self._writer.read(lambda state, rows: function(state, self._writer.room()))

    def status(self) -> RunStatus:
        return self._read(self.status_of)

    def status_of(self, state: State) -> RunStatus:
        """For `read`."""
        config_json = self.config.model_dump_json(exclude_defaults=True)
        room = self._writer.room().groups
        return status(state, self.name, self.run_id, config_json=config_json, room=room, duplicates=self._duplicates)

    def groups(self) -> list[GroupAnswer]:
        """Every group that was ever admitted; the decided ones first."""
        return self._read(all_groups).answers()

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        """Has `wake` called once, from any thread, when the condition is met; at once where it is already, or where the
        run takes no calls. To be given back with `stop_waiting`."""
        self._writer.wait(condition, wake)

    def stop_waiting(self, condition: Condition, wake: Callable[[], None]) -> None:
        self._writer.stop_waiting(condition, wake)

    def wake_waiters(self) -> None:
        """Wakes every caller that waits, to find that the run is lost."""
        for wake in self._writer.take_waiters():
            wake()

    @property
    def blocked_reason(self) -> str:
        """Why a sealed batch cannot be published now; empty while none is blocked."""
        return self._builder.blocked_reason

    @property
    def log_bytes(self) -> int:
        """Bytes of the log of events."""
        return self._log.log_bytes

    @property
    def lease(self) -> float | None:
        """Seconds for which this process decides for the run unless it renews that; None where it needs no lease."""
        return self._log.lease

    # --- Time, and the end

    @property
    def is_due(self) -> bool:
        """Whether `tick` has something to do; cheap, and without a lock."""
        has_timeouts = self.config.group_timeout_s is not None or self.config.tag_timeout_s is not None
        has_stragglers = has_timeouts and bool(self._writer.state.open)
        return has_stragglers or self._writer.owes or self._housekeeping.is_due

    def tick(self) -> None:
        """Closes or drops the groups whose time is over, and goes on with what could not be done before.

        Raises UnavailableError where the log cannot be written.
        """
        try:
            self._execute(rollout_commands.CloseStragglers())
        finally:
            self._housekeeping.try_again()

    def flush(self) -> None:
        """Makes safe what the log was not told to make safe at once."""
        try:
            self._log.flush()
        except LogLostError:
            self._writer.lose()
            raise

    def close(self, error: GristmillError) -> None:
        """From now on every call raises this error; callers that wait are woken to see it. Returns when no command is
        under way."""
        for wake in self._writer.close(error):
            wake()
        _, effects = self._writer.execute(Barrier())
        if effects is not None:
            self._housekeeping.perform(effects)

    def wait_for_publication(self) -> None:
        """After `close`: returns when nothing of the run is written to the shard store any more."""
        self._builder.wait_for_publication()

    def close_log(self) -> None:
        """After `close`, when no batch is being built any more: gives the log and all memory back. Idempotent."""
        self._writer.let_go()
        self._builder.plans.clear()
        self._builder.forms.clear()
        self._log.close()

    def lose(self) -> None:
        """From now on the run is to be opened anew."""
        self._writer.lose()

    @property
    def is_deleted(self) -> bool:
        return isinstance(self._writer.closed, NotFoundError)

    @property
    def is_lost(self) -> bool:
        """Whether the log has to be opened anew, here or elsewhere."""
        return self._writer.is_lost

    # --- Inside

    def _execute(self, command: Command[T]) -> T:
        """The command of a caller. Its answer is safe when this returns."""
        ticket, effects = self._writer.execute(command)
        if effects is not None:
            self._housekeeping.perform(effects)
        answer = ticket.result()
        self._sync()
        return answer

    def _read(self, function: Callable[[State], T]) -> T:
        """What a caller reads is safe, too: nobody is told of what may be lost."""
        self._writer.check_open()
        found = self._writer.read(lambda state, rows: function(state))
        self._sync()
        return found

    def _sync(self) -> None:
        try:
            self._log.sync()
        except LogLostError:
            self._writer.lose()
            raise


def _log_submission(run: str, steps: Steps, outcomes: Sequence[Outcome]) -> None:
    """Leads from a request's id to its groups, which the line of their batch's sealing names."""
    groups = sorted({str(GroupKey(*steps.key(row)[:2])) for row in range(len(steps))})
    accepted, first = outcomes.count(Outcome.ACCEPTED), str(steps.key(0))
    _log.debug("rows submitted", run=run, rows=len(steps), accepted=accepted, first=first, groups=groups)
