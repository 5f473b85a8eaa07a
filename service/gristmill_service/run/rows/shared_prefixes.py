"""Which tokens of submitted rows the run has already: rows that begin as an earlier one are kept without them.

A row may come without what the step before it begins with; what comes whole is compared with that step, and with a row
of another sample of its prompt. Nothing is decided here: a row is judged as if it had come whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.columns import Array, Ragged
from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, PrefixUnknownError, UnavailableError
from gristmill_service.pipeline.rows.joins import common_prefix
from gristmill_service.run.machine.events import GroupKey, RowName, RowRef, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer
from gristmill_service.run.rows.row_gathering import columns_of, tokens_of
from gristmill_service.run.rows.token_sums import Sum, digest_of
from gristmill_service.storage.row_tables import Stored

LEAST_TOKENS = 16
"""A shorter beginning is kept with the row."""

Tokens = Sequence[Array]
"""A row's tokens, in pieces."""


class Kept(NamedTuple):
    """Rows as they are kept.

    steps: without the tokens that others have. parents: of each row, who has those with which it begins, or None.
    digests: of each row, of all its tokens. sums: of the rows after which their trajectories go on, else None.
    """

    steps: Steps
    parents: Sequence[RowName | None]
    digests: Sequence[bytes]
    sums: Sequence[Sum | None]


class _Known(NamedTuple):
    """A row that others may begin as. tokens: gives all of them, None where they are not at hand. columns: gives the
    declared ones that it has. sum: of its tokens, where that is known."""

    name: RowName
    tokens: Callable[[], Tokens | None]
    columns: Callable[[], frozenset[str]]
    sum: Sum | None


class _Start(NamedTuple):
    """With what a row begins: whose first tokens, how many, and the sum of those that were not sent."""

    parent: RowName | None
    length: int
    left_out: Sum | None = None


_NOTHING = _Start(None, 0)


def rows_before(state: State, rows: RowBuffer, steps: Steps) -> dict[int, PickedRow]:
    """For each row, as far as the run has it, the step before; else the first step of another sample of its prompt."""
    wanted: dict[GroupKey, dict[int, StoredRow]] = {}
    for row, (key, name) in enumerate(_names(steps)):
        group = state.open.get(key)
        if group is not None and (found := _before(group, name)) is not None:
            wanted.setdefault(key, {})[row] = found
    picked = rows.pick((state.open[key], found.values()) for key, found in wanted.items())
    return dict(zip((row for found in wanted.values() for row in found), picked, strict=True))


def _names(steps: Steps) -> Iterator[tuple[GroupKey, RowName]]:
    columns = (steps.rounds, steps.samples, steps.attempts, steps.steps)
    for uid, round_, sample, attempt, step in zip(steps.uids, *(column.tolist() for column in columns), strict=True):
        yield GroupKey(round_, uid), RowName(sample, attempt, step)


def _before(group: Group, name: RowName) -> StoredRow | None:
    own = group.trajectories.get(name.sample)
    if own is not None and own.attempt == name.attempt and (before := own.rows.get(name.step - 1)) is not None:
        return before
    others = (other.rows.get(0) for sample, other in group.trajectories.items() if sample != name.sample)
    return next((row for row in others if row is not None), None)


def without_shared(
    steps: Steps,
    prefixes: Prefixes | None,
    before: Mapping[int, PickedRow],
    shared: Collection[str],
    sums: Mapping[RowRef, Sum],
) -> Kept:
    """The rows without the tokens with which rows begin that the run has, or that come before them in the request.

    prefixes: what was not sent, of the steps before. before: as `rows_before` finds them. shared: the columns of which
    rows may lack the values of what was not sent. sums: of rows that the run has, as far as they are known. Raises
    PrefixUnknownError naming a row whose step before is not there, has other tokens, or lacks such values.
    """
    assert (steps.prefix_lengths is None) == (prefixes is None), "what was not sent comes with its checksums"
    request = _Request(steps, prefixes, shared, sums)
    starts = [request.start(row, key, name, before.get(row)) for row, (key, name) in enumerate(_names(steps))]
    kept = steps
    if any(start.length for start in starts):
        lengths = np.array([start.length for start in starts], np.int64)
        cut = lengths if prefixes is None else lengths - prefixes.lengths
        own = Ragged(steps.tokens.values, steps.tokens.starts + cut, steps.tokens.lengths - cut)
        kept = replace(steps, tokens=own, prefix_lengths=lengths)
    return Kept(kept, [start.parent for start in starts], request.digests, request.sums)


def as_sent(steps: Steps) -> Kept:
    """Whole rows as they came."""
    digests = [digest_of(None, tokens) for tokens in steps.tokens.arrays()]
    return Kept(steps, [None] * len(steps), digests, [None] * len(steps))


class _Request:
    """The rows of a request, of which later ones may begin as earlier ones.

    digests, sums: of those whose start was asked for, as `Kept` has them.
    """

    def __init__(
        self, steps: Steps, prefixes: Prefixes | None, shared: Collection[str], sums: Mapping[RowRef, Sum]
    ) -> None:
        nothing = [0] * len(steps)
        self._steps, self._sums = steps, sums
        self._sent, self._prompts = steps.tokens.arrays(), steps.prompt_lengths.tolist()
        self._left_out = nothing if prefixes is None else prefixes.lengths.tolist()
        self._checksums = nothing if prefixes is None else prefixes.checksums.tolist()
        self._is_last = steps.is_last_steps.tolist()
        self._lacks = _lacking(steps, shared)
        self._known: dict[tuple[GroupKey, RowName], _Known] = {}
        self._first: dict[GroupKey, _Known] = {}
        self.digests: list[bytes] = []
        self.sums: list[Sum | None] = []

    def start(self, row: int, group: GroupKey, name: RowName, before: PickedRow | None) -> _Start:
        """With what the row begins; to be asked of each row in turn."""
        step_before = RowName(name.sample, name.attempt, name.step - 1)
        found = self._known.get((group, step_before)) or self._held(before) or self._first.get(group)
        if not self._left_out[row]:
            start = self._compared(row, name, found)
        elif found is None or found.name != step_before:
            raise PrefixUnknownError(
                f"{self._steps.name(row)}: the run does not have the step before it; send all tokens of the row"
            )
        else:
            start = self._after(row, found)
        self._note(row, group, name, found, start)
        return start

    def _note(self, row: int, group: GroupKey, name: RowName, before: _Known | None, start: _Start) -> None:
        sent, left_out = self._sent[row], self._left_out[row]
        total = None
        if not self._is_last[row]:
            total = (start.left_out or Sum.of_nothing()).and_also(sent)
        self.sums.append(total)
        self.digests.append(digest_of(start.left_out, sent) if total is None else total.digest)
        if row == len(self._sent) - 1 or (self._is_last[row] and group in self._first):
            return

        # Nothing of it refers to this request itself, which would keep its bytes until garbage is collected.
        steps = self._steps

        def tokens() -> Tokens | None:
            first = before.tokens() if left_out and before else ()
            return None if first is None else [*_beginning(first, left_out), sent]

        known = _Known(name, tokens, lambda: _has(steps, row), total)
        self._known[group, name] = known
        self._first.setdefault(group, known)

    def _held(self, picked: PickedRow | None) -> _Known | None:
        """A row that the run has."""
        if picked is None:
            return None
        found = self._sums.get(picked.row.ref)
        return _Known(picked.row.name, lambda: _tokens_held(picked), lambda: columns_of(picked, _not_held), found)

    def _after(self, row: int, before: _Known) -> _Start:
        """Of a row that came without what the step before it has."""
        name, length, lacks = self._steps.name, self._left_out[row], self._lacks[row]
        found = before.sum
        if found is None or found.tokens != length:
            tokens = before.tokens()
            if tokens is None:
                raise PrefixUnknownError(
                    f"{name(row)}: the run does not have the step before it; send all tokens of the row"
                )
            found = Sum.of_nothing()
            for piece in _beginning(tokens, length):
                found = found.and_also(piece)
        if found.tokens < length or found.checksum != self._checksums[row]:
            raise PrefixUnknownError(
                f"{name(row)}: the step before it does not begin with the {length} tokens that were left out; send all "
                "tokens of the row"
            )
        if lacks and not lacks <= before.columns():
            raise PrefixUnknownError(
                f"{name(row)}: values of {min(lacks - before.columns())} were left out, and the step before has none; "
                "send all values of the row"
            )
        return _Start(before.name, length, found)

    def _compared(self, row: int, name: RowName, other: _Known | None) -> _Start:
        """Of a row that came whole."""
        is_other_attempt = other is not None and other.name.sample == name.sample and other.name.attempt != name.attempt
        if other is None or is_other_attempt or (tokens := other.tokens()) is None:
            return _NOTHING
        prompt, common = self._sent[row][: self._prompts[row]], 0
        first = tokens[0][:LEAST_TOKENS].tobytes() if tokens else b""
        if len(first) == LEAST_TOKENS * prompt.itemsize and first != prompt[:LEAST_TOKENS].tobytes():
            # So most rows are told apart that are not of one prompt.
            return _NOTHING
        for piece in tokens:
            found = common_prefix(piece, prompt[common:])
            common += found
            if found < len(piece):
                break
        return _NOTHING if common < LEAST_TOKENS else _Start(other.name, common)


def _tokens_held(picked: PickedRow) -> Tokens | None:
    try:
        return tokens_of(picked, _not_held)
    except (NotFoundError, UnavailableError):
        return None


def _not_held(table: int) -> Stored:
    # Reading it from elsewhere would take longer than sending the row whole.
    raise NotFoundError(f"table {table:#x} of rows is not held")


def _beginning(tokens: Tokens, count: int) -> list[Array]:
    """The first `count` tokens, or all."""
    found: list[Array] = []
    for piece in tokens:
        if not count:
            break
        found.append(piece[:count])
        count -= len(found[-1])
    return found


def _has(steps: Steps, row: int) -> frozenset[str]:
    """The declared columns that the row has."""
    return frozenset(name for name, extra in steps.extras.items() if extra.given[row])


def _lacking(steps: Steps, shared: Collection[str]) -> list[frozenset[str]]:
    """For each row, the shared columns whose first values are left out."""
    found: list[frozenset[str]] = [frozenset()] * len(steps)
    for name in steps.extras.keys() & shared:
        extra = steps.extras[name]
        for row in np.flatnonzero(extra.given & (extra.values.lengths < steps.sequence_lengths)).tolist():
            found[row] |= {name}
    return found
