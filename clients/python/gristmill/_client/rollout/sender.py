"""The sending of a client's rows: a worker, and those who wait for it. Owns the lock around the outbox."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from gristmill._client.connection.channels import Begun
from gristmill._client.connection.drivers import Join, Signal
from gristmill._client.connection.failures import Failure, failure_of
from gristmill._client.connection.transport import Connection
from gristmill._client.rollout.delivery import Delivery, PendingRow, outcomes_of
from gristmill._client.rollout.outbox import Limits, Outbox
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import GristmillError, UnavailableError

_log = logging.getLogger("gristmill")


@dataclass(slots=True, eq=False)
class Call:
    """One under way: its rows, and the call itself."""

    entries: list[PendingRow]
    begun: Begun | None = None


Calls = deque[Call]

# The next are written and sent while the service reads the first.
_MOST_CALLS = 3
# A smaller request is on its way in less time than it takes to begin a call and come back to it.
_LARGE_BYTES = 1 << 20
_INTERRUPTED = Failure(UnavailableError("interrupted"), may_retry=True)


class Sender:
    """As safe for threads as the connection's driver is. The worker starts with the first rows that need it."""

    def __init__(self, connection: Connection, encoder: RequestEncoder, limits: Limits) -> None:
        self._connection = connection
        self._driver = connection.driver
        self._encoder = encoder
        self._outbox = Outbox(limits, connection.timeout_s, connection.channels.count)
        self._lock = self._driver.lock
        self._work: Signal = self._driver.signal()
        self._progress: Signal = self._driver.signal()
        self._join_worker: Join | None = None
        self._closing = False

    async def submit(self, tables: Iterable[Steps]) -> Delivery:
        """Returns when every row of the tables has an outcome or an error.

        After an error of the tables themselves, the rows before it are waited for all the same.
        """
        delivery, calls = Delivery(), Calls()
        try:
            for table in tables:
                await self._add(table, delivery, calls)
                with self._lock:
                    self._outbox.flush()
                if self._driver.waiters_send:
                    with self._driver.uninterrupted():
                        await self._step(calls, is_waiting=False)
                else:
                    self._wake_worker()
        except GristmillError:
            await self._until(lambda: not delivery.pending, calls)
            raise
        except BaseException:
            self._abandon(calls)
            raise
        await self._until(lambda: not delivery.pending, calls)
        return delivery

    async def put(self, table: Steps, delivery: Delivery) -> None:
        """Takes the rows over; waits while too many are pending."""
        if await self._add(table, delivery, Calls()) or self._join_worker is None:
            self._wake_worker()

    async def wait_for(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Returns when the rows that were put of the trajectories meant have an outcome or an error."""
        with self._lock:
            self._outbox.flush()
        await self._until(lambda: not self._outbox.is_sending(is_meant), Calls())

    def withdraw(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Takes back, as dropped, the rows that are not being sent at this moment."""
        with self._lock:
            self._outbox.withdraw(is_meant)
            self._announce()

    async def flush(self) -> None:
        """Returns when everything put before has an outcome. Raises the errors of rows that nobody took yet."""
        with self._lock:
            last = self._outbox.flush()
        await self._until(lambda: self._outbox.is_concluded(last), Calls())
        with self._lock:
            error = self._outbox.take_errors()
        if error is not None:
            raise error

    def take_error(self, delivery: Delivery) -> GristmillError | None:
        """Why rows of the delivery were not taken. Who calls raises it, so that `flush` does not again."""
        if not delivery.failures:
            return None
        with self._lock:
            return self._outbox.take_error(delivery)

    async def close(self) -> None:
        """Ends the worker when everything is sent or given up. Idempotent; nothing may be put afterwards."""
        with self._lock:
            self._closing = True
            self._outbox.flush()
            self._announce()
        if self._connection.fork_guard.is_here() and self._join_worker is not None:
            await self._join_worker()

    async def _add(self, table: Steps, delivery: Delivery, calls: Calls) -> bool:
        """Adds the rows once there is room. Returns whether that may have made a message due earlier."""
        self._connection.check_usable()
        while True:
            with self._lock:
                if self._closing:
                    raise self._connection.closed_error()
                if self._outbox.has_room(table):
                    return self._outbox.add(table, delivery, time.monotonic())
            await self._until(lambda: self._closing or self._outbox.has_room(table), calls)

    async def _until(self, is_done: Callable[[], bool], calls: Calls) -> None:
        """Returns when the condition holds, which is tested with the lock held."""
        if self._driver.waiters_send:
            await self._work_until(is_done, self._progress, calls)
            return
        if self._join_worker is not None:
            self._wake_worker()
        while not is_done():
            await self._progress.wait(None)

    # The worker.

    def _wake_worker(self) -> None:
        with self._lock:
            self._work.notify_all()
            if self._join_worker is None:
                self._join_worker = self._driver.start(self._send_all)

    async def _send_all(self) -> None:
        try:
            await self._work_until(lambda: self._closing and not self._outbox.pending_rows, self._work, Calls())
        finally:
            if lost := self._outbox.pending_rows:
                _log.error("%d rows of run %r were not delivered: the client was not closed", lost, self._encoder.run)

    async def _work_until(self, is_done: Callable[[], bool], changed: Signal, calls: Calls) -> None:
        """Sends what is due until the condition holds; `changed` announces when it may. None of the calls is under way
        then."""
        try:
            while True:
                with self._lock:
                    if is_done():
                        break
                    pause_s = self._outbox.due_in(time.monotonic())
                    if not calls and (pause_s is None or pause_s > 0):
                        await changed.wait(pause_s)
                        continue
                with self._driver.uninterrupted():
                    await self._step(calls)
            while calls:
                with self._driver.uninterrupted():
                    await self._finish(calls.popleft())
        except BaseException:
            self._abandon(calls)
            raise

    async def _step(self, calls: Calls, *, is_waiting: bool = True) -> None:
        """Ends the first calls if they are answered, and begins the one that is due, if one more may be under way; else
        waits for the first, where anybody waits."""
        while calls and (begun := calls[0].begun) is not None and begun.is_done():
            await self._finish(calls.popleft())
        entries: list[PendingRow] = []
        if len(calls) < _MOST_CALLS:
            with self._lock:
                if entries := self._outbox.next_message(time.monotonic()):
                    # What is taken leaves room for more.
                    self._progress.notify_all()
        if entries:
            await self._begin(entries, calls)
        elif calls and is_waiting:
            await self._finish(calls.popleft())

    def _abandon(self, calls: Calls) -> None:
        """After an interrupt: whether the rows arrived is not known; whoever works next sends them again."""
        for call in calls:
            self._on_failure(call, _INTERRUPTED)
        calls.clear()

    async def _begin(self, entries: list[PendingRow], calls: Calls) -> None:
        """A large message is on its way while the next one is written; a small one is waited for, which is faster."""
        call = Call(entries)
        with self._reporting(call):
            request = self._encoder.encode(entries)
            timeout_s = self._outbox.attempt_s(entries, time.monotonic())
            if len(request) < _LARGE_BYTES:
                answer = await self._driver.call(self._connection.submit_rows, request, timeout=timeout_s)
                self._on_answer(call, answer)
            else:
                call.begun = self._connection.begin_submit_rows(request, timeout=timeout_s)
                calls.append(call)

    async def _finish(self, call: Call) -> None:
        assert call.begun is not None, "it is under way"
        with self._reporting(call):
            self._on_answer(call, await self._driver.call(call.begun.answer))

    def _on_answer(self, call: Call, response: Any) -> None:
        outcomes = outcomes_of(response, call.entries)
        with self._lock:
            self._outbox.on_outcomes(call.entries, outcomes)
            self._announce()

    def _on_failure(self, call: Call, failure: Failure) -> None:
        with self._lock:
            self._outbox.on_failure(call.entries, failure, time.monotonic())
            self._announce()

    @contextmanager
    def _reporting(self, call: Call) -> Iterator[None]:
        """Whatever happens, the rows have an error or are sent again, and the others go on."""
        try:
            yield
        except grpc.RpcError as error:
            self._on_failure(call, failure_of(error, self._connection.address))
        except Exception as error:  # noqa: BLE001
            self._on_failure(call, Failure(GristmillError(f"{type(error).__name__}: {error}")))
        except BaseException as interrupt:
            if isinstance(interrupt, KeyboardInterrupt):
                self._connection.channels.reconnect()
            self._on_failure(call, _INTERRUPTED)
            raise

    def _announce(self) -> None:
        """Wakes those who wait for these rows, and those who may send the next. With the lock held."""
        self._progress.notify_all()
        self._work.notify_all()
