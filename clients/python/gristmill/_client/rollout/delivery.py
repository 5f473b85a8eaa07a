"""Rows on their way, and their outcomes. Values and pure functions; the outbox says which are sent when."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from gristmill._client.connection.failures import with_message
from gristmill._wire.columns import Int64s, lengths_of
from gristmill._wire.steps import TOKEN_FIELDS, Steps, TrajectoryKey
from gristmill.errors import GristmillError
from gristmill.v1 import rollout_pb2

Group = tuple[int, str]
Form = tuple[bool, ...]

_ROW_OVERHEAD = 64
_NAMES_IN_MESSAGE = 3


class RowOutcome(enum.Enum):
    """The service's answer for one row."""

    ACCEPTED = 1
    """The service took it: it will be part of exactly one batch, or be dropped exactly once for a recorded reason."""
    DUPLICATE = 2
    """The same row was accepted before."""
    SEALED = 3
    """Its group was sealed into a batch before it came."""
    DROPPED = 4
    """Its group or trajectory was dropped or aborted before it came."""
    SUPERSEDED = 5
    """A higher attempt of its trajectory exists."""

    @property
    def is_stored(self) -> bool:
        """Whether the service has the row; where it has not, further steps of the trajectory are of no use."""
        return self in (RowOutcome.ACCEPTED, RowOutcome.DUPLICATE)


_OUTCOMES = {outcome.value: outcome for outcome in RowOutcome}


@dataclass(slots=True, eq=False)
class Delivery:
    """The outcomes of rows that belong together: those of one trajectory, or of one submission.

    outcomes: one a row, in the order they were added; None while it is pending, and after a failure.
    pending: rows that have neither outcome nor error yet.
    is_kept: whether the service keeps what it was sent, as far as is known.
    failures: why rows of a trajectory were not taken.
    """

    outcomes: list[RowOutcome | None] = field(default_factory=list)
    pending: int = 0
    is_kept: bool = True
    failures: dict[TrajectoryKey, GristmillError] = field(default_factory=dict)


class Prefix(NamedTuple):
    """The leading tokens that a row omits: how many, their CRC-32, and the columns that are omitted with them."""

    length: int = 0
    checksum: int = 0
    columns: frozenset[str] = frozenset()


WHOLE = Prefix()
"""The prefix of a row that is sent whole."""


@dataclass(slots=True, eq=False)
class PendingRow:
    """A row that has no outcome yet.

    expires: when to give it up; set by the first attempt. prefix: what need not be sent; None if the encoder has to
    look its trajectory up.
    """

    table: Steps
    row: int
    key: TrajectoryKey
    form: Form
    size: int
    delivery: Delivery
    index: int
    number: int
    added: float
    expires: float = inf
    prefix: Prefix | None = None

    @property
    def group(self) -> Group:
        return self.key[:2]


def tables_of(entries: Sequence[PendingRow]) -> list[Steps]:
    """The entries' rows in their order, as tables."""
    parts: list[tuple[Steps, list[int]]] = []
    for entry in entries:
        if parts and parts[-1][0] is entry.table:
            parts[-1][1].append(entry.row)
        else:
            parts.append((entry.table, [entry.row]))
    return [table if len(rows) == len(table) else table.take(np.array(rows)) for table, rows in parts]


def outcomes_of(response: rollout_pb2.SubmitRowsResponse, entries: Sequence[PendingRow]) -> list[RowOutcome]:
    """Raises GristmillError where the answer is not one outcome a row."""
    if len(response.outcomes) != len(entries):
        raise GristmillError(
            f"the service answered {len(response.outcomes)} outcomes for {len(entries)} rows; check its version"
        )
    return [_OUTCOMES.get(outcome) or RowOutcome(outcome) for outcome in response.outcomes]


def form_of(table: Steps) -> Form:
    """Which columns the table has: rows of another form cannot share a message."""
    return (table.advantages is not None, *(getattr(table, one.name) is not None for one in TOKEN_FIELDS))


def row_sizes(table: Steps) -> Int64s:
    """Bytes of each row on the wire, about; int64 (rows,)."""
    sizes = table.tokens.lengths * 4 + _ROW_OVERHEAD
    for column in table.token_columns:
        sizes = sizes + column.lengths * column.values.itemsize
    for extra in table.extras.values():
        sizes = sizes + extra.row_bytes
    names: Int64s = (lengths_of(table.uids) + lengths_of(table.stop_reasons)) * 3
    return sizes + names


def error_of(failures: dict[TrajectoryKey, GristmillError]) -> GristmillError:
    """One error for all: of the class of the first, naming the trajectories."""
    first = next(iter(failures.values()))
    names = [str(key) for key in failures]
    listed = "; ".join(names[:_NAMES_IN_MESSAGE])
    if len(names) > _NAMES_IN_MESSAGE:
        listed += f"; and {len(names) - _NAMES_IN_MESSAGE} more trajectories"
    return with_message(first, f"rows were not taken of {listed}: {first}")
