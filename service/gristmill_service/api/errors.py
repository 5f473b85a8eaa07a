"""Converts errors to gRPC and HTTP answers: statuses, metadata and bodies.

An answer contains the error's message. The message of an unexpected error is only logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from starlette.responses import JSONResponse

from gristmill.errors import BatchFailedError, GristmillError, ResourceExhaustedError

# ALREADY_EXISTS is 409 (conflict). FAILED_PRECONDITION is 412, so that the status distinguishes the two.
STATUSES: dict[str, tuple[grpc.StatusCode, int]] = {
    "INVALID_ARGUMENT": (grpc.StatusCode.INVALID_ARGUMENT, 422),
    "NOT_FOUND": (grpc.StatusCode.NOT_FOUND, 404),
    "ALREADY_EXISTS": (grpc.StatusCode.ALREADY_EXISTS, 409),
    "FAILED_PRECONDITION": (grpc.StatusCode.FAILED_PRECONDITION, 412),
    "RESOURCE_EXHAUSTED": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "DEADLINE_EXCEEDED": (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    "UNAVAILABLE": (grpc.StatusCode.UNAVAILABLE, 503),
    "UNAUTHENTICATED": (grpc.StatusCode.UNAUTHENTICATED, 401),
    "PERMISSION_DENIED": (grpc.StatusCode.PERMISSION_DENIED, 403),
    "INTERNAL": (grpc.StatusCode.INTERNAL, 500),
}

NO_REQUEST, TOO_LARGE = 400, 413
CLOSE = {"Connection": "close"}

INTERNAL_MESSAGE = "internal error; see the service's log for details"
UNAVAILABLE_RETRY_S = 0.5

# gRPC sends the message in HTTP/2 trailers, which clients limit to 8 KiB, and escapes a non-ASCII byte as three bytes.
_MESSAGE_BYTES = 2000
_MESSAGE_CHARACTERS = 8000


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error as both APIs report it. `type` is the name of the Python class that clients raise."""

    code: str
    type: str
    message: str
    retry_after_s: float | None = None
    batch: int | None = None

    @property
    def grpc_status(self) -> grpc.StatusCode:
        return STATUSES[self.code][0]

    @property
    def http_status(self) -> int:
        return STATUSES[self.code][1]

    @property
    def grpc_message(self) -> str:
        encoded = self.message.encode(errors="replace")
        if len(encoded) <= _MESSAGE_BYTES:
            return self.message
        return encoded[:_MESSAGE_BYTES].decode(errors="ignore") + "..."

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Trailing metadata of a gRPC call."""
        trailers = [("gristmill-error", self.type)]
        if self.retry_after_s is not None:
            trailers.append(("grpc-retry-pushback-ms", str(math.ceil(self.retry_after_s * 1000))))
        if self.batch is not None:
            trailers.append(("gristmill-batch", str(self.batch)))
        return tuple(trailers)

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers. Retry-After is rounded up to whole seconds."""
        return {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}

    @property
    def values(self) -> dict[str, object]:
        """The error as JSON."""
        error: dict[str, object] = {"code": self.code, "type": self.type, "message": _shortened(self.message)}
        if self.retry_after_s is not None:
            error["retry_after_s"] = self.retry_after_s
        if self.batch is not None:
            error["batch"] = self.batch
        return error

    @property
    def body(self) -> dict[str, object]:
        """The HTTP body."""
        return {"error": self.values}


def refusal(error: Exception) -> ErrorResponse:
    """Returns the response for an error. It omits the message of an unexpected error, which the caller logs."""
    if not isinstance(error, GristmillError) or error.code not in STATUSES or error.code == "INTERNAL":
        return ErrorResponse("INTERNAL", "GristmillError", INTERNAL_MESSAGE)
    retry_after_s = None
    if isinstance(error, ResourceExhaustedError):
        retry_after_s = error.retry_after_s
    elif error.code == "UNAVAILABLE":
        retry_after_s = UNAVAILABLE_RETRY_S
    batch = error.batch if isinstance(error, BatchFailedError) else None
    # The message may quote a value with an unpaired surrogate, which cannot be encoded.
    message = str(error).encode(errors="backslashreplace").decode()
    return ErrorResponse(error.code, type(error).__name__, message, retry_after_s, batch)


def _shortened(message: str) -> str:
    """Shortens a long message in the middle, because its end usually contains the remedy."""
    half = _MESSAGE_CHARACTERS // 2
    return message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:half]} ... {message[-half:]}"


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the HTTP answer for an error. headers: sent in addition to the error's headers."""
    refused = refusal(error)
    headers = {**refused.headers, **(headers or {})}
    if refused.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refused.body, refused.http_status, headers)


def error_body(code: str, type_: str, message: str) -> dict[str, object]:
    """Returns the body of an HTTP answer with a status for which gristmill has no error class."""
    return {"error": {"code": code, "type": type_, "message": message}}
