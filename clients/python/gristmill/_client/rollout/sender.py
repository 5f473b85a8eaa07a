"""Sends a client's rows with one worker. Callers add rows and wait for the worker's progress."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import grpc

from gristmill._client.connection.channels import Begun
from gristmill._client.connection.drivers import Join, Signal
from gristmill._client.connection.failures import Failure
from gristmill._client.connection.interruptions import is_interruption, left_s
from gristmill._client.connection.transport import Connection
from gristmill._client.rollout.delivery import Delivery, PendingRow, Prefix, outcomes_of
from gristmill._client.rollout.outbox import Limits, Outbox
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import GristmillError, UnavailableError

_log = logging.getLogger("gristmill")

SILENT_S = 5.0
"""After this time, a warning says why rows wait for the service."""
NOTICE_S = 30.0
"""The minimum time between two such warnings."""


@dataclass(slots=True, eq=False)
class _Call:
    """A message in flight: its rows, and the call."""

    entries: list[PendingRow]
    begun: Begun


# The number of messages in flight: the worker encodes and sends the next ones while the service reads the first.
_MAX_CALLS = 3
# A smaller request is sent faster by a blocking call than by a call in the background.
_LARGE_BYTES = 1 << 20


class Sender:
    """Owns the outbox and its lock. As thread-safe as the connection's driver.

    The worker starts with the first rows. If a waiting caller is interrupted, the worker still sends its rows, and
    `flush` reports their errors.
    """

    def __init__(self, connection: Connection, encoder: RequestEncoder, limits: Limits) -> None:
        self._connection = connection
        self.interruptions = connection.interruptions
        self._driver = connection.driver
        self._encoder = encoder
        self._outbox = Outbox(limits, connection.timeout_s, connection.channels.count)
        self._lock = self._driver.lock
        self._work: Signal = self._driver.signal()
        self._progress: Signal = self._driver.signal()
        # Separate from `_progress`, so that sending a message does not wake the callers that wait for its answer.
        self._capacity: Signal = self._driver.signal()
        self._join_worker: Join | None = None
        self._closing = self._gives_up = False
        self._warned = -inf

    async def submit(self, tables: Iterable[Steps]) -> Delivery:
        """Adds the rows of the tables, and returns when each has an outcome or an error.

        If iterating the tables raises an error, it first waits for the rows before the error.
        """
        delivery = Delivery()
        try:
            for table in tables:
                await self._add(table, delivery)
                self._send_now()
        except GristmillError:
            await self._until(lambda: not delivery.pending)
            raise
        await self._until(lambda: not delivery.pending)
        return delivery

    async def put(self, table: Steps, delivery: Delivery, prefix: Prefix) -> None:
        """Adds a trajectory's rows. Waits only if too many rows are pending. prefix: tokens that need not be sent."""
        if await self._add(table, delivery, prefix):
            self._wake_worker()

    async def wait_for(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Returns when all rows of the matching trajectories have an outcome or an error."""
        self._send_now()
        await self._until(lambda: not self._outbox.is_sending(is_meant))

    def withdraw(self, is_meant: Callable[[PendingRow], bool]) -> None:
        """Removes the matching rows that are not being sent. Their outcome is DROPPED."""
        with self._lock:
            self._outbox.withdraw(is_meant)
            self._notify()

    async def flush(self) -> None:
        """Returns when all rows added so far have an outcome or an error. Raises errors that were not raised before."""
        last = self._send_now()
        await self._until(lambda: self._outbox.is_concluded(last))
        with self._lock:
            error = self._outbox.take_errors()
        if error is not None:
            raise error

    async def clean_up(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs calls that an error requires, such as aborts, as `Driver.clean_up` does."""
        await self._driver.clean_up(work)

    def take_error(self, delivery: Delivery) -> GristmillError | None:
        """Returns the error of a delivery's rows, if any. The caller must raise it, because `flush` then does not."""
        if not delivery.failures:
            return None
        with self._lock:
            return self._outbox.take_error(delivery)

    async def close(self, error: BaseException | None = None) -> None:
        """Delivers the pending rows, stops the worker and disconnects. Idempotent. No rows may be added afterwards.

        error: by default, the exception that is being handled. After an interruption, the rows that cannot be delivered
            in a short time are lost, and their number is logged. Raises the errors of `flush`, except after an
            interruption, which gets a note.
        """
        if self._gives_up:
            return
        error = error or sys.exc_info()[1]
        try:
            with self.interruptions.limiting(error):
                await self._driver.wait_for_clean_ups()
                await self.flush()
        except GristmillError as failed:
            if error is None or not is_interruption(error):
                raise
            self._gives_up = True
            error.add_note(f"closing the {self._connection.owner}: {failed}")
        except BaseException as failed:
            self._gives_up = is_interruption(failed)
            raise
        finally:
            with self._lock:
                self._closing = True
                self._outbox.flush()
                self._notify()
            if self._gives_up:
                # This ends the worker's call.
                await self._connection.disconnect()
            if self._join_worker is not None:
                await self._join_worker()
            await self._connection.disconnect()
            if self._gives_up:
                with self._lock:
                    self._outbox.abandon(UnavailableError("the client was interrupted before the row was delivered"))
                    self._notify()

    async def _add(self, table: Steps, delivery: Delivery, prefix: Prefix | None = None) -> bool:
        """Waits for capacity in the outbox and adds the rows. Returns whether the worker must be woken."""
        self._connection.check_usable()
        while True:
            with self._lock:
                if self._closing:
                    raise self._connection.closed_error()
                if self._outbox.has_room(table):
                    is_due = self._outbox.add(table, delivery, time.monotonic(), prefix)
                    return is_due or self._join_worker is None
                await self._capacity.wait(None)

    async def _until(self, is_done: Callable[[], bool]) -> None:
        """Returns when the condition is true. Acquires the lock to test it."""
        with self._lock:
            while not is_done():
                left = left_s()
                if left <= 0:
                    raise UnavailableError(
                        f"run {self._encoder.run!r}: rows were not delivered before the interrupted client ended"
                    )
                await self._progress.wait(None if left == inf else left)

    def _send_now(self) -> int:
        """Makes all rows due now. Returns the number of the last row."""
        with self._lock:
            last = self._outbox.flush()
        if self._outbox.pending_rows:
            self._wake_worker()
        return last

    def _notify(self) -> None:
        """Wakes callers and the worker. The caller must hold the lock."""
        self._progress.notify_all()
        self._capacity.notify_all()
        self._work.notify_all()

    def _wake_worker(self) -> None:
        with self._lock:
            self._work.notify_all()
            if self._join_worker is None:
                self._join_worker = self._driver.start(self._send_all, "gristmill-sender")

    # The worker.

    async def _send_all(self) -> None:
        """Sends rows until the client is closed and no rows are pending."""
        calls = deque[_Call]()
        try:
            while True:
                with self._lock:
                    if self._closing and (self._gives_up or not self._outbox.pending_rows):
                        break
                    pause_s = self._outbox.due_in(time.monotonic())
                    if not calls and (pause_s is None or pause_s > 0):
                        await self._work.wait(pause_s)
                        continue
                await self._step(calls)
        finally:
            if lost := self._outbox.pending_rows:
                why = "interrupted" if self._gives_up else "not closed"
                _log.error("%d rows of run %r were not delivered: the client was %s", lost, self._encoder.run, why)

    async def _step(self, calls: deque[_Call]) -> None:
        """Handles answers that have arrived, and sends the next message. If none is due, waits for one or an answer."""
        while calls and calls[0].begun.is_done():
            await self._finish(calls.popleft())
        entries: list[PendingRow] = []
        if len(calls) < _MAX_CALLS:
            with self._lock:
                if entries := self._outbox.next_message(time.monotonic()):
                    self._capacity.notify_all()
        if entries:
            await self._begin(entries, calls)
        elif calls:
            with self._lock:
                pause_s = self._outbox.due_in(time.monotonic()) if len(calls) < _MAX_CALLS else None
                if not calls[0].begun.is_done() and (pause_s is None or pause_s > 0):
                    await self._work.wait(pause_s)

    async def _begin(self, entries: list[PendingRow], calls: deque[_Call]) -> None:
        """Sends a message. A large one is sent in the background, so that the next can be encoded meanwhile."""

        async def send() -> Any:
            request = self._encoder.encode(entries)
            timeout_s = self._outbox.attempt_s(entries, time.monotonic())
            if len(request) < _LARGE_BYTES:
                return await self._driver.call(self._connection.submit_rows, request, timeout=timeout_s)
            calls.append(_Call(entries, self._connection.begin_submit_rows(request, timeout=timeout_s)))
            calls[-1].begun.on_done(self._on_answer)
            return None

        await self._handle(entries, send())

    def _on_answer(self, _: object) -> None:
        with self._lock:
            self._work.notify_all()

    async def _finish(self, call: _Call) -> None:
        await self._handle(call.entries, self._driver.call(call.begun.answer))

    async def _handle(self, entries: list[PendingRow], answer: Awaitable[Any]) -> None:
        """Passes the answer, if it is not None, or the error to the outbox."""
        try:
            response = await answer
            outcomes = None if response is None else outcomes_of(response, entries)
        except grpc.RpcError as error:
            self._on_failure(entries, await self._connection.failure(error))
        except Exception as error:  # noqa: BLE001 - the rows get an error, and the worker continues with the others
            self._on_failure(entries, Failure(GristmillError(f"{type(error).__name__}: {error}")))
        else:
            if outcomes is not None:
                now = time.monotonic()
                for row in response.refused:
                    self._log_wait(entries[row.row], outcomes[row.row], now)
                with self._lock:
                    pending = self._outbox.pending_rows
                    self._outbox.on_outcomes(entries, outcomes, now)
                    # While the service has no capacity, thousands of callers may wait, and answers conclude no rows.
                    if self._outbox.pending_rows < pending:
                        self._progress.notify_all()
                    self._capacity.notify_all()

    def _on_failure(self, entries: list[PendingRow], failure: Failure) -> None:
        now = time.monotonic()
        self._log_wait(entries[0], failure, now)
        with self._lock:
            self._outbox.on_failure(entries, failure, now)
            self._notify()

    def _log_wait(self, entry: PendingRow, failure: Failure, now: float) -> None:
        """Logs why a row waits, if it has waited for a long time."""
        waited_s = now - entry.added
        if failure.may_retry and waited_s >= SILENT_S and now - self._warned >= NOTICE_S:
            self._warned = now
            _log.warning("run %r: rows have waited for %.0f s: %s", self._encoder.run, waited_s, failure.error)
