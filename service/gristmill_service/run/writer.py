"""The state of one run and its only writer: decides commands, applies their events, and queues them for the log.

Everything here happens on the event loop, so that nothing needs a lock. A command's events are applied at once; its
answer is given when the log has them (`Commits.safe`). Where the log does not take them, the run is lost: it is opened
again from the log, and whoever was answered nothing asks again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from gristmill._wire.steps import Steps
from gristmill.errors import GristmillError, NotFoundError, UnavailableError
from gristmill_service.access.held import ANY, Held, Quota
from gristmill_service.config import RunConfig, with_dp_size
from gristmill_service.run.commits import Commits
from gristmill_service.run.machine.codec import EncodedEvent, encode_event, encode_state
from gristmill_service.run.machine.commands.command import Command
from gristmill_service.run.machine.decisions import admission, progress, quotas, sealing
from gristmill_service.run.machine.decisions.admission import BytesLeft, Room
from gristmill_service.run.machine.events import (
    COLUMNS,
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    ColumnsWritten,
    Event,
    Resized,
    RowsStored,
)
from gristmill_service.run.machine.queries.conditions import Condition, Topic, topics_of
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.monitor import RunMonitor
from gristmill_service.run.row_budget import RowBudget
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.run.waiters import Waiters
from gristmill_service.storage.row_tables import Stored, held
from gristmill_service.storage.run_store import RunLog

T = TypeVar("T")

_COMPACT_AGAIN_S = 10.0


class SparseTable(NamedTuple):
    """A table on the heap of which at most half is needed. live: where each needed row is."""

    number: int
    stored: Stored
    live: dict[int, int]


@dataclass(slots=True)
class Effects:
    """The work that follows from applied events and is done in the background.

    builds: whether a batch is to be built. freed: batches whose shards are to be removed. empty: row tables that
    nothing needs. sealed, failed: batches to be logged.
    """

    builds: bool = False
    freed: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    sparse: list[SparseTable] = field(default_factory=list)
    sealed: list[BatchSealed] = field(default_factory=list)
    failed: list[BatchFailed] = field(default_factory=list)


class Writer:
    """The only one that changes the state.

    config: as it holds now; it begins as the run was created. now: the run's own time. closed: what every call raises,
    once the run is closed. on_effects: sees to the work that follows.
    """

    def __init__(
        self,
        name: str,
        state: State,
        rows: RowBuffer,
        config: RunConfig,
        log: RunLog,
        monitor: RunMonitor,
        budget: RowBudget,
        clock: Callable[[], float],
        now: Callable[[], float],
        threads: Executor,
    ) -> None:
        self.state, self.rows, self.waiters = state, rows, Waiters()
        self.config, self.now = with_dp_size(config, state.dp_size), now
        self.closed: GristmillError | None = None
        self.on_effects: Callable[[Effects], None] = lambda effects: None
        self.commits = Commits(log, threads, self.lose)
        self._name, self._log, self._monitor, self._budget, self._clock = name, log, monitor, budget, clock
        self._numbers = itertools.count(log.first_number)
        self._staged: dict[int, Steps] = {}
        self._is_lost = False
        self._compact_after = 0.0
        budget.hold(name, 0)

    # --- Commands

    def execute(self, command: Command[T]) -> T:
        """Decides the command and applies what follows. The answer is to be given when `commits` are safe."""
        self.check_open(command.is_internal)
        self._log.check(has_rows=False)
        decided = command.decide(self)
        if decided or command.follows:
            self._happen(decided, command)
        return command.answer(self.state)

    def begin(self, events: Sequence[Event]) -> None:
        """Applies what was found when the run was opened, and what is due."""
        self._happen(events, Command(), is_first=True)

    @contextmanager
    def staged(self, tables: Sequence[Steps]) -> Iterator[list[int]]:
        """Gives these tables numbers. Those that no event of the commands within it refers to are forgotten."""
        numbers = [next(self._numbers) for _ in tables]
        self._staged.update(zip(numbers, tables, strict=True))
        try:
            yield numbers
        finally:
            for number in numbers:
                self._staged.pop(number, None)

    def _happen(self, decided: Sequence[Event], command: Command[Any], *, is_first: bool = False) -> None:
        # What cannot be written is refused before anything has changed.
        encoded, tables = [encode_event(event) for event in decided], dict[int, Steps]()
        effects, happened = Effects(), list(decided)
        try:
            self._apply(decided, tables, effects)
            for following in self._following(decided, command, is_first):
                encoded += [encode_event(event) for event in following]
                self._apply(following, tables, effects)
                happened += following
        except BaseException:
            # A defect: nobody goes on with what is half applied.
            self.lose()
            raise
        if happened or is_first:
            self._finish(encoded, tables, effects, topics_of(happened))

    def _following(self, decided: Sequence[Event], command: Command[Any], is_first: bool) -> Iterator[list[Event]]:
        """Yields what follows from the events, then from what followed, once that is applied."""
        happened: list[Event] | None = None if is_first else [*decided]
        if command.follows and (followed := command.follow(self.state)):
            happened = None if happened is None else [*happened, *followed]
            yield [*followed]
        while following := sealing.due(self.state, self.config, happened) or progress.freed(self.state):
            yield following
            happened = following

    def _apply(self, events: Sequence[Event], tables: dict[int, Steps], effects: Effects) -> None:
        for event in events:
            for number, rows in _tables(event):
                tables[number] = table = self._staged.pop(number)
                is_held = self._log.is_remote or not self._log.reads_rows
                self.rows.add(number, held(table) if is_held else None, len(table), rows)
            released = apply(self.state, event)
            self._monitor.applied(event, self.state, released.rows, partial(getattr, released, "tokens"))
            if released.refs:
                self.rows.release(released.refs)
            self._note_effect(event, effects)

    def _note_effect(self, event: Event, effects: Effects) -> None:
        match event:
            case BatchSealed():
                effects.sealed.append(event)
                effects.builds = True
            case BatchPublished(batch, awaits=()) if self._log.reads_rows:
                self.rows.unload({ref.table for ref in self.state.batches[batch].refs()})
            case ColumnsWritten(batch):
                effects.builds = effects.builds or self.state.is_written(batch)
            case BatchFreed(batch) | BatchGivenUp(batch):
                effects.freed.append(batch)
            case BatchFailed():
                effects.failed.append(event)
            case BatchWithdrawn():
                effects.builds = True
            case Resized(dp_size):
                self.config = with_dp_size(self.config, dp_size)

    def _finish(
        self, encoded: list[EncodedEvent], tables: dict[int, Steps], effects: Effects, topics: set[Topic]
    ) -> None:
        if encoded:
            self.commits.add(encoded, tables)
        if self._log.is_long and self._clock() >= self._compact_after:
            self._compact_after = self._clock() + _COMPACT_AGAIN_S
            self.commits.compact(self._snapshot)
        self._budget.hold(self._name, admission.row_bytes_promised(self.state), self._held())
        if topics:
            room = self.room()
            self._monitor.changed(self.state, room)
            _wake(self.waiters.take_met(topics, self.state, room))
        effects.empty = self.rows.take_empty()
        effects.sparse = [SparseTable(*one) for one in self.rows.take_sparse()]
        self.on_effects(effects)

    def _snapshot(self) -> bytes | None:
        # After a defect the state may be half applied.
        return None if self._is_lost else encode_state(self.state)

    # --- Waiting

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        """Has `wake` called once, when the condition is met; at once where it is already, or where the run takes no
        calls."""
        if self.closed is not None or self.is_lost or self._is_met(condition):
            wake()
        else:
            self.waiters.add(condition, wake)

    def wake_all(self) -> None:
        """Wakes every caller that waits: it finds that the run is closed or lost."""
        _wake(self.waiters.take_all())

    def wake_for_room(self) -> None:
        """Wakes the callers for which other runs have given room back."""
        if self.waiters.waits_for(Topic.ROOM):
            _wake(self.waiters.take_met([Topic.ROOM], self.state, self.room()))

    def _is_met(self, condition: Condition) -> bool:
        is_room = condition.topic is Topic.ROOM and self.room().groups_of(str(condition.key)) > 0
        return is_room or condition.is_met(self.state)

    # --- Limits

    def room(self) -> Room:
        """Groups that may be admitted now."""
        room = admission.room(self.state, self.config, self._budget.left_for(self._name))
        quota = self.quota()
        return room if quota is None else room.within(quotas.room(quota))

    def quota(self) -> Quota | None:
        """What the service lets a run hold, and what this one holds; None where it sets no limit."""
        most = self._budget.most_a_run
        if most == ANY:
            return None
        return Quota(self._held(), most, f"run {self._name!r} holds", "the service's max_run_{}", is_of_run=True)

    def bytes_left(self) -> BytesLeft:
        """Bytes that rows of groups which are admitted may still take."""
        return admission.bytes_left(self.state, self.config, self._budget.most_for(self._name))

    def _held(self) -> Held:
        state = self.state
        return Held(len(state.open) + state.groups_buffered, self.rows.needed, state.row_bytes)

    # --- The end

    @property
    def is_lost(self) -> bool:
        """Whether the log has to be opened again, here or elsewhere."""
        return self._is_lost or self._log.is_lost

    def lose(self) -> None:
        """From now on the run is to be opened again."""
        self._is_lost = True
        self.wake_all()

    @property
    def is_deleted(self) -> bool:
        return isinstance(self.closed, NotFoundError)

    def check_open(self, is_internal: bool = False) -> None:
        """Raises where the run takes no calls: it is closed, or its log is lost."""
        closed = self.closed
        if closed is not None and not (is_internal and not isinstance(closed, NotFoundError)):
            raise type(closed)(*closed.args)
        if self.is_lost:
            raise UnavailableError(f"run {self._name!r} is being read again from its store; retry")

    def close(self, error: GristmillError) -> None:
        """Calls raise this error from now on, and those that wait are woken to find it. A deleted run stays so."""
        if not self.is_deleted:
            self.closed = error
        self.wake_all()

    def release(self) -> None:
        """After `close`: gives back the memory of the state and the rows."""
        self._is_lost = True
        self.state, self.rows = State.initial(self.config), RowBuffer()
        self._budget.forget(self._name)


def _tables(event: Event) -> Iterable[tuple[int, list[int]]]:
    """The tables that the event is the first to refer to, with the rows of each."""
    match event:
        case RowsStored(rows):
            return [(rows[0].ref.table, [row.ref.row for row in rows])]
        case ColumnsWritten(_, columns):
            return [(column.table, [COLUMNS]) for column in columns.values()]
    return []


def _wake(wakes: Iterable[Callable[[], None]]) -> None:
    for wake in wakes:
        wake()
