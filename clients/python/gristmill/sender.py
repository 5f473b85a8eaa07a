"""The thread that sends a blocking client's rows. Owns the lock around the outbox; decides nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import grpc

from gristmill import wire
from gristmill.delivery import Delivery, Entry, RowOutcome, join, outcomes_of
from gristmill.errors import FailedPreconditionError, GristmillError
from gristmill.outbox import Limits, Outbox
from gristmill.steps import Steps, TrajectoryKey
from gristmill.transport import Failure, Transport, failure_of
from gristmill.v1 import rollout_pb2


class Sender:
    """Thread-safe. The thread starts with the first row."""

    def __init__(self, transport: Transport, run: str, limits: Limits) -> None:
        self._transport = transport
        self._run = run
        self._outbox = Outbox(limits, transport.timeout_s, transport.channels.count)
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._progress = threading.Condition(lock)
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, table: Steps, delivery: Delivery) -> None:
        """Takes the rows over; blocks while too much is under way."""
        self._transport.check_usable()
        with self._progress:
            self._progress.wait_for(lambda: self._closing or self._outbox.has_room(table))
            if self._closing:
                raise FailedPreconditionError("this RolloutClient is closed; make another")
            if self._outbox.add(table, delivery, time.monotonic()):
                self._work.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="gristmill-sender", daemon=True)
                self._thread.start()

    def wait(self, delivery: Delivery) -> None:
        """Blocks until every row of the delivery has an outcome or an error."""
        with self._progress:
            self._hurry()
            self._progress.wait_for(lambda: not delivery.under_way)

    def wait_for(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Blocks until what was put of the trajectories that are meant has an outcome or an error."""
        with self._progress:
            self._hurry()
            self._progress.wait_for(lambda: not self._outbox.is_sending(is_meant))

    def withdraw(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        """Takes back, as dropped, what is not being sent at this moment."""
        with self._progress:
            self._outbox.withdraw(is_meant)
            self._progress.notify_all()

    def flush(self) -> None:
        """Blocks until everything put before has an outcome. Raises what was not told yet of rows not taken."""
        with self._progress:
            last = self._hurry()
            self._progress.wait_for(lambda: self._outbox.is_settled(last))
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
        """Ends the thread when everything is sent or given up. Idempotent; nothing may be put afterwards."""
        with self._progress:
            self._closing = True
            self._hurry()
            self._progress.notify_all()
        if self._thread is not None and self._transport.process.is_here():
            self._thread.join()

    def _hurry(self) -> int:
        self._work.notify()
        return self._outbox.hurry()

    def _send_all(self) -> None:
        while entries := self._next():
            try:
                outcomes = self._send(entries)
            except grpc.RpcError as call:
                self._report(entries, failure_of(call, self._transport.address))
            except Exception as error:  # noqa: BLE001  whatever it is, the rows' owners are told, and the others go on
                self._report(entries, Failure(GristmillError(f"{type(error).__name__}: {error}")))
            else:
                with self._progress:
                    self._outbox.settle(entries, outcomes)
                    self._progress.notify_all()

    def _next(self) -> list[Entry]:
        """The next message once it is due; empty when there will be none."""
        with self._work:
            while True:
                now = time.monotonic()
                if entries := self._outbox.take(now):
                    # What is taken leaves room for more.
                    self._progress.notify_all()
                    return entries
                pause_s = self._outbox.due_in(now)
                if pause_s is None and self._closing:
                    return []
                self._work.wait(pause_s)

    def _send(self, entries: list[Entry]) -> list[RowOutcome]:
        request = rollout_pb2.SubmitRowsRequest(run=self._run, rows=wire.encode(join(entries)))
        timeout_s = self._outbox.attempt_s(entries, time.monotonic())
        response = self._transport.rollouts.SubmitRows(request, timeout=timeout_s)
        return outcomes_of(response, entries)

    def _report(self, entries: list[Entry], failure: Failure) -> None:
        with self._progress:
            self._outbox.refuse(entries, failure, time.monotonic())
            self._progress.notify_all()
