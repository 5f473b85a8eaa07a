"""The tree of all errors that gristmill raises. The service's storage adds kinds of UnavailableError of its own to it.

    GristmillError
    ├── InvalidArgumentError (ValueError)       the input is wrong and stays wrong
    │   ├── UnsupportedError                    understood, but not built: refused rather than half done
    │   └── TooLargeError                       the service takes smaller requests only: send fewer rows in each
    ├── NotFoundError (LookupError)             no such run, batch, shard
    ├── AlreadyExistsError                      the same name or key with other content
    ├── FailedPreconditionError                 right call, wrong moment: it must not simply be retried
    │   ├── StaleIncarnationError               a newer incarnation of the trainer has taken over
    │   ├── BatchFailedError                    the batch asked for could not be made; says why
    │   └── PrefixUnknownError                  the service does not have the tokens that rows omit: send them whole
    ├── UnauthenticatedError                    the service asks for a token, and none or an unknown one was sent
    ├── PermissionDeniedError                   the token's roles, runs or rank do not allow the call
    ├── ResourceExhaustedError                  a limit is reached: retry after `retry_after_s`
    ├── DeadlineExceededError (TimeoutError)    what was waited for did not come in time
    └── UnavailableError (ConnectionError)      the service cannot be reached or is shutting down: retry

Each message says what was wrong, where, the value, and what to do. The same class is raised by the pipeline, the
service and the clients; `code` is the name of the gRPC status that carries it over the wire.
"""

from __future__ import annotations

from typing import ClassVar


class GristmillError(Exception):
    """The base of every error of gristmill."""

    code: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(GristmillError, ValueError):
    code = "INVALID_ARGUMENT"


class UnsupportedError(InvalidArgumentError):
    """A setting that the specification names and this version does not offer yet."""


class TooLargeError(InvalidArgumentError):
    """The request is larger than the service takes. The client handles it by sending fewer rows in a message, so that
    this class is not one of `gristmill`'s names."""


class NotFoundError(GristmillError, LookupError):
    code = "NOT_FOUND"


class AlreadyExistsError(GristmillError):
    code = "ALREADY_EXISTS"


class FailedPreconditionError(GristmillError):
    code = "FAILED_PRECONDITION"


class StaleIncarnationError(FailedPreconditionError):
    pass


class BatchFailedError(FailedPreconditionError):
    """Batch number `batch` could not be made; the message gives the reason."""

    def __init__(self, message: str, batch: int = -1) -> None:
        super().__init__(message)
        self.batch = batch


class PrefixUnknownError(FailedPreconditionError):
    """The service does not have the tokens that a client left out. The client handles it by sending the whole rows, so
    that this class is not one of `gristmill`'s names."""


class UnauthenticatedError(GristmillError):
    code = "UNAUTHENTICATED"


class PermissionDeniedError(GristmillError):
    code = "PERMISSION_DENIED"


class ResourceExhaustedError(GristmillError):
    """A limit is reached. Try again after `retry_after_s` seconds; nothing of the call was stored."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(GristmillError, TimeoutError):
    code = "DEADLINE_EXCEEDED"


class UnavailableError(GristmillError, ConnectionError):
    code = "UNAVAILABLE"
