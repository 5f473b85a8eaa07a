"""Failed calls as errors of gristmill: the class, the message with its remedy, and whether another attempt may help."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc

from gristmill import errors
from gristmill._client.connection.channels import cannot_serve
from gristmill.errors import (
    DeadlineExceededError,
    GristmillError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)


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
    """Translates a gRPC status. The message names the call's id, which the service's log has too."""
    failure = _failure_of(call, address)
    request_id = getattr(call, "request_id", "")
    if not request_id:
        return failure
    return replace(failure, error=with_message(failure.error, f"{failure.error} (request {request_id})"))


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
        # Any of them may be the one to repair.
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


def with_message(error: GristmillError, message: str) -> GristmillError:
    """The same error with another message."""
    again = copy.copy(error)
    again.args = (message,)
    return again
