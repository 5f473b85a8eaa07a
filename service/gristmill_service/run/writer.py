"""The state of one run and its only writer: decides calls, applies their events, and queues the events for the log.

Everything here runs on the event loop, so no locks are needed. A call's events are applied immediately; its caller gets
the answer when they are in the log (`Commits.safe`). If an append fails, the run is lost: it is reopened from the log,
and callers without an answer retry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from gristmill._wire.steps import Steps
from gristmill.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_service.access.quotas import NO_LIMITS, Quota, Usage
from gristmill_service.config import RunConfig, with_dp_size
from gristmill_service.run.capacity import RowBudget
from gristmill_service.run.commits import Commits
from gristmill_service.run.compaction import Compaction
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.codec import encode_event, snapshot_of
from gristmill_service.run.machine.decisions import admission, sealing
from gristmill_service.run.machine.decisions.admission import BytesLeft, Room
from gristmill_service.run.machine.decisions.pacing import forget
from gristmill_service.run.machine.events import (
    COLUMNS,
    Acknowledged,
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    ColumnsWritten,
    Event,
    ModelResumed,
    RanksBegan,
    Resized,
    RowsStored,
)
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import Decision, State, apply
from gristmill_service.run.monitor import RunMonitor
from gristmill_service.run.rows.checked_tables import CheckedTables
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.run.waiters import TOPICS, Condition, Topic, Waiters
from gristmill_service.storage.row_tables import Stored, nbytes, to_stored
from gristmill_service.storage.run_store import RunLog

T = TypeVar("T")

NO_TABLES: Mapping[int, Steps] = MappingProxyType({})


class SparseTable(NamedTuple):
    """A table in memory of which at most half the rows are needed. live: the index of each needed row."""

    number: int
    stored: Stored
    live: dict[int, int]


@dataclass(slots=True)
class Effects:
    """The effects of applied events.

    tables: the new tables of rows that the events refer to. topics: the topics of conditions that may now be met.
    The rest is background work. builds: whether there is a batch to build. freed: batches whose shards can be removed.
    empty: tables without needed rows. sparse: tables to compact. sealed, failed: batches to log. unchecked: tables to
    check before the next batch can be sealed.
    """

    tables: dict[int, Steps] = field(default_factory=dict)
    topics: set[Topic] = field(default_factory=set)
    builds: bool = False
    freed: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    sparse: list[SparseTable] = field(default_factory=list)
    sealed: list[BatchSealed] = field(default_factory=list)
    failed: list[BatchFailed] = field(default_factory=list)
    unchecked: list[int] = field(default_factory=list)


class Writer:
    """The only code that changes the state.

    config: the current configuration. now: returns the time on the run's clock. closed: the error that every call
    raises once the run is closed. asked: the latest batch that each policy rank asked for since its trainer began.
    on_effects: starts background work. table_numbers: numbers for new tables of rows. tables: the log's tables of rows.
    """

    def __init__(
        self,
        name: str,
        state: State,
        rows: RowBuffer,
        tables: CheckedTables,
        config: RunConfig,
        log: RunLog,
        monitor: RunMonitor,
        budget: RowBudget,
        clock: Callable[[], float],
        now: Callable[[], float],
        threads: Executor,
        snapshot_thread: Executor,
    ) -> None:
        self.state, self.rows, self.tables, self.waiters = state, rows, tables, Waiters()
        self.config, self.now = with_dp_size(config, state.dp_size), now
        self.closed: GristmillError | None = None
        self.asked: dict[int, int] = {}
        self.on_effects: Callable[[Effects], None] = lambda effects: None
        self.commits = Commits(log, threads, self.lose)
        self.compaction = Compaction(log, snapshot_thread, clock, self._snapshot, self.lose)
        self.table_numbers = itertools.count(log.first_number)
        self._name, self._log, self._monitor, self._budget = name, log, monitor, budget
        self._has_rows_in_memory = log.is_remote or not log.reads_rows
        self._is_lost = False
        budget.hold(name, 0)

    # --- Decisions

    def execute(
        self,
        decide: Callable[[Writer], Decision[T]],
        tables: Mapping[int, Steps] = NO_TABLES,
        *,
        is_internal: bool = False,
    ) -> T:
        """Decides a call, and applies its events and their consequences. Return the answer to a client only when
        `commits` are safe.

        tables: the tables that the events may refer to, by number. is_internal: whether a background task calls; its
            result is accepted even while the service shuts down.
        """
        self.check_open(is_internal)
        row_bytes = sum(map(nbytes, tables.values())) + self.commits.row_bytes if tables else 0
        # Checked before the state changes, because a run is recovered from its log when an append is refused.
        self._log.check(has_rows=False, row_bytes=row_bytes)
        events, answer = decide(self)
        if events:
            self._happen(events, tables)
        return answer(self.state)

    def begin(self, events: Sequence[Event]) -> None:
        """Applies the events of opening the run, and the events that follow from them."""
        self._happen(events, NO_TABLES, is_first=True)

    def go_on(self, events: Sequence[Event]) -> None:
        """Applies the events that a check of tables causes, if any, and seals what had to wait for the check."""
        self.check_open(is_internal=True)
        self._log.check(has_rows=False)
        self._happen(events, NO_TABLES)

    def _happen(self, decided: Sequence[Event], tables: Mapping[int, Steps], *, is_first: bool = False) -> None:
        # Encode first, so that a value that cannot be encoded is refused before the state changes.
        encoded = [encode_event(event) for event in decided]
        effects = Effects()
        try:
            self._apply(decided, tables, effects)
            happened, may_seal = None if is_first else decided, partial(self._may_seal, effects)
            for following in sealing.consequences(self.state, self.config, happened, may_seal):
                encoded += [encode_event(event) for event in following]
                self._apply(following, tables, effects)
        except BaseException:
            # A defect: the events are applied only in part, and the state must not be used.
            self.lose()
            raise
        if encoded:
            self.commits.add(encoded, effects.tables)
        if self._log.is_long and self.compaction.is_due:
            self.commits.compact(self.compaction)
        self._budget.hold(self._name, admission.row_bytes_promised(self.state), self._usage())
        if effects.topics:
            room = self.room()
            self._monitor.changed(self.state, room)
            self.waiters.wake_met(effects.topics, self.state, room)
        if self.rows.empty:
            effects.empty = self.rows.take_empty()
        if self.rows.sparse:
            effects.sparse = [SparseTable(*one) for one in self.rows.take_sparse()]
        if effects.builds or effects.freed or effects.empty or effects.sparse or effects.failed or effects.unchecked:
            self.on_effects(effects)

    def _may_seal(self, effects: Effects, groups: Iterable[Group]) -> bool:
        """Returns whether all tables of the groups are checked. If not, they have to be checked first."""
        effects.unchecked = self.tables.unchecked(groups)
        return not effects.unchecked

    def _apply(self, events: Sequence[Event], tables: Mapping[int, Steps], effects: Effects) -> None:
        for event in events:
            released = apply(self.state, event)
            match event:
                case RowsStored(rows):
                    number = rows[0].ref.table
                    self._add_table(number, tables[number], [row.ref.row for row in rows], effects)
                case BatchSealed():
                    effects.sealed.append(event)
                    effects.builds = True
                case BatchPublished(batch, awaits=()) if self._log.reads_rows:
                    self.rows.unload({ref.table for ref in self.state.batches[batch].refs()})
                case ColumnsWritten(batch, columns):
                    for column in columns.values():
                        self._add_table(column.table, tables[column.table], [COLUMNS], effects)
                    effects.builds = effects.builds or self.state.is_written(batch)
                case BatchFreed(batch) | BatchGivenUp(batch):
                    effects.freed.append(batch)
                case BatchFailed():
                    effects.failed.append(event)
                case BatchWithdrawn():
                    effects.builds = True
                case Acknowledged("policy", _, Position(_, 0, 0)):
                    # The rank is past a batch, which may be trained now.
                    effects.topics.add(Topic.ROOM)
                case RanksBegan() | ModelResumed():
                    forget(self.asked, event)
                case Resized(dp_size):
                    self.config = with_dp_size(self.config, dp_size)
                    forget(self.asked, event)
            self._monitor.applied(event, self.state, released.rows, partial(getattr, released, "tokens"))
            if released.refs:
                self.rows.release(released.refs)
            if topics := TOPICS.get(type(event)):
                effects.topics |= topics

    def _add_table(self, number: int, table: Steps, rows: list[int], effects: Effects) -> None:
        effects.tables[number] = table
        self.rows.add(number, to_stored(table) if self._has_rows_in_memory else None, len(table), rows)

    def _snapshot(self) -> Iterator[bytes] | None:
        # After a defect, events may be applied only in part.
        return None if self._is_lost else snapshot_of(self.state)

    # --- Waiting

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        """Calls `wake` once, when the condition is met; immediately if it is met already, or if the run accepts no
        calls."""
        has_room = condition.topic is Topic.ROOM and self.room().groups_of(str(condition.key)) > 0
        if self.closed is not None or self.is_lost or has_room or condition.is_met(self.state):
            wake()
        else:
            self.waiters.add(condition, wake)

    def ask(self, ranks: Collection[int], batch: int) -> None:
        """Records that policy ranks ask for a batch, so that the batches before it may count as trained."""
        later = {rank: batch for rank in ranks if batch > self.asked.get(rank, 0)}
        if later:
            self.asked |= later
            self.wake_for_room()

    def wake_for_room(self) -> None:
        """Wakes callers that wait for capacity, which other runs may have freed."""
        if self.waiters.waits_for(Topic.ROOM):
            self.waiters.wake_met([Topic.ROOM], self.state, self.room())

    # --- Limits

    def room(self) -> Room:
        """Returns the capacity for new groups."""
        room = admission.room(self.state, self.config, self._budget.left_for(self._name), self.asked)
        quota = self.quota()
        return room if quota is None else room.within(admission.quota_room(quota))

    def quota(self) -> Quota | None:
        """Returns the run's usage and limits; None if the service sets no limits."""
        limits = self._budget.limits_of_each
        if limits == NO_LIMITS:
            return None
        return Quota(self._usage(), limits, f"run {self._name!r} stores", "the service's max_run_{}", is_of_run=True)

    def bytes_left(self) -> BytesLeft:
        """Returns the bytes that rows of admitted groups may still use."""
        return admission.bytes_left(self.state, self.config, self._budget.most_for(self._name))

    def _usage(self) -> Usage:
        state = self.state
        return Usage(len(state.open) + state.groups_buffered, self.rows.needed, state.row_bytes)

    # --- The end

    @property
    def is_over(self) -> bool:
        """Whether the run is finished, every batch is freed, and no call waits."""
        return self.state.finished and not (self.state.batches or self.state.open or self.waiters)

    @property
    def is_lost(self) -> bool:
        """Whether the log has to be reopened, by this process or another."""
        return self._is_lost or self._log.is_lost

    def lose(self) -> None:
        """Marks the run as one that has to be reopened, and wakes all callers."""
        self._is_lost = True
        self.waiters.wake_all()

    @property
    def is_deleted(self) -> bool:
        return isinstance(self.closed, NotFoundError)

    def check_open(self, is_internal: bool = False) -> None:
        """Raises an error if the run accepts no calls, because it is closed or its log is lost."""
        closed = self.closed
        if closed is not None and not (is_internal and not isinstance(closed, NotFoundError)):
            raise type(closed)(*closed.args)
        if self._is_lost or self._log.is_lost:
            raise UnavailableError(f"run {self._name!r} is being recovered from its store; retry")

    def close(self, error: GristmillError) -> None:
        """Makes calls raise this error from now on, and wakes waiting callers. A deleted run stays deleted."""
        if not self.is_deleted:
            self.closed = error
        self.waiters.wake_all()

    def release(self) -> None:
        """After `close`: frees the memory of the state and the rows."""
        self._is_lost = True
        self.state, self.rows = State.initial(self.config), RowBuffer()
        self._budget.forget(self._name)
