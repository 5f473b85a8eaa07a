"""Sums of rows' tokens that can be gone on with: a step is summed without what it begins with being read again."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

from gristmill._wire.steps import TrajectoryKey
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.events import RowRef, StoredRow

# Of so many rows; each takes about 1 kB.
_MOST = 16_384


class Sum(NamedTuple):
    """Sums over some tokens: how many, their CRC-32, and their digest; a copy of the digest can be continued."""

    tokens: int
    checksum: int
    state: xxh3_128

    @classmethod
    def of_nothing(cls) -> Sum:
        return cls(0, 0, xxh3_128())

    def and_also(self, tokens: memoryview) -> Sum:
        """With these tokens behind them; int32."""
        state = self.state.copy()
        state.update(tokens)
        return Sum(self.tokens + len(tokens), zlib.crc32(tokens, self.checksum), state)

    @property
    def digest(self) -> bytes:
        return self.state.digest()


def digest_of(first: Sum | None, tokens: memoryview) -> bytes:
    """The digest of tokens, int32, that none are to follow. first: the sum of those before them, if there are any."""
    if first is None:
        return xxh3_128_digest(tokens)
    state = first.state.copy()
    state.update(tokens)
    return state.digest()


class TokenSums:
    """Sums of the rows as which next steps are likely to begin: each trajectory's last row. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[TrajectoryKey, RowRef] = {}
        self.known: dict[RowRef, Sum] = {}

    def note(self, rows: Sequence[StoredRow], outcomes: Sequence[Outcome], sums: Sequence[Sum | None]) -> None:
        """Remembers those of rows that were accepted. sums: None of rows that end their trajectory, whose others are
        forgotten."""
        with self._lock:
            if not self._last and not any(sums):
                return
            for row, outcome, found in zip(rows, outcomes, sums, strict=True):
                if outcome is Outcome.ACCEPTED:
                    self.known.pop(self._last.pop(row.trajectory, row.ref), None)
                    if found is not None:
                        self._last[row.trajectory], self.known[row.ref] = row.ref, found
            while len(self._last) > _MOST:
                self.known.pop(self._last.pop(next(iter(self._last))), None)
