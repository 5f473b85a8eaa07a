"""How the clients reach the service: deadlines, retries, and statuses turned back into errors.

Owns no call of the contract and no state of a run. Every call of the contract may be repeated safely, which is why all
of them are retried here in the same way.
"""

from __future__ import annotations

import copy
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from gristmill import errors
from gristmill._client.channels import Channels, Replicas, cannot_serve
from gristmill.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill.v1 import rollout_pb2, rollout_pb2_grpc, run_pb2_grpc, trainer_pb2_grpc

T = TypeVar("T")

TIMEOUT_S = 120.0
"""For how long a call is tried again unless the client is told otherwise."""

LONGEST_WAIT_S = 20.0
"""What one call asks the service to wait; a longer wait is several calls, so that a dead connection is noticed."""

# One attempt that gets no answer for so long is given up and made again; sooner where there are replicas that were not
# asked yet. Once all were, it is the service that is slow, and hurrying it would not help.
_ATTEMPT_S, _ATTEMPT_AMONG_OTHERS_S = 20.0, 8.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
# The service answers a wait early when too many wait already.
_EARLY_ANSWER_PAUSE_S = 0.25


def _classes(base: type[GristmillError]) -> Iterator[type[GristmillError]]:
    yield base
    for derived in base.__subclasses__():
        yield from _classes(derived)


_BY_NAME = {error.__name__: error for error in _classes(errors.GristmillError)}
# Of the classes of one code, the one highest in the tree.
_BY_CODE = {error.code: error for error in reversed(_BY_NAME.values())}


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt that did not succeed.

    pushback_s: how long the service asks to wait, None where it says nothing.
    is_of_replica: whether another replica may serve what this one cannot now.
    """

    error: GristmillError
    may_retry: bool = False
    pushback_s: float | None = None
    is_of_replica: bool = False


def failure_of(call: grpc.RpcError, address: str) -> Failure:
    """What a gRPC status means, with the id by which the service's log tells of the call."""
    found = _failure_of(call, address)
    request_id = getattr(call, "request_id", "")
    return replace(found, error=reworded(found.error, f"{found.error} (request {request_id})")) if request_id else found


def _failure_of(call: grpc.RpcError, address: str) -> Failure:
    """The class is that of the trailing metadata `gristmill-error`, else that of the code."""
    trailers = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    code, details = call.code().name, call.details() or ""
    name = trailers.get("gristmill-error", "")
    if code == "CANCELLED":
        # A server that stops so ends calls that it has not begun; the client itself cancels none.
        code = "UNAVAILABLE"
    kind = _BY_NAME.get(name) or _BY_CODE.get(code, GristmillError)
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        # gRPC's own refusal: the same message stays too large.
        return Failure(InvalidArgumentError(f"{address}: {details}; send less at once, or raise max_message_bytes"))
    pushback_s = _pushback_s(trailers)
    may_retry = kind.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED") and (pushback_s or 0.0) >= 0.0
    if kind is errors.BatchFailedError:
        return Failure(errors.BatchFailedError(details, int(trailers.get("gristmill-batch", -1))))
    if kind is ResourceExhaustedError:
        return Failure(ResourceExhaustedError(details, max(0.0, pushback_s or 1.0)), may_retry, pushback_s)
    if not name:
        details = _of_transport(kind, code, details, address)
    elif cannot_serve(call) and "," in address:
        # Who reads it looks at all of them.
        details = f"{address}: {details}"
    return Failure(kind(details), may_retry, pushback_s, cannot_serve(call))


def _of_transport(kind: type[GristmillError], code: str, details: str, address: str) -> str:
    if kind is UnavailableError:
        return f"{address}: the service cannot be reached ({details}); check the address and that it runs"
    if kind is DeadlineExceededError:
        return f"{address}: the service did not answer in time ({details}); check that it is not overloaded"
    return f"{address}: {code}: {details}"


def _pushback_s(trailers: dict[str, str]) -> float | None:
    """gRPC's rule: a negative delay, or one that is no number, means not to retry."""
    text = trailers.get("grpc-retry-pushback-ms")
    if text is None:
        return None
    try:
        return int(text) / 1000
    except ValueError:
        return -1.0


def reworded(error: GristmillError, message: str) -> GristmillError:
    """The same error with another message."""
    again = copy.copy(error)
    again.args = (message,)
    return again


class Backoff:
    """Pauses between attempts: exponential with full jitter, after what the service asks for. With several replicas the
    pauses grow, and what one of them asks for counts, once all were tried in a round."""

    def __init__(self, replicas: int = 1) -> None:
        self.attempts = 0
        self._rounds = 0
        self._replicas = replicas

    def pause_s(self, pushback_s: float | None, *, is_of_replica: bool = False) -> float:
        self.attempts += 1
        if is_of_replica and self.attempts % self._replicas:
            return random.random() * _FIRST_PAUSE_S
        ceiling: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._rounds, 16))
        self._rounds += 1
        return max(0.0, pushback_s or 0.0) + random.random() * ceiling

    def attempt_s(self, left_s: float) -> float:
        """The time that the next attempt gets, of what is left for all."""
        are_others_left = self.attempts < self._replicas - 1
        return max(0.05, min(_ATTEMPT_AMONG_OTHERS_S if are_others_left else _ATTEMPT_S, left_s))


class Retry:
    """The attempts at one call, until `timeout_s` is over; 0 is one attempt, which gets the time that it needs."""

    def __init__(self, timeout_s: float, replicas: int = 1) -> None:
        self._is_only_one = timeout_s == 0
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._backoff = Backoff(replicas)

    def attempt_s(self, wait_s: float) -> float:
        """The time that the next attempt gets, of which the service may wait `wait_s`."""
        if self._is_only_one:
            return wait_s + _ATTEMPT_S
        return wait_s + self._backoff.attempt_s(self._deadline - time.monotonic())

    def pause_s(self, failure: Failure) -> float:
        """Seconds until the next attempt. Raises the failure's error where there is to be none."""
        if not failure.may_retry:
            raise failure.error
        pause_s = self._backoff.pause_s(failure.pushback_s, is_of_replica=failure.is_of_replica)
        now = time.monotonic()
        if now + pause_s >= self._deadline:
            tried = f"gave up after {self._backoff.attempts} attempts in {now - self._began:.1f} s"
            raise reworded(failure.error, f"{failure.error} ({tried}; a larger timeout_s tries longer)")
        return pause_s


class Patience:
    """One wait that is made of several calls, each of which lets the service wait a part."""

    def __init__(self, wait_s: float) -> None:
        self._deadline = time.monotonic() + wait_s

    def next_wait_s(self) -> float:
        self._asked = time.monotonic()
        self._slice_s = max(0.0, min(LONGEST_WAIT_S, self._deadline - self._asked))
        return self._slice_s

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def pause_s(self) -> float:
        """After an unsettled answer: the service may have answered at once, and must not be asked without pause."""
        came_early = time.monotonic() - self._asked < self._slice_s
        return _EARLY_ANSWER_PAUSE_S * (0.5 + random.random()) if came_early else 0.0


class OwnProcess:
    """Remembers in which process a client was made: gRPC's threads and connections do not survive a fork."""

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        if not self.is_here():
            raise FailedPreconditionError(
                f"this {self._name} was made in process {self._pid} and is used in its fork {os.getpid()}, which gRPC "
                "does not survive; make the client after the fork, or start processes by spawn"
            )


class Stubs:
    """The contract's three services over what looks like a channel, sync or asyncio."""

    def __init__(self, channel: Replicas) -> None:
        self.runs: Any = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        self.rollouts: Any = rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call]
        self.trainers: Any = trainer_pb2_grpc.TrainerServiceStub(channel)  # type: ignore[no-untyped-call]


SUBMIT_ROWS = "/gristmill.v1.RolloutService/SubmitRows"
"""Called with requests that are bytes already, as `gristmill.submission` writes them."""


class Transport(Stubs):
    """A blocking, thread-safe connection to the replicas that `address` names. Nothing is connected before the first
    call."""

    def __init__(self, address: str, timeout_s: float, owner: str) -> None:
        self.channels = Channels(address)
        self.address = self.channels.names
        self.timeout_s = timeout_s
        self.process = OwnProcess(owner)
        self._closed = threading.Event()
        self._owner = owner
        super().__init__(self.channels)
        answer = rollout_pb2.SubmitRowsResponse.FromString
        self.submit_rows = self.channels.unary_unary(SUBMIT_ROWS, response_deserializer=answer)
        self.begin_submit_rows = self.channels.begin(SUBMIT_ROWS, response_deserializer=answer)

    def call(self, method: Callable[..., Any], request: Any, *, wait_s: float = 0.0, timeout_s: float = -1.0) -> Any:
        """The answer, retried for `timeout_s` (the transport's own unless given) over what the service waits.

        Raises the error of gristmill.errors that the last attempt ended with. `timeout_s=0` makes one attempt.
        """
        self.check_usable()
        retry = Retry(self.timeout_s if timeout_s < 0 else timeout_s, self.channels.count)
        while True:
            try:
                return method(request, timeout=retry.attempt_s(wait_s))
            except grpc.RpcError as call:
                self.pause(retry.pause_s(failure_of(call, self.address)))
            except KeyboardInterrupt:
                self.channels.forget()
                raise

    def wait(self, ask: Callable[[float], T], is_settled: Callable[[T], bool], wait_s: float) -> T:
        """The answer of `ask(seconds that the service may wait)` once it is settled, or as it is after `wait_s`."""
        patience = Patience(wait_s)
        while True:
            answer = ask(patience.next_wait_s())
            if is_settled(answer) or patience.is_over():
                return answer
            self.pause(patience.pause_s())

    def pause(self, seconds: float) -> None:
        """Raises FailedPreconditionError when the client is closed meanwhile."""
        self._closed.wait(seconds)
        self.check_usable()

    def check_usable(self) -> None:
        self.process.check()
        if self._closed.is_set():
            raise FailedPreconditionError(f"this {self._owner} is closed; make another")

    def close(self) -> None:
        """Idempotent. Calls that others wait in end with an error. Does nothing in a fork."""
        if self.process.is_here():
            self._closed.set()
            self.channels.close()
