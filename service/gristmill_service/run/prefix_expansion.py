"""Rows that came without the tokens that the step before them begins with, made whole again.

The step before is in the same request, or was accepted earlier. Nothing is decided here: a row that is made whole is
judged as if it had come so.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Ragged, bytes_of
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


def made_whole(steps: Steps, prefixes: Prefixes, before: list[PickedRow]) -> Steps:
    """The rows with all their tokens, which are copied once.

    before: what was accepted of the steps before. Raises PrefixUnknownError naming a row whose step before is not
    there, or has other tokens.
    """
    known = {
        _Name(one.row.trajectory, one.row.attempt, one.row.step): one.steps.tokens[one.at]
        for one in before
        if one.steps is not None
    }
    lengths = steps.tokens.lengths + prefixes.lengths
    whole = Ragged.from_lengths(np.empty(int(lengths.sum()), np.int32), lengths)
    sent, row_prefixes = steps.tokens.arrays(), prefixes.lengths.tolist()
    for row, tokens in enumerate(whole.arrays()):
        name = _Name(steps.key(row), int(steps.attempts[row]), int(steps.steps[row]))
        length = row_prefixes[row]
        tokens[length:] = sent[row]
        if length:
            tokens[:length] = _prefix(steps, row, known, name, length, int(prefixes.checksums[row]))
        known[name] = tokens
    return replace(steps, tokens=whole)


def _prefix(steps: Steps, row: int, known: Mapping[_Name, Tokens], name: _Name, length: int, checksum: int) -> Tokens:
    before = known.get(name._replace(step=name.step - 1))
    if before is None:
        raise PrefixUnknownError(f"{steps.name(row)}: the step before it is not here; send all of its tokens")
    prefix = before[:length]
    if len(prefix) < length or zlib.crc32(bytes_of(prefix)) != checksum:
        raise PrefixUnknownError(
            f"{steps.name(row)}: the step before it does not begin with the {length} tokens that were left out; send "
            "all of its tokens"
        )
    return prefix
