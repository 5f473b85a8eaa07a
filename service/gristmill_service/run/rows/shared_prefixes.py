"""Which tokens of submitted rows the run has already: rows that begin as an earlier one are kept without them.

A row may come without what the step before it begins with; what comes whole is compared with that step, and with a row
of another sample of its prompt. Nothing is decided here: a row is judged as if it had come whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, PrefixUnknownError, UnavailableError
from gristmill_service.pipeline.rows.joins import common_prefix
from gristmill_service.run.machine.events import GroupKey, RowName, RowRef, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.row_keys import RowKeys
from gristmill_service.run.machine.state import State
from gristmill_service.run.rows.row_buffer import PickedRow, RowBuffer
from gristmill_service.run.rows.row_gathering import Tables, columns_of, tokens_of
from gristmill_service.run.rows.token_sums import Sum, digest_of
from gristmill_service.storage.row_tables import Stored

LEAST_TOKENS = 16
"""A shorter beginning is kept with the row."""

# So few are compared in less time where they are copied to bytes.
_FEW_TOKENS = 1 << 14

Tokens = Sequence[memoryview]
"""A row's tokens, in pieces; int32."""


class Kept(NamedTuple):
    """Rows as they are kept.

    steps: without the tokens that others have. parents: of each row, who has those with which it begins, or None.
    digests: of each row, of all its tokens. sums: of the rows after which their trajectories go on, else None.
    """

    steps: Steps
    parents: Sequence[RowName | None]
    digests: Sequence[bytes]
    sums: Sequence[Sum | None]


class _Held(NamedTuple):
    """A row that the run has, with which others may begin.

    tables: those that were opened for the request. sum: of its tokens, where that is known. head: none of them is at
    hand without being asked for.
    """

    picked: PickedRow
    tables: Tables
    sum: Sum | None
    head: bytes = b""

    @property
    def name(self) -> RowName:
        return self.picked.row.name

    def tokens(self) -> Tokens | None:
        """All of them; None where they are not at hand."""
        try:
            return tokens_of(self.picked, self.tables)
        except (NotFoundError, UnavailableError):
            return None

    def columns(self) -> frozenset[str]:
        """The declared columns that the row has."""
        return columns_of(self.picked, self.tables)


class _Came(NamedTuple):
    """A row of the request, with which later ones may begin.

    sum: of its tokens, None where its trajectory ends with it. own: the tokens with which it came. head: the bytes
    of the first of these, where it came whole. before: the row that has its others, so many.
    """

    steps: Steps
    row: int
    name: RowName
    sum: Sum | None
    own: memoryview
    head: bytes
    before: _Known | None
    left_out: int

    def tokens(self) -> Tokens | None:
        """As `_Held.tokens`."""
        if not self.left_out:
            return [self.own]
        first = None if self.before is None else self.before.tokens()
        return None if first is None else [*_beginning(first, self.left_out), self.own]

    def columns(self) -> frozenset[str]:
        return frozenset(name for name, extra in self.steps.extras.items() if extra.given[self.row])


_Known = _Held | _Came


class _Start(NamedTuple):
    """With what a row begins: whose first tokens, how many, and the sum of those that were not sent."""

    parent: RowName | None
    length: int
    left_out: Sum | None = None


_NOTHING = _Start(None, 0)


def rows_before(state: State, rows: RowBuffer, keys: RowKeys) -> dict[int, PickedRow]:
    """For each row, as far as the run has it, the step before; else the first step of another sample of its prompt."""
    wanted: dict[GroupKey, dict[int, StoredRow]] = {}
    for key, own in keys.groups:
        if (group := state.open.get(key)) is None:
            continue
        for row in own:
            if (found := _before(group, keys.names[row])) is not None:
                wanted.setdefault(key, {})[row] = found
    picked = rows.pick((state.open[key], found.values()) for key, found in wanted.items())
    return dict(zip((row for found in wanted.values() for row in found), picked, strict=True))


def _before(group: Group, name: RowName) -> StoredRow | None:
    own = group.trajectories.get(name.sample)
    if own is not None and own.attempt == name.attempt and (before := own.rows.get(name.step - 1)) is not None:
        return before
    for sample, other in group.trajectories.items():
        if sample != name.sample and (first := other.rows.get(0)) is not None:
            return first
    return None


def without_shared(
    steps: Steps,
    keys: RowKeys,
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
    request = _Request(steps, keys.names, prefixes, shared, sums)
    starts: list[_Start] = []
    for key, own in keys.groups:
        group = request.group(key)
        starts += [request.start(row, group, before.get(row)) for row in own]
    kept = steps
    if any(start is not _NOTHING for start in starts):
        lengths = np.array([start.length for start in starts], np.int64)
        cut = lengths if prefixes is None else lengths - prefixes.lengths
        tokens = Ragged(steps.tokens.values, steps.tokens.starts + cut, steps.tokens.lengths - cut)
        kept = replace(steps, tokens=tokens, prefix_lengths=lengths)
    return Kept(kept, [start.parent for start in starts], request.digests, request.sums)


def as_sent(steps: Steps) -> Kept:
    """Whole rows as they came."""
    digests = [digest_of(None, tokens) for tokens in steps.tokens.memory()]
    return Kept(steps, [None] * len(steps), digests, [None] * len(steps))


class _GroupRows:
    """The rows of the request, of one group, with which later ones may begin."""

    __slots__ = ("first", "known")

    def __init__(self) -> None:
        self.first: _Came | None = None
        self.known: dict[RowName, _Came] = {}


class _Request:
    """The rows of a request, of which later ones may begin as earlier ones.

    digests, sums: of those whose start was asked for, as `Kept` has them.
    """

    def __init__(
        self,
        steps: Steps,
        names: Sequence[RowName],
        prefixes: Prefixes | None,
        shared: Collection[str],
        sums: Mapping[RowRef, Sum],
    ) -> None:
        nothing = [0] * len(steps)
        self._steps, self._names, self._sums = steps, names, sums
        self._sent, self._prompts = steps.tokens.memory(), steps.prompt_lengths.tolist()
        self._left_out = nothing if prefixes is None else prefixes.lengths.tolist()
        self._checksums = nothing if prefixes is None else prefixes.checksums.tolist()
        self._is_last = steps.is_last_steps.tolist()
        self._lacks = _lacking(steps, shared)
        self._groups: dict[GroupKey, _GroupRows] = {}
        self._held = Tables(_not_held)
        self.digests: list[bytes] = []
        self.sums: list[Sum | None] = []

    def group(self, key: GroupKey) -> _GroupRows:
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = _GroupRows()
        return found

    def start(self, row: int, group: _GroupRows, before: PickedRow | None) -> _Start:
        """With what the row begins; to be asked of each row in turn. group: its own."""
        name, left_out, sent = self._names[row], self._left_out[row], self._sent[row]
        step_before = RowName(name.sample, name.attempt, name.step - 1) if name.step else None
        found: _Known | None = None if step_before is None else group.known.get(step_before)
        if found is None:
            found = group.first if before is None else _Held(before, self._held, self._sums.get(before.row.ref))
        if not left_out:
            start = _NOTHING if found is None else self._compared(row, name, found)
        elif found is None or found.name != step_before:
            raise PrefixUnknownError(
                f"{self._steps.name(row)}: the run does not have the step before it; send all tokens of the row"
            )
        else:
            start = self._after(row, found)
        is_last, total = self._is_last[row], None
        if is_last:
            self.digests.append(digest_of(start.left_out, sent))
        else:
            total = (start.left_out or Sum.of_nothing()).and_also(sent)
            self.digests.append(total.digest)
        self.sums.append(total)
        if (not is_last or group.first is None) and row < len(self._sent) - 1:
            # It does not refer to this request itself, which would keep its bytes until garbage is collected.
            head = b"" if left_out else bytes(sent[:LEAST_TOKENS])
            came = _Came(self._steps, row, name, total, sent, head, found if left_out else None, left_out)
            group.known[name] = came
            group.first = group.first or came
        return start

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

    def _compared(self, row: int, name: RowName, other: _Known) -> _Start:
        """Of a row that came whole."""
        if other.head and other.head != bytes(self._sent[row][:LEAST_TOKENS]):
            # So most rows are told apart that are not of one prompt.
            return _NOTHING
        found = other.name
        if found.sample == name.sample and found.attempt != name.attempt:
            return _NOTHING
        common = _common(other.tokens() or (), self._sent[row][: self._prompts[row]])
        return _NOTHING if common < LEAST_TOKENS else _Start(found, common)


def _common(tokens: Tokens, prompt: memoryview) -> int:
    """With how many of the tokens a prompt begins."""
    at = 0
    for piece in tokens:
        end = min(at + len(piece), len(prompt))
        one, other = piece[: end - at], prompt[at:end]
        # The samples of a prompt have all of it in common, mostly.
        if len(one) > _FEW_TOKENS or bytes(one) != bytes(other):
            common = common_prefix(np.asarray(one), np.asarray(other))
            if common < len(one):
                return at + common
        at = end
    return at


def _not_held(table: int) -> Stored:
    # Reading it from elsewhere would take longer than sending the row whole.
    raise NotFoundError(f"table {table:#x} of rows is not held")


def _beginning(tokens: Tokens, count: int) -> list[memoryview]:
    """The first `count` tokens, or all."""
    found: list[memoryview] = []
    for piece in tokens:
        if not count:
            break
        found.append(piece[:count])
        count -= len(found[-1])
    return found


def _lacking(steps: Steps, shared: Collection[str]) -> list[frozenset[str]]:
    """For each row, the shared columns whose first values are left out."""
    found: list[frozenset[str]] = [frozenset()] * len(steps)
    for name in steps.extras.keys() & shared:
        extra = steps.extras[name]
        for row in np.flatnonzero(extra.given & (extra.values.lengths < steps.sequence_lengths)).tolist():
            found[row] |= {name}
    return found
