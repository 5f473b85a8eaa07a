"""One writer a run: commands are decided in turn, logged together, applied, and answered.

A thread that brings a command becomes the writer where nobody is. Where somebody is, it waits; its command is then
taken together with the others that came meanwhile, and logged with them in one append (group commit by leader and
followers, as in LevelDB's write queue; docs/decisions/0005). So the log's round trip is paid once for many calls, and
a run without load pays for no thread of its own.

`lock` guards the state, the rows and the waiters while they change and while others read them. It is never held during
I/O. Everything else here belongs to the writer alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import GristmillError, InvalidArgumentError, NotFoundError, UnavailableError
from gristmill_service.access.held import ANY, Held, Quota
from gristmill_service.call_threads import waiting
from gristmill_service.config import RunConfig, with_dp_size
from gristmill_service.run.machine.codec import encode_events, encode_state
from gristmill_service.run.machine.commands.command import Command
from gristmill_service.run.machine.decisions import admission, progress, quotas, sealing
from gristmill_service.run.machine.decisions.admission import BytesLeft, Room
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
    Resized,
    RewardsSet,
    RowsStored,
)
from gristmill_service.run.machine.queries.conditions import Condition, Topic, topics_of
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.run.writing.effects import Effects, SparseTable
from gristmill_service.run.writing.monitor import RunMonitor
from gristmill_service.run.writing.row_budget import RowBudget
from gristmill_service.run.writing.ticket import Ticket
from gristmill_service.run.writing.waiters import Waiters
from gristmill_service.storage.row_tables import Stored
from gristmill_service.storage.run_store import LogLostError, RunLog

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_COMPACT_AGAIN_S = 10.0
_MOST_AT_ONCE = 512
# Events that change nothing but what their command's keys name.
_OWN_KEYS_ONLY = frozenset([RowsStored, RewardsSet, Acknowledged])


class Staged(NamedTuple):
    """A table that was put, and how many rows it has."""

    stored: Stored
    rows: int


class Writer:
    """The only one that changes the state. Thread-safe.

    config: as the run was created; the attribute is what holds now. now: the run's own time. staged: tables that were
    put and are not accepted yet, by number. closed: what every call raises, once the run is closed.
    """

    def __init__(
        self,
        name: str,
        state: State,
        config: RunConfig,
        log: RunLog,
        monitor: RunMonitor,
        budget: RowBudget,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.lock = threading.Lock()
        self.state, self.rows, self.waiters = state, RowBuffer(compacts=not log.maps_rows), Waiters()
        self.config, self.now = with_dp_size(config, state.dp_size), now
        self.staged: dict[int, Staged] = {}
        self.closed: GristmillError | None = None
        self._name, self._log, self._monitor, self._budget, self._clock = name, log, monitor, budget, clock
        self._inbox: deque[Ticket[Any]] = deque()
        self._inbox_lock = threading.Lock()
        self._has_writer = False
        self._effects = Effects()
        self._is_lost = False
        # Whether events are due that the log could not take when they became so.
        self.owes = False
        self._compact_after = 0.0
        budget.hold(name, 0)

    # --- From any thread

    def execute(self, command: Command[T]) -> tuple[Ticket[T], Effects | None]:
        """Has the command decided, logged and applied. Returns its ticket, done, and the effects that the calling
        thread must see to, where it was the writer."""
        ticket = Ticket(command)
        with self._inbox_lock:
            self._inbox.append(ticket)
            is_writer = not self._has_writer
            self._has_writer = True
        if is_writer or _is_next(ticket):
            return ticket, self._write(ticket)
        return ticket, None

    def stage(self, table: Steps) -> int:
        """Puts a table into the log, for an event that refers to it. Returns its number."""
        number, stored = self._log.put(table)
        self.staged[number] = Staged(stored, len(table))
        return number

    def unstage(self, numbers: Iterable[int]) -> None:
        """Removes those of these tables that no event refers to. Where the log is lost, one may."""
        unused = [number for number in numbers if self.staged.pop(number, None) is not None]
        if unused and not self.is_lost:
            self._log.remove(unused)

    def read(self, function: Callable[[State, RowBuffer], T]) -> T:
        """Reads the state and the rows for a moment."""
        with self.lock:
            return function(self.state, self.rows)

    def take_waiters(self) -> list[Callable[[], None]]:
        """The callers to wake because the run is lost: they find it when they read."""
        with self.lock:
            return self.waiters.take_all()

    def leave_tables(self, numbers: Iterable[int]) -> None:
        """Leaves these tables to the log, which is asked for them when they are needed again."""
        with self.lock:
            self.rows.unload(numbers)

    def replace_rows(self, table: SparseTable, copy: Stored, index: dict[int, int]) -> None:
        """Holds a copy in place of a sparse table. index: where each row is in the copy."""
        with self.lock:
            self.rows.replace(table.number, table.stored, copy, index)

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        """Has `wake` called once, from any thread, when the condition is met; at once where it is already, or where
        the run takes no calls."""
        with self.lock:
            is_over = self.closed is not None or self.is_lost or self._is_met(condition)
            if not is_over:
                self.waiters.add(condition, wake)
        if is_over:
            wake()

    def stop_waiting(self, condition: Condition, wake: Callable[[], None]) -> None:
        with self.lock:
            self.waiters.remove(condition, wake)

    @property
    def waits_for_room(self) -> bool:
        return self.waiters.waits_for(Topic.ROOM)

    def take_who_wait_for_room(self) -> list[Callable[[], None]]:
        """The callers to wake where there is room now."""
        if not self.waits_for_room:
            return []
        with self.lock:
            return self.waiters.take_met([Topic.ROOM], self.state, self.room())

    def _is_met(self, condition: Condition) -> bool:
        is_room = condition.topic is Topic.ROOM and self.room().groups_of(str(condition.key)) > 0
        return is_room or condition.is_met(self.state)

    def room(self) -> Room:
        """Groups that may be admitted now. For the writer, or with the lock held."""
        found = admission.room(self.state, self.config, self._budget.left_for(self._name))
        quota = self.quota()
        return found if quota is None else found.within(quotas.room(quota))

    def quota(self) -> Quota | None:
        """What the service lets a run hold, and what this one does; None where it sets no limit. For the writer, or
        with the lock held."""
        most = self._budget.most_a_run
        if most == ANY:
            return None
        return Quota(self._held(), most, f"run {self._name!r} holds", "the service's max_run_{}", is_of_run=True)

    def _held(self) -> Held:
        state = self.state
        return Held(len(state.open) + state.groups_buffered, self.rows.needed, state.row_bytes)

    def bytes_left(self) -> BytesLeft:
        """Bytes that rows of groups which are admitted may still take. For the writer."""
        return admission.bytes_left(self.state, self.config, self._budget.most_for(self._name))

    def close(self, error: GristmillError) -> list[Callable[[], None]]:
        """Commands raise this error from now on. Returns the callers to wake, who find it. A deleted run stays so."""
        with self.lock:
            if not isinstance(self.closed, NotFoundError):
                self.closed = error
            return self.waiters.take_all()

    def let_go(self) -> None:
        """After `close`, when no command is under way: gives back the memory of the state and the rows."""
        with self.lock:
            self._is_lost = True
            self.state = State.initial(self.config)
            self.rows = RowBuffer(compacts=False)
        # Not before: a command that was under way when the run was closed has promised room to its rows.
        self._budget.forget(self._name)

    @property
    def is_lost(self) -> bool:
        """Whether the log has to be opened anew, here or elsewhere."""
        return self._is_lost or self._log.is_lost

    def lose(self) -> None:
        """From now on the log has to be opened anew."""
        self._is_lost = True

    def check_open(self, is_internal: bool = False) -> None:
        """Raises where the run takes no calls: it is closed, or its log is lost."""
        closed = self.closed
        if closed is not None and not (is_internal and not isinstance(closed, NotFoundError)):
            raise type(closed)(*closed.args)
        if self.is_lost:
            raise UnavailableError(f"run {self._name!r} is being read again from its store; ask again")

    # --- From the writer

    def begin(self, events: Sequence[Event]) -> Effects:
        """Logs and applies what is found when the run is opened, before there are calls."""
        self._append(events)
        self.owes = True
        self._append_following([])
        return self._take_effects()

    def _write(self, own: Ticket[Any]) -> Effects:
        """Sees one round of commands through, its own first, and makes the next in line the writer."""
        tickets = self._take_tickets()
        try:
            tickets = self._decide(tickets)
            self._commit(tickets)
            return self._take_effects()
        except BaseException as error:
            # A defect: nobody may wait for ever, and nothing that is half applied may be gone on with.
            self._is_lost = True
            for ticket in tickets:
                ticket.error = ticket.error or UnavailableError(f"run {self._name!r} is being read anew: {error!r}")
            for wake in (*self._effects.wakes, *self.take_waiters()):
                wake()
            raise
        finally:
            self._hand_over(tickets, own)

    def _take_tickets(self) -> list[Ticket[Any]]:
        with self._inbox_lock:
            return [self._inbox.popleft() for _ in range(min(len(self._inbox), _MOST_AT_ONCE))]

    def _hand_over(self, done: list[Ticket[Any]], own: Ticket[Any]) -> None:
        with self._inbox_lock:
            following = self._inbox[0] if self._inbox else None
            self._has_writer = following is not None
        if following is not None:
            following.signal.put(True)
        for ticket in done:
            if ticket is not own:
                ticket.signal.put(False)

    def _decide(self, tickets: list[Ticket[Any]]) -> list[Ticket[Any]]:
        """Decides as many commands, in order, as do not depend on each other. Gives the others back to the inbox."""
        touched: set[Hashable] = set()
        has_events = False
        for count, ticket in enumerate(tickets):
            keys = ticket.command.keys
            if count and (keys is None or not touched.isdisjoint(keys)):
                return self._give_back(tickets, count)
            try:
                self.check_open(ticket.command.is_internal)
                events = ticket.command.decide(self)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is its caller's to handle
                # A refusal's traceback would hold this frame, which holds the ticket, which holds the refusal.
                ticket.error = error.with_traceback(None) if isinstance(error, GristmillError) else error
                continue
            is_alone = keys is None or not all(type(event) in _OWN_KEYS_ONLY for event in events)
            if is_alone and has_events:
                return self._give_back(tickets, count)
            ticket.events = events
            if is_alone:
                return self._give_back(tickets, count + 1)
            assert keys is not None
            touched |= keys
            has_events = has_events or bool(events)
        return tickets

    def _give_back(self, tickets: list[Ticket[Any]], count: int) -> list[Ticket[Any]]:
        with self._inbox_lock:
            self._inbox.extendleft(reversed(tickets[count:]))
        return tickets[:count]

    def _commit(self, tickets: list[Ticket[Any]]) -> None:
        events = [event for ticket in tickets for event in ticket.events]
        try:
            self._append(events)
        except (UnavailableError, InvalidArgumentError) as error:
            _refuse([ticket for ticket in tickets if ticket.events or ticket.command.follows], error)
        else:
            self._follow(tickets, events)
        for ticket in tickets:
            if ticket.error is None:
                ticket.value = ticket.command.answer(self.state)

    def _follow(self, tickets: list[Ticket[Any]], events: list[Event]) -> None:
        followed = [ticket for ticket in tickets if ticket.command.follows and ticket.error is None]
        if followed:
            found = [event for ticket in followed for event in ticket.command.follow(self.state)]
            try:
                # Ranks that acknowledge together commit the same position.
                self._append(unique := list(dict.fromkeys(found)))
                events += unique
            except UnavailableError as error:
                _refuse(followed, error)
        if events or self.owes:
            self._append_following(events)

    def _append_following(self, events: Sequence[Event]) -> None:
        """Logs and applies what follows from these events, and what was due before. What the log does not take now
        becomes due again with the next command: it follows from the state alone."""
        happened = None if self.owes else events
        try:
            while following := sealing.due(self.state, self.config, happened) or progress.freed(self.state):
                self._append(following)
                happened = following
            self.owes = False
        except UnavailableError:
            self.owes = True
        self._budget.hold(self._name, admission.row_bytes_promised(self.state), self._held())

    def _append(self, events: Sequence[Event]) -> None:
        """Logs and applies all of the events, or none: raises UnavailableError, or InvalidArgumentError, then."""
        if not events:
            return
        tables = [_tables(event) for event in events]
        try:
            self._log.append(encode_events(events), [number for found in tables for number, _ in found])
        except LogLostError:
            self._is_lost = True
            self._effects.wakes += self.take_waiters()
            raise
        topics = topics_of(events)
        with self.lock:
            for event, brought in zip(events, tables, strict=True):
                self._apply(event, brought)
            if topics:
                self._note_change(topics)
        if self._log.is_long and self._clock() >= self._compact_after:
            self._compact()

    def _apply(self, event: Event, tables: Iterable[tuple[int, list[int]]]) -> None:
        for number, rows in tables:
            self.rows.add(number, *self.staged.pop(number), rows)
        released = apply(self.state, event)
        self._monitor.applied(event, self.state, released.rows, lambda: released.tokens)
        if released.refs:
            self.rows.release(released.refs)
        effects = self._effects
        match event:
            case BatchSealed():
                effects.sealed.append(event)
                effects.builds = True
            case BatchPublished(batch, awaits=()) if self._log.reads_rows and not self._log.maps_rows:
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

    def _note_change(self, topics: set[Topic]) -> None:
        room = self.room()
        self._monitor.changed(self.state, room)
        self._effects.wakes += self.waiters.take_met(topics, self.state, room)

    def _take_effects(self) -> Effects:
        effects, self._effects = self._effects, Effects()
        with self.lock:
            effects.empty = self.rows.take_empty()
            effects.sparse = [SparseTable(*found) for found in self.rows.take_sparse()]
        return effects

    def _compact(self) -> None:
        try:
            self._log.compact(encode_state(self.state))
        except LogLostError:
            self._is_lost = True
        except UnavailableError as error:
            # The log stays as it is, only longer. Writing the whole state takes a while.
            self._compact_after = self._clock() + _COMPACT_AGAIN_S
            _log.warning("log not compacted", run=self._name, reason=str(error))


def _tables(event: Event) -> list[tuple[int, list[int]]]:
    """The tables that the event is the first to refer to, and what of each."""
    match event:
        case RowsStored(rows):
            return [(rows[0].ref.table, [row.ref.row for row in rows])]
        case ColumnsWritten(_, columns):
            return [(column.table, [COLUMNS]) for column in columns.values()]
    return []


def _is_next(ticket: Ticket[Any]) -> bool:
    """Waits until the ticket's command is done, or its thread to be the writer."""
    with waiting():
        return ticket.signal.get()


def _refuse(tickets: Sequence[Ticket[Any]], error: Exception) -> None:
    """Each caller raises an error of its own: one object would gather the frames of all of them."""
    for ticket in tickets:
        ticket.error = copy(error)
