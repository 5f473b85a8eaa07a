"""Tokens that the service has already are not sent again: a turn begins with those of its trajectory's step before.

A conversation of T turns so crosses the wire once, not T / 2 times. Nothing depends on it: a service that has not got
the step before, as after a failover, says so, and the rows are sent whole.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._client.rollout.delivery import WHOLE, PendingRow, Prefix, tables_of
from gristmill._wire.codecs import submit_codec
from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.columns import Int64s, bytes_of
from gristmill._wire.steps import Steps, TrajectoryKey

# A shorter prefix is not worth its length and checksum.
_LEAST_TOKENS = 16
# Bytes of previous steps that are remembered, over all trajectories. The next turns of those forgotten are sent whole.
_MOST_BYTES = 256 << 20


class _Step(NamedTuple):
    """checksum: CRC-32 of all its tokens. columns: the shared declared columns that it has."""

    attempt: int
    step: int
    tokens: NDArray[np.int32]
    checksum: int
    columns: frozenset[str]


class PreviousSteps:
    """The step that was sent last of each trajectory that goes on. Thread-safe for different trajectories."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._lock = threading.Lock()
        self._steps: dict[TrajectoryKey, _Step] = {}
        self._bytes, self._most_bytes = 0, most_bytes
        self.shared_columns: frozenset[str] = frozenset()
        """The declared columns whose values are left out with the tokens (`ColumnSpec.is_shared`)."""

    def find(self, entries: Sequence[PendingRow]) -> None:
        """Finds what of the entries is left out, once for each."""
        table: Steps | None = None
        for entry in entries:
            if entry.table is not table:
                table = entry.table
                are_alone = (table.is_last_steps & (table.steps == 0)).tolist()
            if entry.prefix is None:
                # Of a trajectory of one step nothing is known, and nothing goes on.
                entry.prefix = WHOLE if are_alone[entry.row] else self._prefix(entry)

    def _prefix(self, entry: PendingRow) -> Prefix:
        table, row = entry.table, entry.row
        step, is_last = int(table.steps[row]), bool(table.is_last_steps[row])
        attempt, tokens = int(table.attempts[row]), table.tokens[row]
        columns = frozenset(name for name in self.shared_columns & table.extras.keys() if table.extras[name].given[row])
        before = self._take(entry.key)
        length = checksum = 0
        shared: frozenset[str] = frozenset()
        if before is not None and (before.attempt, before.step) == (attempt, step - 1):
            length = _common(before.tokens, tokens[: int(table.prompt_lengths[row])])
            if length == len(before.tokens):
                # The two steps will be one row, in which the values of the first are the ones that count.
                checksum, shared = before.checksum, columns & before.columns
            elif length:
                checksum = zlib.crc32(bytes_of(tokens[:length]))
        if not is_last:
            if 2 * tokens.nbytes < table.tokens.values.nbytes:
                # A view would keep all of a large table alive.
                tokens = tokens.copy()
            rest = zlib.crc32(bytes_of(tokens[length:]), checksum)
            self._put(entry.key, _Step(attempt, step, tokens, rest, columns))
        return Prefix(length, checksum, shared) if length >= _LEAST_TOKENS else WHOLE

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
    """Encodes rows as requests to a run, without what the service has. Thread-safe as PreviousSteps is."""

    def __init__(self, run: str, compresses: bool) -> None:
        self.run = run
        self._compresses = compresses
        self._previous = PreviousSteps()

    def share(self, columns: frozenset[str]) -> None:
        """From now on leaves out values of these columns where the service has them."""
        self._previous.shared_columns = columns

    def encode(self, entries: Sequence[PendingRow]) -> bytes:
        """The request for these rows."""
        self._previous.find(entries)
        for entry in entries:
            if entry.table.extras:
                _complete(entry)
        request = submit_codec.encode(self.run, tables_of(entries), *_left_out(entries))
        return submit_codec.compressed(request) if self._compresses else request


def _complete(entry: PendingRow) -> None:
    """Puts values back that the row lacks, unless the tokens are left out that they are of."""
    extras, prefix = entry.table.extras, entry.prefix or WHOLE
    lacking = {name: extra for name, extra in extras.items() if extra.before}
    if any(name not in prefix.columns or extra.left_out != prefix.length for name, extra in lacking.items()):
        whole = {name: extra.whole() for name, extra in extras.items()}
        entry.table = replace(entry.table, extras=whole)


def _left_out(entries: Sequence[PendingRow]) -> tuple[Prefixes | None, dict[str, Int64s]]:
    """The tokens of the entries that are left out, None where there are none; and of each column how many values."""
    found = [entry.prefix or WHOLE for entry in entries]
    if found.count(WHOLE) == len(found):
        return None, {}
    lengths = np.array([prefix.length for prefix in found], np.int64)
    names = frozenset().union(*(prefix.columns for prefix in found))
    columns = {
        name: np.array([_values_left(entry, prefix, name) for entry, prefix in zip(entries, found, strict=True)])
        for name in names
    }
    return Prefixes(lengths, np.array([prefix.checksum for prefix in found], np.uint32)), columns


def _values_left(entry: PendingRow, prefix: Prefix, name: str) -> int:
    """How many of the row's values are not sent; those that it lacks are not among them."""
    if name not in prefix.columns:
        return 0
    return 0 if entry.table.extras[name].before else prefix.length


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """The number of tokens that both begin with."""
    length = min(len(first), len(second))
    first, second = first[:length], second[:length]
    if np.array_equal(first, second):
        return length
    return int((first != second).argmax())
