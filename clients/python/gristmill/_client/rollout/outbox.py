"""Schedules rows: decides which rows are sent next, which are sent again and when, and records the outcome of each.

A state machine without threads, clock or I/O. The sender drives it: it sends `next_message`, and reports the result to
`on_outcomes` or `on_failure`. Several messages may be in flight at a time, but only one per trajectory, so that its
rows arrive in order. After a failure, only one message is in flight until one succeeds. Every row gets an outcome or an
error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf

from gristmill._client.connection.failures import Failure, with_message
from gristmill._client.connection.retries import Backoff
from gristmill._client.rollout.delivery import (
    WHOLE,
    Delivery,
    Group,
    PendingRow,
    Prefix,
    RowOutcome,
    error_of,
    form_of,
    row_sizes,
)
from gristmill._wire.codecs.submit_codec import MESSAGE_BYTES
from gristmill._wire.columns import Int64s
from gristmill._wire.named_tuples import made_of
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import (
    DeadlineExceededError,
    GristmillError,
    InvalidArgumentError,
    PrefixUnknownError,
    TooLargeError,
)

# A message is slightly larger than the buffers of its rows.
_MESSAGE_RESERVE = 64 << 10
# A constant, because looking up an enum member is slow.
_ACCEPTED = RowOutcome.ACCEPTED
# The number of rows that are searched for a row whose trajectory has no message in flight.
_LOOK_AHEAD = 64


@dataclass(slots=True)
class _Parked:
    """A group for which the service has no capacity now. not_before: infinite while some of its rows are being sent."""

    entries: deque[PendingRow]
    backoff: Backoff
    not_before: float = inf


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one message, how long a row waits for others to share it, and the maximum number of queued messages."""

    message_rows: int
    message_bytes: int
    linger_s: float
    queue_messages: int = 8


class Outbox:
    def __init__(self, limits: Limits, timeout_s: float, replicas: int = 1) -> None:
        self._limits = limits
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._fresh: deque[PendingRow] = deque()
        self._fresh_bytes = 0
        self._again: deque[list[PendingRow]] = deque()
        self._parked: dict[Group, _Parked] = {}
        self._outage = Backoff(replicas)
        self._pause_until = 0.0
        self._last_number = 0
        self._urgent_number = 0
        self._pending: dict[int, PendingRow] = {}
        self._messages = 0
        self._being_sent: set[TrajectoryKey] = set()
        self._unreported: dict[int, Delivery] = {}

    # For producers.

    def _check_sizes(self, table: Steps) -> Int64s:
        """Returns the bytes of each row on the wire. Raises InvalidArgumentError for a row that exceeds a message."""
        sizes = row_sizes(table)
        most = MESSAGE_BYTES - _MESSAGE_RESERVE
        if len(sizes) and int(sizes.max()) > most:
            row = int(sizes.argmax())
            raise InvalidArgumentError(
                f"{table.name(row)}: the row has {sizes[row]} bytes, and the limit of a message is {most}; shorten its "
                "prompt, response or columns"
            )
        return sizes

    def has_room(self, table: Steps) -> bool:
        """Returns whether the rows may be added now. Returns False while the service has no capacity for one of their
        groups, which throttles only the producers that are ahead of the trainer."""
        many = self._limits.queue_messages
        if len(self._fresh) >= many * self._limits.message_rows:
            return False
        if self._fresh_bytes >= many * self._limits.message_bytes:
            return False
        return not self._parked or not any(table.key(row)[:2] in self._parked for row in range(len(table)))

    def add(self, table: Steps, delivery: Delivery, now: float, prefix: Prefix | None = None) -> bool:
        """Appends the rows. Returns whether the sender must check for a due message. prefix: as in `PendingRow`."""
        form, sizes, was_empty = form_of(table), self._check_sizes(table).tolist(), not self._fresh
        keys = made_of(TrajectoryKey, table.rounds.tolist(), table.uids, table.samples.tolist())
        first, index = self._last_number + 1, len(delivery.outcomes)
        entries = [
            PendingRow(table, row, key, form, size, delivery, index + row, first + row, now, inf, prefix)
            for row, (key, size) in enumerate(zip(keys, sizes, strict=True))
        ]
        delivery.outcomes += [None] * len(entries)
        delivery.pending += len(entries)
        self._last_number += len(entries)
        self._pending.update(zip(range(first, first + len(entries)), entries, strict=True))
        self._fresh += entries
        self._fresh_bytes += sum(sizes)
        return was_empty or self._is_full()

    @property
    def pending_rows(self) -> int:
        return len(self._pending)

    def flush(self) -> int:
        """Makes all queued rows due now. Returns the number of the last row, for `is_concluded`."""
        self._urgent_number = self._last_number
        return self._last_number

    def is_concluded(self, number: int) -> bool:
        """Returns whether every row up to this number has an outcome or an error."""
        return not self._pending or next(iter(self._pending)) > number

    def is_sending(self, is_meant: Callable[[TrajectoryKey], bool]) -> bool:
        """Returns whether a row of the matching trajectories has no outcome or error yet."""
        return any(is_meant(entry.key) for entry in self._pending.values())

    def withdraw(self, is_meant: Callable[[PendingRow], bool]) -> None:
        """Drops the matching rows that are not being sent now."""
        withdrawn = self._extract(is_meant)
        for entry in withdrawn:
            self._conclude(entry, RowOutcome.DROPPED)
        self._release(withdrawn)

    def abandon(self, error: GristmillError) -> None:
        """Fails all pending rows. No message may be sent afterwards."""
        entries = [*self._pending.values()]
        self._extract(lambda entry: True)
        self._fail(entries, error)

    def take_error(self, delivery: Delivery) -> GristmillError | None:
        """Returns the error of the delivery's rows, if any. `take_errors` then omits it, so that each error is raised
        once."""
        self._unreported.pop(id(delivery), None)
        return error_of(delivery.failures) if delivery.failures else None

    def take_errors(self) -> GristmillError | None:
        """Returns one error for all deliveries whose errors were not returned yet; None if there are none."""
        failures = {key: error for delivery in self._unreported.values() for key, error in delivery.failures.items()}
        self._unreported.clear()
        return error_of(failures) if failures else None

    # For the sender.

    def next_message(self, now: float) -> list[PendingRow]:
        """Returns the rows of the next message, all of one form. Returns no rows if no message is due, or if the next
        message must wait for an answer."""
        if now < self._pause_until or self._is_blocked():
            return []
        entries = self._again.popleft() if self._again else self._take_parked(now) or self._take_fresh(now)
        expires = now + self._timeout_s
        for entry in entries:
            if entry.expires > expires:
                entry.expires = expires
            self._being_sent.add(entry.key)
        self._messages += bool(entries)
        return entries

    def attempt_s(self, entries: Sequence[PendingRow], now: float) -> float:
        """Returns the timeout of an attempt to send these rows."""
        return self._outage.attempt_s(min(entry.expires for entry in entries) - now)

    def due_in(self, now: float) -> float | None:
        """Returns the seconds until the next message is due; None if there is no message, or if it must wait for an
        answer."""
        if self._is_blocked():
            return None
        times = [parked.not_before for parked in self._parked.values()]
        if self._again:
            times.append(now)
        if first := self._first_free():
            times.append(now if self._is_full() or self._is_urgent(first) else first.added + self._limits.linger_s)
        soonest = min(times, default=inf)
        return None if soonest == inf else max(soonest, self._pause_until) - now

    def on_outcomes(self, entries: Sequence[PendingRow], outcomes: Sequence[RowOutcome | Failure], now: float) -> None:
        """Handles the service's answer to a message, which is an outcome or an error for each row. Refused rows fail,
        or are parked with their group if the service has no capacity."""
        self._returned(entries)
        self._outage = Backoff(self._replicas)
        refused: dict[tuple[object, ...], tuple[list[PendingRow], Failure]] = {}
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, RowOutcome):
                self._conclude(entry, outcome)
            else:
                refused.setdefault(entry.group if outcome.may_retry else entry.key, ([], outcome))[0].append(entry)
        self._release(entry for entry in entries if entry.number not in self._pending)
        for rows, failure in refused.values():
            if left := self._left(rows, failure, now):
                self._park(left, failure, now)

    def on_failure(self, entries: list[PendingRow], failure: Failure, now: float) -> None:
        """Handles the failure of a message, of which the service stored nothing: sends the rows again later, or fails
        them."""
        self._returned(entries)
        if isinstance(failure.error, PrefixUnknownError) and any(entry.prefix != WHOLE for entry in entries):
            for entry in entries:
                entry.prefix = WHOLE
            self._again.appendleft(entries)
        elif isinstance(failure.error, TooLargeError) and len(entries) > 1:
            middle = len(entries) // 2
            self._again.extendleft((entries[middle:], entries[:middle]))
        elif left := self._left(entries, failure, now):
            self._pause_until = self._next_attempt(left, self._outage, failure, now)
            self._again.appendleft(left)

    def _left(self, entries: list[PendingRow], failure: Failure, now: float) -> list[PendingRow]:
        """Returns the rows that are sent again after this failure, and fails the others."""
        error = reason = failure.error
        expired = [entry for entry in entries if entry.expires <= now]
        if not failure.may_retry:
            self._fail(entries, error)
        elif expired:
            if isinstance(error, DeadlineExceededError):
                # The rows' timeout ended the last attempt. The error of an earlier answer says more.
                reason = next((entry.refusal for entry in expired if entry.refusal), error)
            self._fail(expired, with_message(reason, f"{reason} (gave up after {self._timeout_s:g} s)"))
        if not isinstance(error, DeadlineExceededError):
            for entry in entries:
                entry.refusal = error
        return [entry for entry in entries if entry.number in self._pending]

    def _fail(self, entries: Sequence[PendingRow], error: GristmillError) -> None:
        """Fails the rows, and later rows of their trajectories, which are useless without them."""
        lost = {(entry.key, id(entry.delivery)) for entry in entries}
        followers = self._extract(lambda entry: (entry.key, id(entry.delivery)) in lost)
        for entry in (*entries, *followers):
            self._pending.pop(entry.number, None)
            entry.delivery.pending -= 1
            entry.delivery.failures.setdefault(entry.key, error)
            self._unreported[id(entry.delivery)] = entry.delivery
        self._release(entries)

    def _is_blocked(self) -> bool:
        """Returns whether the next message must wait for the answer to a message in flight."""
        if not self._messages:
            return False
        if self._again or self._parked:
            return True
        return bool(self._fresh) and self._first_free() is None

    def _first_free(self) -> PendingRow | None:
        """Returns the first queued row whose trajectory has no message in flight, among the first _LOOK_AHEAD rows."""
        return next((entry for entry in islice(self._fresh, _LOOK_AHEAD) if entry.key not in self._being_sent), None)

    def _returned(self, entries: Sequence[PendingRow]) -> None:
        self._messages -= bool(entries)
        self._being_sent.difference_update(entry.key for entry in entries)

    def _take_fresh(self, now: float) -> list[PendingRow]:
        first = self._first_free()
        if first is None:
            return []
        if not (self._is_full() or self._is_urgent(first) or first.added + self._limits.linger_s <= now):
            return []
        # Rows of trajectories with a message in flight stay queued, so that the rows of a trajectory stay in order.
        passed = list[PendingRow]()
        while self._fresh[0].key in self._being_sent:
            passed.append(self._fresh.popleft())
        taken = self._fill(self._fresh)
        self._fresh.extendleft(reversed(passed))
        self._fresh_bytes -= sum(entry.size for entry in taken)
        return taken

    def _take_parked(self, now: float) -> list[PendingRow]:
        for parked in self._parked.values():
            if parked.not_before <= now:
                parked.not_before = inf
                return self._fill(parked.entries)
        return []

    def _fill(self, source: deque[PendingRow]) -> list[PendingRow]:
        """Removes and returns as many rows of one form as fit into a message, at least one."""
        taken, room = [source.popleft()], self._limits.message_bytes
        room -= taken[0].size
        while source and len(taken) < self._limits.message_rows:
            following = source[0]
            if following.size > room or following.form != taken[0].form or following.key in self._being_sent:
                break
            is_next_table = following.table is not taken[-1].table and len(following.table) > 1
            if is_next_table and _left_of_table(source) > room:
                # Sending a part of a table would copy its columns.
                break
            room -= following.size
            taken.append(source.popleft())
        return taken

    def _is_full(self) -> bool:
        """Returns whether the queued rows fill a message."""
        return len(self._fresh) >= self._limits.message_rows or self._fresh_bytes >= self._limits.message_bytes

    def _is_urgent(self, entry: PendingRow) -> bool:
        return entry.number <= self._urgent_number

    def _park(self, entries: list[PendingRow], failure: Failure, now: float) -> None:
        """Parks the rows of a group for which there is no capacity."""
        group = entries[0].group
        parked = self._parked.setdefault(group, _Parked(deque(), Backoff()))
        waiting = (*entries, *parked.entries, *self._extract(lambda entry: entry.group == group, parked=False))
        # If a message was too large, its second half may arrive here after rows that follow it.
        parked.entries = deque(sorted(waiting, key=lambda entry: entry.number))
        for entry in parked.entries:
            entry.expires = min(entry.expires, now + self._timeout_s)
        parked.not_before = self._next_attempt(entries, parked.backoff, failure, now)

    @staticmethod
    def _next_attempt(entries: Sequence[PendingRow], backoff: Backoff, failure: Failure, now: float) -> float:
        """Returns the time of the next attempt. The last attempt is made when the first row expires."""
        pause_s = backoff.pause_s(failure.pushback_s, is_of_replica=failure.is_of_replica)
        return min(now + pause_s, min(entry.expires for entry in entries))

    def _release(self, entries: Iterable[PendingRow]) -> None:
        """Queues the rows of parked groups again, after rows of these groups were accepted or failed."""
        if self._parked:
            for group in {entry.group for entry in entries} & self._parked.keys():
                rest = self._parked.pop(group).entries
                while rest:
                    self._again.append(self._fill(rest))

    def _conclude(self, entry: PendingRow, outcome: RowOutcome) -> None:
        self._pending.pop(entry.number, None)
        entry.delivery.pending -= 1
        entry.delivery.outcomes[entry.index] = outcome
        if outcome is not _ACCEPTED:
            entry.delivery.is_kept &= outcome.is_stored

    def _extract(self, is_meant: Callable[[PendingRow], bool], *, parked: bool = True) -> list[PendingRow]:
        """Removes and returns the matching queued rows, in order."""
        extracted: list[PendingRow] = []

        def rest_of(entries: Iterable[PendingRow]) -> list[PendingRow]:
            rest: list[PendingRow] = []
            for entry in entries:
                (extracted if is_meant(entry) else rest).append(entry)
            return rest

        if parked:
            for waiting in self._parked.values():
                waiting.entries = deque(rest_of(waiting.entries))
            self._parked = {group: w for group, w in self._parked.items() if w.entries or w.not_before == inf}
        self._again = deque(rest for message in self._again if (rest := rest_of(message)))
        self._fresh = deque(rest_of(self._fresh))
        self._fresh_bytes = sum(entry.size for entry in self._fresh)
        return extracted


def _left_of_table(source: deque[PendingRow]) -> int:
    """Returns the total bytes of the rows at the front of the queue that are of the first row's table."""
    table = source[0].table
    return sum(entry.size for entry in takewhile(lambda entry: entry.table is table, source))
