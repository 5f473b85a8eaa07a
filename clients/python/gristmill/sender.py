"""The threads that send a blocking client's rows. Owns the lock around the outbox; decides nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import grpc

from gristmill import submission
from gristmill.delivery import Delivery, Entry, RowOutcome, outcomes_of, tables_of
from gristmill.deltas import LatestSteps
from gristmill.errors import FailedPreconditionError, GristmillError
from gristmill.outbox import Limits, Outbox
from gristmill.steps import Steps, TrajectoryKey
from gristmill.transport import Failure, Transport, failure_of

# One is enough for turns; the second writes a message while the first one's is under way.
_MOST_THREADS = 2


class Sender:
    """Thread-safe. Threads start with the rows that nobody waits for: who waits sends as they do."""

    def __init__(self, transport: Transport, run: str, limits: Limits) -> None:
        self._transport = transport
        self._run = run
        self._outbox = Outbox(limits, transport.timeout_s, transport.channels.count)
        self._latest = LatestSteps()
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._threads: list[threading.Thread] = []
        self._closing = False

    def send(self, tables: Iterable[Steps]) -> Delivery:
        """Blocks until every row of the tables has an outcome or an error. Few rows are sent without another thread,
        which would first have to wake up."""
        delivery = Delivery()
        try:
            for table in tables:
                with self._progress:
                    self._add(table, delivery)
                    self._outbox.hurry()
                    if self._outbox.is_half_full():
                        self._rouse()
        finally:
            self._help_until(lambda: not delivery.under_way)
        return delivery

    def put(self, table: Steps, delivery: Delivery) -> None:
        """Takes the rows over; blocks while too much is under way."""
        with self._progress:
            if self._add(table, delivery) or not self._threads:
                self._rouse()

    def wait(self, delivery: Delivery) -> None:
        """Blocks until every row of the delivery has an outcome or an error."""
        with self._progress:
            self._outbox.hurry()
        self._help_until(lambda: not delivery.under_way)

    def wait_for(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Blocks until what was put of the trajectories that are meant has an outcome or an error."""
        with self._progress:
            self._outbox.hurry()
        self._help_until(lambda: not self._outbox.is_sending(is_meant))

    def withdraw(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Takes back, as dropped, what is not being sent at this moment."""
        with self._progress:
            self._outbox.withdraw(is_meant)
            self._tell()

    def flush(self) -> None:
        """Blocks until everything put before has an outcome. Raises what was not told yet of rows not taken."""
        with self._progress:
            last = self._outbox.hurry()
        self._help_until(lambda: self._outbox.is_settled(last))
        with self._progress:
            error = self._outbox.tell_all()
        if error is not None:
            raise error

    def told(self, delivery: Delivery) -> GristmillError | None:
        """Why rows of the delivery were not taken. Who calls tells it, so that `flush` does not again."""
        if not delivery.failures:
            return None
        with self._progress:
            return self._outbox.tell(delivery)

    def close(self) -> None:
        """Ends the threads when everything is sent or given up. Idempotent; nothing may be put afterwards."""
        with self._progress:
            self._closing = True
            self._outbox.hurry()
            self._work.notify_all()
            self._progress.notify_all()
            threads, self._threads = self._threads, []
        if self._transport.process.is_here():
            for thread in threads:
                thread.join()

    def _rouse(self) -> None:
        """Has a thread look at what there is to send. With the lock held."""
        self._work.notify()
        if not self._threads or (self._outbox.is_full() and len(self._threads) < _MOST_THREADS):
            self._threads.append(threading.Thread(target=self._send_all, name="gristmill-sender", daemon=True))
            self._threads[-1].start()

    def _add(self, table: Steps, delivery: Delivery) -> bool:
        """Returns whether that may have made a message due earlier. With the lock held; waits for room."""
        self._transport.check_usable()
        self._progress.wait_for(lambda: self._closing or self._outbox.has_room(table))
        if self._closing:
            raise FailedPreconditionError("this RolloutClient is closed; make another")
        return self._outbox.add(table, delivery, time.monotonic())

    def _help_until(self, is_done: Callable[[], bool]) -> None:
        """Sends what is due until the condition holds, which is looked at with the lock held."""
        while entries := self._next(self._progress, is_done):
            self._send_and_tell(entries)

    def _send_all(self) -> None:
        while entries := self._next(self._work, lambda: self._closing and self._outbox.rows_under_way == 0):
            self._send_and_tell(entries)

    def _next(self, changed: threading.Condition, is_done: Callable[[], bool]) -> list[Entry]:
        """The next message once it is due; empty when there need be none."""
        with changed:
            while not is_done():
                now = time.monotonic()
                if entries := self._outbox.take(now):
                    # What is taken leaves room for more.
                    self._progress.notify_all()
                    return entries
                changed.wait(self._outbox.due_in(now))
        return []

    def _send_and_tell(self, entries: list[Entry]) -> None:
        try:
            outcomes = self._send(entries)
        except grpc.RpcError as call:
            self._report(entries, failure_of(call, self._transport.address))
        except Exception as error:  # noqa: BLE001  whatever it is, the rows' owners are told, and the others go on
            self._report(entries, Failure(GristmillError(f"{type(error).__name__}: {error}")))
        else:
            with self._progress:
                self._outbox.settle(entries, outcomes)
                self._tell()

    def _send(self, entries: list[Entry]) -> list[RowOutcome]:
        request = submission.encode(self._run, tables_of(entries), self._latest.prefixes(entries))
        timeout_s = self._outbox.attempt_s(entries, time.monotonic())
        return outcomes_of(self._transport.submit_rows(request, timeout=timeout_s), entries)

    def _report(self, entries: list[Entry], failure: Failure) -> None:
        with self._progress:
            self._outbox.refuse(entries, failure, time.monotonic())
            self._tell()

    def _tell(self) -> None:
        """Wakes who waits for these rows, and who may send the next. With the lock held."""
        self._progress.notify_all()
        self._work.notify(_MOST_THREADS if self._closing else 1)
