"""What sends a blocking client's rows: a thread, and who waits. Owns the lock around the outbox."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from gristmill._client.delivery import Delivery, Entry, outcomes_of
from gristmill._client.outbox import Limits, Outbox
from gristmill._client.prefix_dedup import Packing
from gristmill._client.sigint import Uninterrupted
from gristmill._client.transport import Failure, Transport, failure_of
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import FailedPreconditionError, GristmillError, UnavailableError

Calls = deque[tuple[list[Entry], Callable[[], Any]]]
"""Those under way, with what waits for their answers."""

# The next are written and sent while the service reads the first.
_MOST_CALLS = 3
_LARGE_BYTES = 1 << 20
_INTERRUPTED = Failure(UnavailableError("interrupted"), may_retry=True)


class Sender:
    """Thread-safe. The thread starts with the first rows that nobody waits for; who waits sends as it does."""

    def __init__(self, transport: Transport, packing: Packing, limits: Limits) -> None:
        self._transport = transport
        self._packing = packing
        self._outbox = Outbox(limits, transport.timeout_s, transport.channels.count)
        # Taken itself, never through a condition: there, Ctrl-C may come when it is taken and nobody gives it back.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closing = False

    def send(self, tables: Iterable[Steps]) -> Delivery:
        """Blocks until every row of the tables has an outcome or an error. No other thread has to wake up for it.

        After an error of the tables themselves, what came before it is waited for all the same.
        """
        delivery, calls = Delivery(), Calls()
        try:
            for table in tables:
                self._add(table, delivery, calls)
                with self._lock:
                    self._outbox.hurry()
                with Uninterrupted():
                    self._step(calls, is_waiting=False)
        except GristmillError:
            self._work_until(lambda: not delivery.under_way, self._progress, calls)
            raise
        except BaseException:
            self._abandon(calls)
            raise
        self._work_until(lambda: not delivery.under_way, self._progress, calls)
        return delivery

    def put(self, table: Steps, delivery: Delivery) -> None:
        """Takes the rows over; blocks while too much is under way."""
        if self._add(table, delivery, Calls()) or self._thread is None:
            with self._lock:
                self._work.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._send_all, name="gristmill-sender", daemon=True)
                    self._thread.start()

    def wait(self, delivery: Delivery) -> None:
        """Blocks until every row of the delivery has an outcome or an error."""
        self._hurry_until(lambda: not delivery.under_way)

    def wait_for(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Blocks until what was put of the trajectories that are meant has an outcome or an error."""
        self._hurry_until(lambda: not self._outbox.is_sending(is_meant))

    def withdraw(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Takes back, as dropped, what is not being sent at this moment."""
        with self._lock:
            self._outbox.withdraw(is_meant)
            self._tell()

    def flush(self) -> None:
        """Blocks until everything put before has an outcome. Raises what was not told yet of rows not taken."""
        with self._lock:
            last = self._outbox.hurry()
        self._hurry_until(lambda: self._outbox.is_settled(last))
        with self._lock:
            error = self._outbox.tell_all()
        if error is not None:
            raise error

    def told(self, delivery: Delivery) -> GristmillError | None:
        """Why rows of the delivery were not taken. Who calls tells it, so that `flush` does not again."""
        if not delivery.failures:
            return None
        with self._lock:
            return self._outbox.tell(delivery)

    def close(self) -> None:
        """Ends the thread when everything is sent or given up. Idempotent; nothing may be put afterwards."""
        with self._lock:
            self._closing = True
            self._outbox.hurry()
            self._work.notify()
            self._progress.notify_all()
        if self._thread is not None and self._transport.process.is_here():
            self._thread.join()

    def _add(self, table: Steps, delivery: Delivery, calls: Calls) -> bool:
        """Adds the rows once there is room. Returns whether that may have made a message due earlier."""
        self._transport.check_usable()
        while True:
            with self._lock:
                if self._closing:
                    raise FailedPreconditionError("this RolloutClient is closed; make another")
                if self._outbox.has_room(table):
                    return self._outbox.add(table, delivery, time.monotonic())
            self._work_until(lambda: self._closing or self._outbox.has_room(table), self._progress, calls)

    def _hurry_until(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            self._outbox.hurry()
        self._work_until(is_done, self._progress, Calls())

    def _send_all(self) -> None:
        self._work_until(lambda: self._closing and not self._outbox.rows_under_way, self._work, Calls())

    def _work_until(self, is_done: Callable[[], bool], changed: threading.Condition, calls: Calls) -> None:
        """Sends what is due until the condition holds, which is looked at with the lock held; `changed` is told when it
        may. None of the calls is under way then."""
        try:
            while True:
                with self._lock:
                    if is_done():
                        break
                    pause_s = self._outbox.due_in(time.monotonic())
                    if not calls and (pause_s is None or pause_s > 0):
                        changed.wait(pause_s)
                        continue
                with Uninterrupted():
                    self._step(calls)
            while calls:
                with Uninterrupted():
                    self._finish(*calls.popleft())
        except BaseException:
            self._abandon(calls)
            raise

    def _step(self, calls: Calls, *, is_waiting: bool = True) -> None:
        """Begins the call that is due, if one more may be under way; else ends the first, where anybody waits."""
        entries: list[Entry] = []
        if len(calls) < _MOST_CALLS:
            with self._lock:
                if entries := self._outbox.take(time.monotonic()):
                    # What is taken leaves room for more.
                    self._progress.notify_all()
        if entries:
            self._begin(entries, calls)
        elif calls and is_waiting:
            self._finish(*calls.popleft())

    def _abandon(self, calls: Calls) -> None:
        """After Ctrl-C: whether the rows arrived is not known; they are sent again by who works next."""
        for entries, _ in calls:
            self._report(entries, _INTERRUPTED)
        calls.clear()

    def _begin(self, entries: list[Entry], calls: Calls) -> None:
        """A large message is on its way while the next one is written; a small one is waited for, which is faster."""
        with self._reporting(entries):
            request = self._packing.request(entries)
            timeout_s = self._outbox.attempt_s(entries, time.monotonic())
            if len(request) < _LARGE_BYTES:
                self._settle(entries, self._transport.submit_rows(request, timeout=timeout_s))
            else:
                calls.append((entries, self._transport.begin_submit_rows(request, timeout=timeout_s)))

    def _finish(self, entries: list[Entry], answer: Callable[[], Any]) -> None:
        with self._reporting(entries):
            self._settle(entries, answer())

    def _settle(self, entries: list[Entry], response: Any) -> None:
        outcomes = outcomes_of(response, entries)
        with self._lock:
            self._outbox.settle(entries, outcomes)
            self._tell()

    @contextmanager
    def _reporting(self, entries: list[Entry]) -> Iterator[None]:
        """Whatever happens, the rows' owners are told or the rows sent again, and the others go on."""
        try:
            yield
        except grpc.RpcError as call:
            self._report(entries, failure_of(call, self._transport.address))
        except Exception as error:  # noqa: BLE001
            self._report(entries, Failure(GristmillError(f"{type(error).__name__}: {error}")))
        except BaseException:
            self._transport.channels.forget()
            self._report(entries, _INTERRUPTED)
            raise

    def _report(self, entries: list[Entry], failure: Failure) -> None:
        with self._lock:
            self._outbox.refuse(entries, failure, time.monotonic())
            self._tell()

    def _tell(self) -> None:
        """Wakes who waits for these rows, and who may send the next. With the lock held."""
        self._progress.notify_all()
        self._work.notify()
