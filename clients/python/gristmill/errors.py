"""All errors that gristmill raises. The service's storage adds subclasses of UnavailableError.

    GristmillError
    ├── InvalidArgumentError (ValueError)       the input is invalid; a retry fails again
    │   ├── UnsupportedError                    the input is valid, but this version does not support it
    │   └── TooLargeError                       the request exceeds the service's limit: send fewer rows per request
    ├── NotFoundError (LookupError)             no such run, batch, shard
    ├── AlreadyExistsError                      the name or key exists with different content
    ├── FailedPreconditionError                 the state does not allow the call: change the state before a retry
    │   ├── StaleIncarnationError               a newer incarnation of the trainer has taken over
    │   ├── BatchFailedError                    the requested batch could not be built; the message says why
    │   └── PrefixUnknownError                  the service does not have the tokens that rows omit: send whole rows
    ├── UnauthenticatedError                    the service requires a token, and none or an unknown one was sent
    ├── PermissionDeniedError                   the token's roles, runs or rank do not allow the call
    ├── ResourceExhaustedError                  a limit is reached: retry after `retry_after_s`
    ├── DeadlineExceededError (TimeoutError)    the awaited result was not ready in time
    └── UnavailableError (ConnectionError)      the service is unreachable or shutting down: retry

Each message says what was wrong, where, the value, and what to do. The pipeline, the service and the clients raise the
same classes. `code` is the name of the gRPC status with which the class is sent.
"""

from __future__ import annotations

from typing import ClassVar


class GristmillError(Exception):
    """The base class of all errors of gristmill."""

    code: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(GristmillError, ValueError):
    code = "INVALID_ARGUMENT"


class UnsupportedError(InvalidArgumentError):
    """The specification defines the setting, but this version does not support it yet."""


class TooLargeError(InvalidArgumentError):
    """The request is larger than the service allows. The client handles it and sends fewer rows per message, so
    `gristmill` does not export this class."""


class NotFoundError(GristmillError, LookupError):
    code = "NOT_FOUND"


class AlreadyExistsError(GristmillError):
    code = "ALREADY_EXISTS"


class FailedPreconditionError(GristmillError):
    code = "FAILED_PRECONDITION"


class StaleIncarnationError(FailedPreconditionError):
    pass


class BatchFailedError(FailedPreconditionError):
    """Batch number `batch` could not be built; the message says why."""

    def __init__(self, message: str, batch: int = -1) -> None:
        super().__init__(message)
        self.batch = batch


class PrefixUnknownError(FailedPreconditionError):
    """The service does not have the tokens that a client omitted. The client handles it and sends the whole rows, so
    `gristmill` does not export this class."""


class UnauthenticatedError(GristmillError):
    code = "UNAUTHENTICATED"


class PermissionDeniedError(GristmillError):
    code = "PERMISSION_DENIED"


class ResourceExhaustedError(GristmillError):
    """A limit is reached, and the service stored nothing of the call. Retry after `retry_after_s` seconds."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(GristmillError, TimeoutError):
    code = "DEADLINE_EXCEEDED"


class UnavailableError(GristmillError, ConnectionError):
    code = "UNAVAILABLE"
