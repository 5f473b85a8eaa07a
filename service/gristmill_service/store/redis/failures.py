"""Redis' errors as gristmill's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from gristmill.errors import ResourceExhaustedError, UnavailableError

# A cluster that has no primary for a slot says so in an exception that is no RedisError.
UNREACHABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.RedisClusterException,
)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raises ResourceExhaustedError where Redis is full, and UnavailableError where it cannot be reached or has no
    primary for the moment. what: was being done to what."""
    try:
        yield
    except UNREACHABLE as error:
        raise UnavailableError(f"{what}: Redis is not there: {error}") from error
    except exceptions.ResponseError as error:
        if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in str(error):
            raise ResourceExhaustedError(
                f"{what}: it does not fit into Redis, which is full; raise its maxmemory, or lower max_buffered_batches"
            ) from error
        raise
