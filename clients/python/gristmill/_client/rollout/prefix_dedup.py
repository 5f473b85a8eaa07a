"""Omit the tokens of a row that the service already has, because a turn's prompt begins with the previous step.

A conversation of T turns is then sent once, not T / 2 times. A service that does not have the previous step, for
example after a failover, refuses the rows, and the client sends them whole.
"""

from __future__ import annotations

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

# A shorter prefix saves less than its length and checksum cost.
_LEAST_TOKENS = 16
# The memory limit for last steps of trajectories whose rows are sent by `submit`. Beyond it, the oldest are forgotten.
_MOST_BYTES = 256 << 20


class LastStep(NamedTuple):
    """The last step of a trajectory so far.

    tokens: int32, the step's prompt and response; checksum: their CRC-32. columns: the step's shared declared columns.
    partition: the step's, with which alone it merges.
    """

    attempt: int
    step: int
    tokens: NDArray[np.int32]
    checksum: int
    columns: frozenset[str]
    partition: str


def follow(before: LastStep | None, table: Steps, row: int, shared: frozenset[str]) -> tuple[Prefix, LastStep | None]:
    """Returns the prefix of the row that the previous step also has, and the row as the new last step.

    before: the last step of the row's trajectory, if known. shared: declared columns whose values are omitted together
    with their tokens (`ColumnSpec.is_shared`). The new last step is None if the trajectory ends with this row.
    """
    step, attempt, tokens = int(table.steps[row]), int(table.attempts[row]), table.tokens[row]
    partition = partition_of(table, row)
    columns = frozenset(name for name in shared & table.extras.keys() if table.extras[name].given[row])
    length = checksum = 0
    left_out: frozenset[str] = frozenset()
    if before is not None and (before.attempt, before.step) == (attempt, step - 1):
        length = _common(before.tokens, tokens[: int(table.prompt_lengths[row])])
        if length == len(before.tokens):
            checksum = before.checksum
            if partition == before.partition:
                # The service merges the two steps into one row, with the values of the first step.
                left_out = columns & before.columns
        elif length:
            checksum = zlib.crc32(bytes_of(tokens[:length]))
    prefix = Prefix(length, checksum, left_out) if length >= _LEAST_TOKENS else WHOLE
    if table.is_last_steps[row]:
        return prefix, None
    if 2 * tokens.nbytes < table.tokens.values.nbytes:
        # A view would keep the whole table in memory.
        tokens = tokens.copy()
    return prefix, LastStep(attempt, step, tokens, zlib.crc32(bytes_of(tokens[length:]), checksum), columns, partition)


def partition_of(table: Steps, row: int) -> str:
    return "" if table.partitions is None else table.partitions[row]


class _LastSteps:
    """The last steps of trajectories whose rows are sent by `submit`, by key. For one thread."""

    def __init__(self, most_bytes: int) -> None:
        self._steps: dict[TrajectoryKey, LastStep] = {}
        self._bytes, self._most_bytes = 0, most_bytes

    def take(self, key: TrajectoryKey) -> LastStep | None:
        step = self._steps.pop(key, None)
        self._bytes -= 0 if step is None else step.tokens.nbytes
        return step

    def put(self, key: TrajectoryKey, step: LastStep) -> None:
        self._steps[key] = step
        self._bytes += step.tokens.nbytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._steps.pop(next(iter(self._steps))).tokens.nbytes


class RequestEncoder:
    """Encodes rows as requests to a run, without tokens that the service has. Only the sender's worker calls it."""

    def __init__(self, run: str, compresses: bool, most_bytes: int = _MOST_BYTES) -> None:
        self.run = run
        self._compresses = compresses
        self._last_steps = _LastSteps(most_bytes)
        self._shared: frozenset[str] = frozenset()

    def share(self, columns: frozenset[str]) -> None:
        """Sets the declared columns whose values are omitted together with their tokens (`ColumnSpec.is_shared`)."""
        self._shared = columns

    def encode(self, entries: Sequence[PendingRow]) -> bytes:
        """Returns the request for these rows."""
        self._find_prefixes(entries)
        for entry in entries:
            if entry.table.extras:
                _complete(entry)
        request = submit_codec.encode(self.run, tables_of(entries), *_left_out(entries), by_row=True)
        return submit_codec.compressed(request) if self._compresses else request

    def _find_prefixes(self, entries: Sequence[PendingRow]) -> None:
        """Sets the prefix of rows that have none yet, which are rows sent by `submit`."""
        table: Steps | None = None
        for entry in entries:
            if entry.table is not table:
                table = entry.table
                are_alone = (table.is_last_steps & (table.steps == 0)).tolist()
            if entry.prefix is None:
                if are_alone[entry.row]:
                    entry.prefix = WHOLE
                    continue
                before = self._last_steps.take(entry.key)
                entry.prefix, last = follow(before, table, entry.row, self._shared)
                if last is not None:
                    self._last_steps.put(entry.key, last)


def _complete(entry: PendingRow) -> None:
    """Adds the values that a row shares with the previous step, unless their tokens are omitted."""
    extras, prefix = entry.table.extras, entry.prefix or WHOLE
    incomplete = {name: extra for name, extra in extras.items() if extra.before}
    if any(name not in prefix.columns or extra.left_out != prefix.length for name, extra in incomplete.items()):
        whole = {name: extra.whole() for name, extra in extras.items()}
        entry.table = replace(entry.table, extras=whole)


def _left_out(entries: Sequence[PendingRow]) -> tuple[Prefixes | None, dict[str, Int64s]]:
    """Returns the entries' prefixes (None if all are whole), and how many values each entry omits, by column."""
    prefixes = [entry.prefix or WHOLE for entry in entries]
    if prefixes.count(WHOLE) == len(prefixes):
        return None, {}
    lengths = np.array([prefix.length for prefix in prefixes], np.int64)
    names = frozenset().union(*(prefix.columns for prefix in prefixes))
    columns = {
        name: np.array([_values_left(entry, prefix, name) for entry, prefix in zip(entries, prefixes, strict=True)])
        for name in names
    }
    return Prefixes(lengths, np.array([prefix.checksum for prefix in prefixes], np.uint32)), columns


def _values_left(entry: PendingRow, prefix: Prefix, name: str) -> int:
    """Returns how many values that the row stores itself are not sent."""
    if name not in prefix.columns:
        return 0
    return 0 if entry.table.extras[name].before else prefix.length


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Returns the length of the common prefix."""
    length = min(len(first), len(second))
    first, second = first[:length], second[:length]
    if np.array_equal(first, second):
        return length
    return int((first != second).argmax())
