"""Which tokens of submitted rows the run has already: rows that begin as an earlier one are kept without them.

A row may come without what the step before it begins with; what comes whole is compared with that step, and with a row
of another sample of its prompt. Nothing is decided here: a row is judged as if it had come whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gristmill._wire.columns import Array, Ragged
from gristmill._wire.row_codec import Prefixes
from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, PrefixUnknownError, UnavailableError
from gristmill_service.pipeline.rows.joins import common_prefix
from gristmill_service.run.machine.events import GroupKey, RowName, RowRef, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State
from gristmill_service.run.row_buffer import PickedRow, RowBuffer
from gristmill_service.run.row_gathering import columns_of, tokens_of
from gristmill_service.run.token_sums import Sum
from gristmill_service.storage.row_tables import Stored

LEAST_TOKENS = 16
"""A shorter beginning is kept with the row."""

Tokens = Sequence[Array]
"""A row's tokens, in pieces."""


class Kept(NamedTuple):
    """Rows as they are kept.

    steps: without the tokens that others have. parents: of each row, who has those with which it begins, or None.
    sums: of each row, of all its tokens.
    """

    steps: Steps
    parents: Sequence[RowName | None]
    sums: Sequence[Sum]


class _Known(NamedTuple):
    """A row that others may begin as. tokens: gives all of them, None where they are not at hand. columns: gives the
    declared ones that it has."""

    name: RowName
    tokens: Callable[[], Tokens | None]
    columns: Callable[[], frozenset[str]]


class _Start(NamedTuple):
    """With what a row begins: whose first tokens, how many, what these are, and their sum."""

    parent: RowName | None
    length: int
    tokens: Callable[[], Tokens]
    sum: Sum


_NOTHING = _Start(None, 0, lambda: (), Sum.of_nothing())


def rows_before(state: State, rows: RowBuffer, steps: Steps) -> dict[int, PickedRow]:
    """Of each row, as far as the run has it: the step before; else the first step of another sample of its prompt."""
    wanted: dict[GroupKey, dict[int, StoredRow]] = {}
    for row, (attempt, step) in enumerate(zip(steps.attempts.tolist(), steps.steps.tolist(), strict=True)):
        key = steps.key(row)
        group = state.open.get(GroupKey(key.round, key.uid))
        if group is not None and (found := _before(group, RowName(key.sample, attempt, step))) is not None:
            wanted.setdefault(group.key, {})[row] = found
    picked = rows.pick((state.open[key], found.values()) for key, found in wanted.items())
    return dict(zip((row for found in wanted.values() for row in found), picked, strict=True))


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
    starts = [request.start(row, before.get(row)) for row in range(len(steps))]
    lengths = np.array([start.length for start in starts], np.int64)
    cut = lengths if prefixes is None else lengths - prefixes.lengths
    own = Ragged(steps.tokens.values, steps.tokens.starts + cut, steps.tokens.lengths - cut)
    lasts = steps.is_last_steps.tolist()
    found = [
        start.sum.and_also(rest, is_last=last) for start, rest, last in zip(starts, own.arrays(), lasts, strict=True)
    ]
    if not lengths.any():
        return Kept(steps, [None] * len(steps), found)
    return Kept(replace(steps, tokens=own, prefix_lengths=lengths), [start.parent for start in starts], found)


def as_sent(steps: Steps) -> Kept:
    """Whole rows as they came."""
    rows = zip(steps.tokens.arrays(), steps.is_last_steps.tolist(), strict=True)
    return Kept(steps, [None] * len(steps), [Sum.of_nothing().and_also(tokens, is_last=last) for tokens, last in rows])


class _Request:
    """The rows of a request, of which later ones may begin as earlier ones."""

    def __init__(
        self, steps: Steps, prefixes: Prefixes | None, shared: Collection[str], sums: Mapping[RowRef, Sum]
    ) -> None:
        self._steps, self._prefixes, self._sums = steps, prefixes, sums
        self._sent, self._lasts = steps.tokens.arrays(), steps.is_last_steps.tolist()
        self._groups = [GroupKey(*key) for key in zip(steps.rounds.tolist(), steps.uids, strict=True)]
        columns = (steps.samples.tolist(), steps.attempts.tolist(), steps.steps.tolist())
        self._names = [RowName(*name) for name in zip(*columns, strict=True)]
        self._lacks = _lacking(steps, shared)
        self._known: dict[tuple[GroupKey, RowName], _Known] = {}
        self._first: dict[GroupKey, _Known] = {}

    def start(self, row: int, before: PickedRow | None) -> _Start:
        """With what the row begins; to be asked of each row in turn."""
        steps, group, name = self._steps, self._groups[row], self._names[row]
        step_before = RowName(name.sample, name.attempt, name.step - 1)
        in_request = self._known.get((group, step_before))
        found = in_request or self._held(before) or self._first.get(group)
        left_out = 0 if self._prefixes is None else int(self._prefixes.lengths[row])
        if not left_out:
            start = self._compared(row, name, found)
        elif found is None or found.name != step_before:
            raise PrefixUnknownError(f"{steps.name(row)}: the step before it is not here; send all of its tokens")
        else:
            start = self._left_out(row, left_out, found, None if in_request else before)
        if row < len(self._sent) - 1:
            tokens = [*start.tokens(), self._sent[row][start.length - left_out :]]
            known = _Known(name, lambda: tokens, lambda: _has(steps, row))
            self._known[group, name] = known
            self._first.setdefault(group, known)
        return start

    def _held(self, picked: PickedRow | None) -> _Known | None:
        """A row that the run has."""
        if picked is None:
            return None
        return _Known(picked.row.name, lambda: _tokens_held(picked), lambda: columns_of(picked, _not_held))

    def _left_out(self, row: int, length: int, before: _Known, picked: PickedRow | None) -> _Start:
        name, prefixes, lacks = self._steps.name(row), self._prefixes, self._lacks[row]
        assert prefixes is not None, "something was left out"
        found = None if picked is None or picked.row.tokens != length else self._sums.get(picked.row.ref)
        if found is None:
            tokens = before.tokens()
            if tokens is None:
                raise PrefixUnknownError(f"{name}: the step before it is not here; send all of its tokens")
            found = Sum.of_nothing()
            for piece in _beginning(tokens, length):
                found = found.and_also(piece)
        if found.tokens < length or found.checksum != int(prefixes.checksums[row]):
            raise PrefixUnknownError(
                f"{name}: the step before it does not begin with the {length} tokens that were left out; send all of "
                "its tokens"
            )
        if lacks and not lacks <= before.columns():
            raise PrefixUnknownError(
                f"{name}: the step before it has no {min(lacks - before.columns())} that could stand for what was left "
                "out; send all of its values"
            )
        return _Start(before.name, length, lambda: _beginning(before.tokens() or (), length), found)

    def _compared(self, row: int, name: RowName, other: _Known | None) -> _Start:
        is_other_attempt = other is not None and other.name.sample == name.sample and other.name.attempt != name.attempt
        if other is None or is_other_attempt or (tokens := other.tokens()) is None:
            return _NOTHING
        prompt, common = self._sent[row][: int(self._steps.prompt_lengths[row])], 0
        if len(tokens[0]) >= LEAST_TOKENS and tokens[0][:LEAST_TOKENS].tobytes() != prompt[:LEAST_TOKENS].tobytes():
            # So most rows are told apart that are not of one prompt.
            return _NOTHING
        for piece in tokens:
            found = common_prefix(piece, prompt[common:])
            common += found
            if found < len(piece):
                break
        if common < LEAST_TOKENS:
            return _NOTHING
        beginning = self._sent[row][:common]
        summed = Sum.of_nothing().and_also(beginning, is_last=self._lasts[row])
        return _Start(other.name, common, lambda: [beginning], summed)


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
    """Of each row the shared columns whose first values are left out."""
    found: list[frozenset[str]] = [frozenset()] * len(steps)
    for name in steps.extras.keys() & shared:
        extra = steps.extras[name]
        for row in np.flatnonzero(extra.given & (extra.values.lengths < steps.sequence_lengths)).tolist():
            found[row] |= {name}
    return found
