"""The connection and the task that send an asyncio client's rows: `transport` and `sender` for one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from gristmill._client.channels import AsyncChannels
from gristmill._client.delivery import Delivery, Entry, RowOutcome, outcomes_of
from gristmill._client.outbox import Limits, Outbox
from gristmill._client.prefix_dedup import Packing
from gristmill._client.transport import SUBMIT_ROWS, Failure, OwnProcess, Patience, Retry, Stubs, failure_of
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import FailedPreconditionError, GristmillError
from gristmill.v1 import rollout_pb2

_log = logging.getLogger("gristmill")

T = TypeVar("T")


class AsyncTransport(Stubs):
    """As Transport, for one event loop: that of the calls, in which connections are made."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.channels = AsyncChannels(address)
        self.address = self.channels.names
        self.timeout_s = timeout_s
        self.process = OwnProcess("AsyncRolloutClient")
        self._is_closed = False
        super().__init__(self.channels)
        answer = rollout_pb2.SubmitRowsResponse.FromString
        self.submit_rows = self.channels.unary_unary(SUBMIT_ROWS, response_deserializer=answer)

    def check_usable(self) -> None:
        self.process.check()
        if self._is_closed:
            raise FailedPreconditionError("this AsyncRolloutClient is closed; make another")

    async def call(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Any,
        *,
        wait_s: float = 0.0,
        timeout_s: float = -1.0,
    ) -> Any:
        self.check_usable()
        retry = Retry(self.timeout_s if timeout_s < 0 else timeout_s, self.channels.count)
        while True:
            try:
                return await method(request, timeout=retry.attempt_s(wait_s))
            except grpc.RpcError as call:
                await asyncio.sleep(retry.pause_s(failure_of(call, self.address)))

    async def wait(self, ask: Callable[[float], Awaitable[T]], is_settled: Callable[[T], bool], wait_s: float) -> T:
        patience = Patience(wait_s)
        while True:
            answer = await ask(patience.next_wait_s())
            if is_settled(answer) or patience.is_over():
                return answer
            await asyncio.sleep(patience.pause_s())

    async def close(self) -> None:
        if self.process.is_here():
            self._is_closed = True
            await self.channels.close()


class AsyncSender:
    """The task that sends a client's rows; as Sender, without locks, as all is one loop."""

    def __init__(self, transport: AsyncTransport, packing: Packing, limits: Limits) -> None:
        self._transport = transport
        self._packing = packing
        self._outbox = Outbox(limits, transport.timeout_s, transport.channels.count)
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def put(self, table: Steps, delivery: Delivery) -> None:
        self._transport.check_usable()
        if self._task is None:
            self._work, self._progress = asyncio.Event(), asyncio.Event()
            self._task = asyncio.create_task(self._send_all(), name="gristmill-sender")
        await self._until(lambda: self._closing or self._outbox.has_room(table))
        if self._closing:
            raise FailedPreconditionError("this AsyncRolloutClient is closed; make another")
        if self._outbox.add(table, delivery, time.monotonic()):
            self._work.set()

    async def wait(self, delivery: Delivery) -> None:
        self._hurry()
        await self._until(lambda: not delivery.under_way)

    async def wait_for(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        self._hurry()
        await self._until(lambda: not self._outbox.is_sending(is_meant))

    def withdraw(self, is_meant: Callable[[TrajectoryKey], bool]) -> None:
        self._outbox.withdraw(is_meant)
        self._tell()

    async def flush(self) -> None:
        last = self._hurry()
        await self._until(lambda: self._outbox.is_settled(last))
        if error := self._outbox.tell_all():
            raise error

    def told(self, delivery: Delivery) -> GristmillError | None:
        return self._outbox.tell(delivery)

    async def close(self) -> None:
        self._closing = True
        if self._task is not None:
            self._hurry()
            self._tell()
            await self._task

    def _hurry(self) -> int:
        if self._task is not None:
            self._work.set()
        return self._outbox.hurry()

    def _tell(self) -> None:
        """Wakes all who wait for progress, each of whom waits on the event of its time."""
        if self._task is not None:
            self._progress.set()
            self._progress = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._progress.wait()

    async def _send_all(self) -> None:
        try:
            await self._send_each()
        finally:
            if lost := self._outbox.rows_under_way:
                _log.error("%d rows of run %r were not delivered: the client was not closed", lost, self._packing.run)

    async def _send_each(self) -> None:
        while entries := await self._next():
            try:
                outcomes = await self._send(entries)
            except grpc.RpcError as call:
                self._outbox.refuse(entries, failure_of(call, self._transport.address), time.monotonic())
            except Exception as error:  # noqa: BLE001  whatever it is, the rows' owners are told, and the others go on
                failure = Failure(GristmillError(f"{type(error).__name__}: {error}"))
                self._outbox.refuse(entries, failure, time.monotonic())
            else:
                self._outbox.settle(entries, outcomes)
            self._tell()

    async def _next(self) -> list[Entry]:
        while True:
            self._work.clear()
            now = time.monotonic()
            if entries := self._outbox.take(now):
                self._tell()
                return entries
            pause_s = self._outbox.due_in(now)
            if pause_s is None and self._closing:
                return []
            try:
                await asyncio.wait_for(self._work.wait(), pause_s)
            except TimeoutError:
                continue

    async def _send(self, entries: list[Entry]) -> list[RowOutcome]:
        request = self._packing.request(entries)
        timeout_s = self._outbox.attempt_s(entries, time.monotonic())
        return outcomes_of(await self._transport.submit_rows(request, timeout=timeout_s), entries)
