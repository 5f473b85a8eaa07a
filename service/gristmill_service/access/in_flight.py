"""Calls that are being answered, of a caller and of a run, where their number is limited."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.caller import Caller

_RETRY_AFTER_S = 1.0


class InFlight:
    """Thread-safe. Calls that wait and streams count until they end. most_a_run: None: any number."""

    def __init__(self, most_a_run: int | None) -> None:
        self.most_a_run = most_a_run
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def call(self, found: Caller, run: str | None) -> Iterator[None]:
        """Around the answering of a call. Raises ResourceExhaustedError where it would be one too many."""
        limits = []
        if found.max_requests is not None:
            limits.append(("caller", found.name, found.max_requests, "max_requests of the token"))
        if self.most_a_run is not None and run is not None:
            limits.append(("run", run, self.most_a_run, "the service's max_run_requests"))
        with self._lock:
            for kind, name, most, setting in limits:
                if self._counts[kind, name] >= most:
                    raise ResourceExhaustedError(
                        f"{self._counts[kind, name]} calls of {kind} {name!r} are being answered, where {setting} "
                        f"allows {most}; wait for their answers, or raise {setting}",
                        _RETRY_AFTER_S,
                    )
            for kind, name, *_ in limits:
                self._counts[kind, name] += 1
        try:
            yield
        finally:
            with self._lock:
                for kind, name, *_ in limits:
                    self._counts[kind, name] -= 1
                    if not self._counts[kind, name]:
                        del self._counts[kind, name]

    def counts(self) -> Mapping[tuple[str, str], int]:
        """How many there are now, by ("caller" or "run", name)."""
        with self._lock:
            return dict(self._counts)
