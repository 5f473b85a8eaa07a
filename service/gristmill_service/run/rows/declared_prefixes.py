"""Check rows that omit the first tokens that they share with the step before, and compute their digests as if they were
whole.

To compare these tokens, a running sum over the tokens of each trajectory's last row is remembered. Stored tokens are
read only if this sum is unknown, or if a row shares only a part of the step before.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import InvalidArgumentError, NotFoundError, PrefixUnknownError, UnavailableError
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.described_rows import RowDigests, RowKeys, describe_rows
from gristmill_service.run.machine.events import GroupKey, RowName, RowRef, StoredRow
from gristmill_service.run.machine.state import State
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer
from gristmill_service.run.rows.row_gathering import Load, Tables, columns_of, tokens_of

# Each sum takes about 1 kB.
_MOST_SUMS = 16_384
NO_COLUMNS = frozenset[str]()


class TokenSum(NamedTuple):
    """A running sum of a row's first tokens: their number, their CRC-32, and a hash that more tokens can be added to.

    columns: the declared columns with `is_shared` that the row has.
    """

    tokens: int
    checksum: int
    state: xxh3_128
    columns: frozenset[str] = NO_COLUMNS

    def plus(self, tokens: memoryview, columns: frozenset[str] = NO_COLUMNS) -> TokenSum:
        """Returns the sum after these further int32 tokens, for a row with these columns."""
        state = self.state.copy()
        state.update(tokens)
        return TokenSum(self.tokens + len(tokens), zlib.crc32(tokens, self.checksum), state, columns)


_NOTHING = TokenSum(0, 0, xxh3_128())


class TokenSums:
    """Remembers the sum of each trajectory's last row, because the next step probably begins with that row's tokens."""

    def __init__(self) -> None:
        self._last: dict[TrajectoryKey, tuple[RowRef, TokenSum]] = {}

    def of(self, row: StoredRow) -> TokenSum | None:
        """Returns the sum of this row; None if it is not remembered."""
        ref, total = self._last.get(row.trajectory, (None, None))
        return total if ref == row.ref else None

    def note(self, rows: Sequence[StoredRow], outcomes: Sequence[Outcome], sums: Sequence[TokenSum | None]) -> None:
        """Stores the sums of accepted rows, and forgets those of trajectories that end. sums: None for a last row."""
        if not self._last and not any(sums):
            return
        for row, outcome, total in zip(rows, outcomes, sums, strict=True):
            if outcome is Outcome.ACCEPTED:
                # Re-inserting the sum makes it the last one to be forgotten.
                self._last.pop(row.trajectory, None)
                if total is not None:
                    self._last[row.trajectory] = row.ref, total
        while len(self._last) > _MOST_SUMS:
            del self._last[next(iter(self._last))]


class StepBefore(NamedTuple):
    """The step before a row. picked: None if `total` suffices to check the row."""

    total: TokenSum | None
    picked: PickedRow | None = None


class Prepared(NamedTuple):
    """The rows as the state will store them. sums: for `TokenSums.note`; None for rows that end their trajectory."""

    rows: list[StoredRow]
    sums: Sequence[TokenSum | None]


def steps_before(
    state: State, rows: RowBuffer, sums: TokenSums, keys: RowKeys, prefixes: Prefixes
) -> dict[int, StepBefore]:
    """Returns the step before each row that omits its first tokens, if the run has that step."""
    # If a trajectory has several steps in the request, a later one may share only a part of an earlier one.
    are_alone = len({*keys.trajectories}) == len(keys.trajectories)
    before: dict[int, StepBefore] = {}
    to_pick: dict[GroupKey, dict[int, StoredRow]] = {}
    for row in np.flatnonzero(prefixes.lengths).tolist():
        stored = _step_before(state, keys.trajectories[row], keys.names[row])
        if stored is None:
            continue
        total = sums.of(stored)
        before[row] = StepBefore(total)
        if total is None or total.tokens != prefixes.lengths[row] or not are_alone:
            to_pick.setdefault(stored.group, {})[row] = stored
    picked = rows.pick((state.open[group], steps.values()) for group, steps in to_pick.items())
    for row, one in zip(chain.from_iterable(to_pick.values()), picked, strict=True):
        before[row] = StepBefore(before[row].total, one)
    return before


def _step_before(state: State, key: TrajectoryKey, name: RowName) -> StoredRow | None:
    group = state.open.get(GroupKey(key.round, key.uid))
    trajectory = None if group is None else group.trajectories.get(key.sample)
    if trajectory is None or trajectory.attempt != name.attempt:
        return None
    return trajectory.rows.get(name.step - 1)


def prepare(
    table: int,
    steps: Steps,
    keys: RowKeys,
    prefixes: Prefixes | None,
    before: Mapping[int, StepBefore],
    repeated: Mapping[str, bool],
    load: Load,
) -> Prepared:
    """Describes the rows of a request as the state will store them, with the digests of whole rows, and checks the
    omitted tokens.

    table: the number of the rows' table. prefixes: the omitted tokens of each row; None if nothing is omitted. before:
        from `steps_before`. repeated: as in `RowDigests`. load: reads a stored table. Raises PrefixUnknownError for a
        row whose step before is missing or unreadable, has other tokens, or does not have the omitted values.
    """
    assert (steps.prefix_lengths is None) == (prefixes is None), "what was left out comes with its checksums"
    sent = steps.tokens.memory()
    columns = _columns(steps, repeated) if steps.extras else [NO_COLUMNS] * len(sent)
    declared = None if prefixes is None else _Declared(steps, keys, prefixes, before, columns, load)
    digests: list[bytes] = []
    sums: list[TokenSum | None] = []
    for row, is_last in enumerate(steps.is_last_steps.tolist()):
        beginning = None if declared is None else declared.beginning(row)
        total = None
        if is_last and beginning is None:
            # Most rows that end their trajectory need no sum.
            digests.append(xxh3_128_digest(sent[row]))
        else:
            total = (beginning or _NOTHING).plus(sent[row], columns[row])
            digests.append(total.state.digest())
            if declared is not None and not is_last:
                declared.add(row, total)
        sums.append(None if is_last else total)
    parents = [None] * len(sent) if declared is None else declared.parents
    rows = describe_rows(steps, keys, table, RowDigests(steps, repeated), digests, parents)
    return Prepared(rows, sums)


def _columns(steps: Steps, repeated: Mapping[str, bool]) -> list[frozenset[str]]:
    """Returns, for each row, the declared columns with `is_shared` that the row has."""
    shared = [name for name, is_partial in repeated.items() if not is_partial and name in steps.extras]
    extras = {name: steps.extras[name].given.tolist() for name in shared}
    if not extras:
        return [NO_COLUMNS] * len(steps)
    return [frozenset(name for name, given in extras.items() if given[row]) for row in range(len(steps))]


class _Declared:
    """The rows of a request that omit their first tokens. Call `beginning`, then `add`, for each row in order.

    parents: for each row, its `StoredRow.parent`.
    """

    def __init__(
        self,
        steps: Steps,
        keys: RowKeys,
        prefixes: Prefixes,
        before: Mapping[int, StepBefore],
        columns: Sequence[frozenset[str]],
        load: Load,
    ) -> None:
        self._steps, self._keys, self._before, self._columns = steps, keys, before, columns
        self._sent, self._full_lengths = steps.tokens.memory(), steps.sequence_lengths
        self._lengths, self._checksums = prefixes.lengths.tolist(), prefixes.checksums.tolist()
        self._tables = Tables(load)
        self._added: dict[tuple[TrajectoryKey, RowName], tuple[int, TokenSum]] = {}
        # The step before each row: the index of a row of the request, or a stored row.
        self._sources: list[int | PickedRow | None] = [None] * len(steps)
        self.parents: list[RowName | None] = [None] * len(steps)

    def add(self, row: int, total: TokenSum) -> None:
        """Adds a row, whose tokens later rows may share."""
        self._added[self._keys.trajectories[row], self._keys.names[row]] = row, total

    def beginning(self, row: int) -> TokenSum | None:
        """Returns the sum of the row's omitted tokens; None if it omits none. Raises PrefixUnknownError."""
        length, name = self._lengths[row], self._keys.names[row]
        if not length:
            return None
        parent = RowName(name.sample, name.attempt, name.step - 1)
        total = self._find(row, parent)
        if total is None or total.tokens != length:
            total = self._read(row, length, total)
        if total.tokens < length or total.checksum != self._checksums[row]:
            raise PrefixUnknownError(
                f"{self._steps.name(row)}: the previous step does not begin with the {length} omitted tokens; resend"
            )
        if lacks := self._lacking(row) - total.columns:
            raise PrefixUnknownError(
                f"{self._steps.name(row)}: values of {min(lacks)} were omitted, but the previous step has none; send "
                "them"
            )
        self.parents[row] = parent
        return total

    def _find(self, row: int, parent: RowName) -> TokenSum | None:
        """Finds the step before the row. Returns the sum of that step; None if the sum is unknown."""
        added = self._added.get((self._keys.trajectories[row], parent))
        if added is not None:
            self._sources[row], total = added
            return total
        step = self._before.get(row)
        if step is None:
            raise self._unknown(row)
        self._sources[row] = step.picked
        return step.total

    def _read(self, row: int, length: int, total: TokenSum | None) -> TokenSum:
        """Computes the sum of the first tokens of the step before. total: the sum of all its tokens, if known."""
        beginning = _NOTHING
        try:
            for piece in self._first_tokens(row, length):
                beginning = beginning.plus(piece)
            columns = self._stored_columns(row) if total is None else total.columns
        except (NotFoundError, UnavailableError, InvalidArgumentError):
            raise self._unknown(row) from None
        return beginning._replace(columns=columns)

    def _first_tokens(self, row: int, count: int) -> list[memoryview]:
        """Returns the first `count` tokens of the step before, or all if it has fewer, in pieces."""
        pieces: list[memoryview] = []
        source = self._sources[row]
        while isinstance(source, int):
            # Tokens that an earlier row of the request omits come from the step before that row.
            length = self._lengths[source]
            if count > length:
                pieces.append(self._sent[source][: count - length])
                count = length
            if not count:
                return pieces[::-1]
            source = self._sources[source]
        assert source is not None, "a step of which tokens are needed was picked"
        return [*tokens_of(source, count, self._tables), *pieces[::-1]]

    def _stored_columns(self, row: int) -> frozenset[str]:
        source = self._sources[row]
        assert isinstance(source, PickedRow), "only a stored row may have no sum"
        return columns_of(source, self._tables)

    def _lacking(self, row: int) -> frozenset[str]:
        """Returns the shared columns whose first values the row omits, like its tokens."""
        extras, full = self._steps.extras, self._full_lengths[row]
        return frozenset(name for name in self._columns[row] if extras[name].values.lengths[row] < full)

    def _unknown(self, row: int) -> PrefixUnknownError:
        return PrefixUnknownError(f"{self._steps.name(row)}: the run does not have the previous step; send all tokens")
