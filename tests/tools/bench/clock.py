"""What the parts of a training step take, elapsed and of the processor."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Spent = Counter[str]


class Clock:
    """Seconds by what they were spent on, and as `cpu NAME` this process's CPU seconds, in all its threads."""

    def __init__(self) -> None:
        self.spent = Spent()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        begin, computed = time.perf_counter(), time.process_time()
        yield
        self.spent[name] += time.perf_counter() - begin  # type: ignore[assignment]
        self.spent[f"cpu {name}"] += time.process_time() - computed  # type: ignore[assignment]

    def each(self, name: str, source: Iterator[Any]) -> Iterator[Any]:
        """What comes, with the time that it takes to come."""
        while True:
            with self.on(name):
                value = next(source, None)
            if value is None:
                return
            yield value
