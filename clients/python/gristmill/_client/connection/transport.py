"""Connect to the service, and call it with deadlines and retries, blocking or in an event loop.

All calls are idempotent, so they are all retried in the same way.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, TypeVar

import grpc

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.drivers import Blocking, Driver, block_on
from gristmill._client.connection.failures import Failure, failure_of, failure_without_tls, may_expect_tls
from gristmill._client.connection.interruptions import Interruptions, left_s
from gristmill._client.connection.retries import Retry, WaitBudget
from gristmill._client.connection.tls_probe import expects_tls
from gristmill.errors import FailedPreconditionError, UnavailableError
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc, run_pb2_grpc, trainer_pb2, trainer_pb2_grpc

T = TypeVar("T")

TIMEOUT_S = 120.0
"""By default, a failing call is retried for this time."""

# A client without TLS examines ports that close its connections, no more often than this.
_PROBE_PAUSE_S = 5.0

SUBMIT_ROWS = "/gristmill.v1.RolloutService/SubmitRows"
"""Called with bytes that `gristmill._wire.codecs.submit_codec` encodes."""

WRITE_COLUMNS = "/gristmill.v1.TrainerService/WriteColumns"
"""Called with the messages of `gristmill._wire.codecs.columns_codec`."""


class ForkGuard:
    """Detects that a client is used in a forked process: gRPC's threads and connections do not survive a fork."""

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        if not self.is_here():
            raise FailedPreconditionError(
                f"this {self._name} was created in process {self._pid} and is used in its fork {os.getpid()}, where "
                "gRPC does not work; create the client after the fork, or start processes with spawn"
            )


class Connection:
    """A connection to the replicas that `address` names, with stubs of the three gRPC services. The first call opens
    the connection.

    credentials: by default, `Credentials()` from the environment variables.
    """

    def __init__(
        self, driver: Driver, address: str, timeout_s: float, owner: str, credentials: Credentials | None = None
    ) -> None:
        self.driver = driver
        credentials = credentials or Credentials()
        self.channels = channels = driver.channels(address, credentials)
        self.interruptions = Interruptions()
        self._probed = inf if credentials.is_encrypted else -inf
        self.address = channels.names
        self.timeout_s = timeout_s
        self.fork_guard = ForkGuard(owner)
        self._closed = threading.Event()
        self.owner = owner
        self.runs: Any = run_pb2_grpc.RunServiceStub(channels)  # type: ignore[no-untyped-call]
        self.rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(channels)  # type: ignore[no-untyped-call]
        self.trainers: Any = trainer_pb2_grpc.TrainerServiceStub(channels)  # type: ignore[no-untyped-call]
        answer = rollout_pb2.SubmitRowsResponse.FromString
        self.submit_rows = channels.unary_unary(SUBMIT_ROWS, response_deserializer=answer)
        self.begin_submit_rows = channels.begin(SUBMIT_ROWS, response_deserializer=answer)
        lacking = trainer_pb2.WriteColumnsResponse.FromString
        self.write_columns = channels.stream_unary(WRITE_COLUMNS, response_deserializer=lacking)

    async def ask(
        self, method: Callable[..., Any], request: Any, *, wait_s: float = 0.0, timeout_s: float = -1.0
    ) -> Any:
        """Makes a call and returns its answer. Retries it for `wait_s` plus `timeout_s`, which is by default the
        connection's.

        wait_s: how long the service may wait before it answers. `timeout_s=0` makes one attempt. Raises the error of
            the last attempt, a class of `gristmill.errors`.
        """
        self.check_usable()
        timeout_s = self.timeout_s if timeout_s < 0 else timeout_s
        if (left := left_s()) < timeout_s:
            if left <= 0:
                raise UnavailableError(
                    f"{self.address}: the service did not answer before the interrupted client ended"
                )
            timeout_s, wait_s = left, 0.0
        retry = Retry(timeout_s, self.channels.count, wait_s)
        while True:
            try:
                return await self.driver.call(method, request, timeout=retry.attempt_s())
            except grpc.RpcError as call:
                pause_s = retry.pause_s(await self.failure(call))
            await self.sleep(pause_s)

    async def failure(self, call: grpc.RpcError) -> Failure:
        """Converts the failure of a call. If the port may expect TLS, examines it."""
        if may_expect_tls(call) and (now := time.monotonic()) - self._probed >= _PROBE_PAUSE_S:
            self._probed = now
            replica = getattr(call, "replica", "")
            if await self.driver.in_thread(expects_tls, replica):
                return failure_without_tls(replica)
        return failure_of(call, self.address)

    async def ask_until(self, ask: Callable[[float], Awaitable[T]], is_final: Callable[[T], bool], wait_s: float) -> T:
        """Calls `ask(seconds that the service may wait)` until the answer is final or `wait_s` is over. Returns the
        last answer."""
        budget = WaitBudget(wait_s)
        while True:
            answer = await ask(budget.next_wait_s())
            if is_final(answer) or budget.is_over():
                return answer
            await self.sleep(budget.pause_s())

    @property
    def state(self) -> str:
        """A description for `repr`: the address, and whether the connection is closed."""
        return f"at {self.address}{', closed' if self._closed.is_set() else ''}"

    async def sleep(self, seconds: float) -> None:
        """Pauses. Raises FailedPreconditionError if the client was closed meanwhile."""
        await self.driver.pause(seconds, self._closed)
        self.check_usable()

    def check_usable(self) -> None:
        self.fork_guard.check()
        if self._closed.is_set():
            raise self.closed_error()

    def closed_error(self) -> FailedPreconditionError:
        return FailedPreconditionError(f"this {self.owner} is closed; create another")

    async def disconnect(self) -> None:
        """Closes the connection. Active calls fail. Idempotent. Does nothing in a forked process."""
        if self.fork_guard.is_here():
            self._closed.set()
            for channel in self.channels.take_all():
                await self.driver.call(channel.close)


class Transport(Connection):
    """A connection whose calls block. Thread-safe."""

    def __init__(self, address: str, timeout_s: float, owner: str, credentials: Credentials | None = None) -> None:
        super().__init__(Blocking(), address, timeout_s, owner, credentials)

    def call(self, method: Callable[..., Any], request: Any, *, wait_s: float = 0.0, timeout_s: float = -1.0) -> Any:
        """Blocking version of `ask`."""
        return block_on(self.ask(method, request, wait_s=wait_s, timeout_s=timeout_s))

    def wait(self, ask: Callable[[float], T], is_final: Callable[[T], bool], wait_s: float) -> T:
        """Blocking version of `ask_until`."""

        async def asked(seconds: float) -> T:
            return ask(seconds)

        return block_on(self.ask_until(asked, is_final, wait_s))

    def pause(self, seconds: float) -> None:
        """Blocking version of `sleep`."""
        block_on(self.sleep(seconds))

    def close(self) -> None:
        """Blocking version of `disconnect`."""
        block_on(self.disconnect())
