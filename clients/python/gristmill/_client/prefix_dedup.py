"""Tokens that the service has already are not sent again: a turn begins with those of its trajectory's step before.

A conversation of T turns so crosses the wire once, not T / 2 times. Nothing depends on it: a service that has not got
the step before, as after a failover, says so, and the rows are sent whole.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._client.delivery import PendingRow, tables_of
from gristmill._wire import submit_codec
from gristmill._wire.columns import bytes_of
from gristmill._wire.row_codec import Prefixes
from gristmill._wire.steps import TrajectoryKey

# A shorter prefix is not worth its length and checksum.
_LEAST_TOKENS = 16
# Bytes of previous steps that are remembered, over all trajectories. The next turns of those forgotten are sent whole.
_MOST_BYTES = 256 << 20


class _Step(NamedTuple):
    """checksum: CRC-32 of all its tokens."""

    attempt: int
    step: int
    tokens: NDArray[np.int32]
    checksum: int


class PreviousSteps:
    """The step that was sent last of each trajectory that goes on. Thread-safe for different trajectories."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._steps: dict[TrajectoryKey, _Step] = {}
        self._bytes, self._most_bytes = 0, most_bytes

    def prefixes(self, entries: Sequence[PendingRow]) -> Prefixes | None:
        """The tokens of the entries that are left out; None where there are none. An entry's prefix is found once."""
        for entry in entries:
            if entry.prefix is None:
                entry.prefix = self._prefix(entry)
        found = np.array([entry.prefix for entry in entries], np.int64)
        return Prefixes(found[:, 0], found[:, 1].astype(np.uint32)) if found[:, 0].any() else None

    def _prefix(self, entry: PendingRow) -> tuple[int, int]:
        table, row = entry.table, entry.row
        step, is_last = int(table.steps[row]), bool(table.is_last_steps[row])
        if is_last and not step:
            return 0, 0
        attempt, tokens = int(table.attempts[row]), table.tokens[row]
        before = self._take(entry.key)
        length = checksum = 0
        if before is not None and (before.attempt, before.step) == (attempt, step - 1):
            length = _common(before.tokens, tokens[: int(table.prompt_lengths[row])])
            if length == len(before.tokens):
                checksum = before.checksum
            elif length:
                checksum = zlib.crc32(bytes_of(tokens[:length]))
        if not is_last:
            if 2 * tokens.nbytes < table.tokens.values.nbytes:
                # A view would keep all of a large table alive.
                tokens = tokens.copy()
            rest = zlib.crc32(bytes_of(tokens[length:]), checksum)
            self._put(entry.key, _Step(attempt, step, tokens, rest))
        return (length, checksum) if length >= _LEAST_TOKENS else (0, 0)

    def _take(self, key: TrajectoryKey) -> _Step | None:
        with self._lock:
            step = self._steps.pop(key, None)
            self._bytes -= 0 if step is None else step.tokens.nbytes
            return step

    def _put(self, key: TrajectoryKey, step: _Step) -> None:
        with self._lock:
            self._steps[key] = step
            self._bytes += step.tokens.nbytes
            while self._bytes > self._most_bytes:
                self._bytes -= self._steps.pop(next(iter(self._steps))).tokens.nbytes


class RequestEncoder:
    """Encodes rows as requests to a run, without the tokens that the service has. Thread-safe as PreviousSteps is."""

    def __init__(self, run: str, compresses: bool) -> None:
        self.run = run
        self._compresses = compresses
        self._previous = PreviousSteps()

    def encode(self, entries: Sequence[PendingRow]) -> bytes:
        request = submit_codec.encode(self.run, tables_of(entries), self._previous.prefixes(entries))
        return submit_codec.compressed(request) if self._compresses else request


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """The number of tokens that both begin with."""
    length = min(len(first), len(second))
    first, second = first[:length], second[:length]
    if np.array_equal(first, second):
        return length
    return int((first != second).argmax())
