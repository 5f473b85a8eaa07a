"""Rows that came without the tokens that the step before them begins with, made whole again.

The step before is in the same request, or was accepted earlier. Nothing is decided here: a row that is made whole is
judged as if it had come so.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged, bytes_of
from gristmill._wire.row_codec import Prefixes
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import PrefixUnknownError
from gristmill_service.run.machine.events import GroupKey, StoredRow
from gristmill_service.run.machine.state import State
from gristmill_service.run.row_buffer import PickedRow

Tokens = NDArray[np.int32]


class _Name(NamedTuple):
    trajectory: TrajectoryKey
    attempt: int
    step: int


class _Before(NamedTuple):
    """A step's tokens, and the declared columns that it has."""

    tokens: Tokens
    columns: frozenset[str]


def rows_before(state: State, steps: Steps, prefixes: Prefixes) -> list[StoredRow]:
    """Those of the steps before rows with prefixes that were accepted."""
    found = []
    for row in np.flatnonzero(prefixes.lengths).tolist():
        key = steps.key(row)
        group = state.open.get(GroupKey(key.round, key.uid))
        trajectory = None if group is None else group.trajectories.get(key.sample)
        if trajectory is not None and trajectory.attempt == int(steps.attempts[row]):
            before = trajectory.rows.get(int(steps.steps[row]) - 1)
            if before is not None:
                found.append(before)
    return found


def made_whole(steps: Steps, prefixes: Prefixes, before: list[PickedRow], shared: Collection[str] = ()) -> Steps:
    """The rows with all their tokens, which are copied once.

    before: what was accepted of the steps before. shared: the columns of which rows may lack the values of what is left
    out. Raises PrefixUnknownError naming a row whose step before is not there, has other tokens, or lacks such values.
    """
    known = {
        _Name(one.row.trajectory, one.row.attempt, one.row.step): _Before(
            one.steps.tokens[one.at], _has(one.steps, one.at)
        )
        for one in before
        if one.steps is not None
    }
    lengths = steps.tokens.lengths + prefixes.lengths
    whole = Ragged.from_lengths(np.empty(int(lengths.sum()), np.int32), lengths)
    lacks = _lacking(steps, lengths, shared)
    sent, row_prefixes = steps.tokens.arrays(), prefixes.lengths.tolist()
    for row, tokens in enumerate(whole.arrays()):
        name = _Name(steps.key(row), int(steps.attempts[row]), int(steps.steps[row]))
        length = row_prefixes[row]
        tokens[length:] = sent[row]
        if length:
            one = known.get(name._replace(step=name.step - 1))
            tokens[:length] = _prefix(steps, row, one, length, int(prefixes.checksums[row]), lacks[row])
        known[name] = _Before(tokens, _has(steps, row))
    return replace(steps, tokens=whole)


def _has(steps: Steps, row: int) -> frozenset[str]:
    """The declared columns that the row has."""
    return frozenset(name for name, extra in steps.extras.items() if extra.given[row])


def _lacking(steps: Steps, lengths: Int64s, shared: Collection[str]) -> list[frozenset[str]]:
    """Of each row the shared columns whose first values are left out. lengths: (rows,) of all its tokens."""
    found: list[frozenset[str]] = [frozenset()] * len(steps)
    for name in steps.extras.keys() & shared:
        extra = steps.extras[name]
        for row in np.flatnonzero(extra.given & (extra.values.lengths < lengths)).tolist():
            found[row] |= {name}
    return found


def _prefix(
    steps: Steps, row: int, before: _Before | None, length: int, checksum: int, lacks: frozenset[str]
) -> Tokens:
    if before is None:
        raise PrefixUnknownError(f"{steps.name(row)}: the step before it is not here; send all of its tokens")
    prefix = before.tokens[:length]
    if len(prefix) < length or zlib.crc32(bytes_of(prefix)) != checksum:
        raise PrefixUnknownError(
            f"{steps.name(row)}: the step before it does not begin with the {length} tokens that were left out; send "
            "all of its tokens"
        )
    if not lacks <= before.columns:
        raise PrefixUnknownError(
            f"{steps.name(row)}: the step before it has no {min(lacks - before.columns)} that could stand for what was "
            "left out; send all of its values"
        )
    return prefix
