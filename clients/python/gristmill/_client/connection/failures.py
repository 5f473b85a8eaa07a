"""Convert failed calls to errors of gristmill: the class, the message with its remedy, and whether to retry."""

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
    TooLargeError,
    UnavailableError,
)
from gristmill.v1 import rollout_pb2


def _classes(base: type[GristmillError]) -> Iterator[type[GristmillError]]:
    yield base
    for derived in base.__subclasses__():
        yield from _classes(derived)


_BY_NAME = {error.__name__: error for error in _classes(errors.GristmillError)}
# If several classes have the same code, this is the base class.
_BY_CODE = {error.code: error for error in reversed(_BY_NAME.values())}
# gRPC's message about an answer in HTTP/1 contains this.
_HTTP_1 = "http1.x server"
# gRPC's messages about a server without TLS, and about a server that closed a new connection: it may expect TLS.
_NO_TLS, _CLOSED = "WRONG_VERSION_NUMBER", ("failed to connect", "Socket closed")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt.

    may_retry: whether another attempt may succeed.
    pushback_s: the delay before a retry that the service requests; None if it requests none.
    is_of_replica: whether another replica may answer.
    progress_s: how long the attempt made progress, such as a stream until its last message.
    """

    error: GristmillError
    may_retry: bool = False
    pushback_s: float | None = None
    is_of_replica: bool = False
    progress_s: float = 0.0


def failure_of(call: grpc.RpcError, address: str) -> Failure:
    """Converts a gRPC status. The message contains the call's id, which the service also logs."""
    return _named(_failure_of(call, address), getattr(call, "request_id", ""))


def failure_of_row(row: rollout_pb2.RefusedRow, request_id: str) -> Failure:
    """Converts the refusal of one row. The message contains the call's id, as in `failure_of`."""
    kind = _kind(row.type, row.code)
    if kind is ResourceExhaustedError:
        failure = Failure(ResourceExhaustedError(row.message, row.retry_after_s), True, row.retry_after_s)
    else:
        failure = Failure(kind(row.message))
    return _named(failure, request_id)


def _named(failure: Failure, request_id: str) -> Failure:
    """Appends the call's id, if there is one, to the message of the failure."""
    if not request_id:
        return failure
    return replace(failure, error=with_message(failure.error, f"{failure.error} (request {request_id})"))


def _kind(name: str, code: str) -> type[GristmillError]:
    return _BY_NAME.get(name) or _BY_CODE.get(code, GristmillError)


def _failure_of(call: grpc.RpcError, address: str) -> Failure:
    """Determines the error class from the trailing metadata `gristmill-error`, or else from the status code."""
    trailers = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    code, details = call.code().name, call.details() or ""
    name = trailers.get("gristmill-error", "")
    if code == "CANCELLED":
        # A stopping server cancels calls that it has not started. The client never cancels a call.
        code = "UNAVAILABLE"
    kind = _kind(name, code)
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        # gRPC refused the message, not the service.
        return Failure(TooLargeError(f"{address}: {details}; send less per call, or raise max_message_bytes"))
    pushback_s = _pushback_s(trailers)
    may_retry = kind.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED") and (pushback_s or 0.0) >= 0.0
    if kind is errors.BatchFailedError:
        return Failure(errors.BatchFailedError(details, int(trailers.get("gristmill-batch", -1))))
    if kind is ResourceExhaustedError:
        return Failure(ResourceExhaustedError(details, max(0.0, pushback_s or 1.0)), may_retry, pushback_s)
    if _HTTP_1 in details:
        return Failure(
            InvalidArgumentError(f"{address}: the port answers HTTP, not gRPC ({details}); use the gRPC port")
        )
    if not name and _NO_TLS in details:
        return Failure(
            InvalidArgumentError(
                f"{address}: the client encrypts its connection, and the service does not use TLS ({details}); remove "
                "ca_file, cert_file and tls (GRISTMILL_CA_FILE, GRISTMILL_CERT_FILE, GRISTMILL_TLS), or start the "
                "service with TLS"
            )
        )
    if not name:
        details = _of_transport(kind, code, details, address)
    elif cannot_serve(call) and "," in address:
        # The message does not say which replica failed.
        details = f"{address}: {details}"
    return Failure(kind(details), may_retry, pushback_s, cannot_serve(call), getattr(call, "progress_s", 0.0))


def may_expect_tls(call: grpc.RpcError) -> bool:
    """Returns whether the failure is that of a call without TLS to a port that expects it. A service that is stopping
    fails in the same way."""
    return call.code() is grpc.StatusCode.UNAVAILABLE and all(part in (call.details() or "") for part in _CLOSED)


def failure_without_tls(address: str) -> Failure:
    return Failure(
        InvalidArgumentError(
            f"{address}: the service expects TLS, and the client does not use it; set ca_file of "
            "gristmill.Credentials (GRISTMILL_CA_FILE) to the service's certificate authority, or tls=True "
            "(GRISTMILL_TLS=1) if a public one signed its certificate"
        )
    )


def _of_transport(kind: type[GristmillError], code: str, details: str, address: str) -> str:
    if kind is UnavailableError:
        return f"{address}: the service cannot be reached ({details}); check the address, and that the service runs"
    if kind is DeadlineExceededError:
        return f"{address}: the service did not answer in time ({details}); check whether it is overloaded"
    return f"{address}: {code}: {details}"


def _pushback_s(trailers: dict[str, str]) -> float | None:
    """Reads gRPC's pushback, a delay. A negative or invalid number means: do not retry."""
    text = trailers.get("grpc-retry-pushback-ms")
    if text is None:
        return None
    try:
        return int(text) / 1000
    except ValueError:
        return -1.0


def with_message(error: GristmillError, message: str) -> GristmillError:
    """Returns a copy of the error with another message."""
    again = copy.copy(error)
    again.args = (message,)
    return again
