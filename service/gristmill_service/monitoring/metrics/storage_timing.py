"""What run stores and shard stores take, measured around their calls: seconds, and calls that failed.

Waits for capacity are a run's own; a run or table that is not found is no failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Histogram

from gristmill.errors import AlreadyExistsError, NotFoundError
from gristmill_service.storage.run_store import OwnedElsewhereError

P = ParamSpec("P")
T = TypeVar("T")

_SECONDS = (0.0001, 0.0005, 0.0025, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0)
_NO_FAILURE = (NotFoundError, AlreadyExistsError, OwnedElsewhereError)
_OPERATIONS = ("publish", "plan", "free", "append", "flush", "compact", "get", "replay")
# Methods of shard stores and run logs, by their operations. Those of run stores return a log, which is measured.
_MEASURED = {**{name: name for name in _OPERATIONS}, "get_all": "get"}
_OPENS = ("create", "open")


class StoreMetrics:
    """Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            "gristmill_store_seconds",
            "Seconds of calls to what keeps shards, rows and events.",
            ("operation",),
            registry=registry,
            buckets=_SECONDS,
        )
        failed = Counter(
            "gristmill_store_errors", "Calls to what keeps them that failed.", ("operation",), registry=registry
        )
        # Looked up once: some are made with each request.
        self._observe = {name: seconds.labels(name).observe for name in _OPERATIONS}
        self._fail = {name: failed.labels(name).inc for name in _OPERATIONS}

    def call(self, operation: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.perf_counter()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, _NO_FAILURE):
                self._fail[operation]()
            raise
        self._observe[operation](time.perf_counter() - begin)
        return result

    def timed(self, store: T) -> T:
        """Returns the shard store, run store or run log with its calls measured, and those of the logs it opens."""
        return cast("T", _Timed(store, self))


class _Timed:
    def __init__(self, store: object, metrics: StoreMetrics) -> None:
        self._store, self._metrics = store, metrics

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name in _OPENS:
            return lambda *args: self._metrics.timed(value(*args))
        if name in _MEASURED:
            # The next access finds it without this.
            value = self.__dict__[name] = partial(self._metrics.call, _MEASURED[name], value)
        return value
