"""Rows that are being delivered, and their outcomes. The outbox schedules them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from gristmill._client.connection.failures import Failure, failure_of_row, with_message
from gristmill._wire.columns import Int64s, lengths_of
from gristmill._wire.row_fields import TOKEN_FIELDS
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import GristmillError
from gristmill.v1 import rollout_pb2

Group = tuple[int, str]
Form = tuple[bool, ...]

_ROW_OVERHEAD = 64
_NAMES_IN_MESSAGE = 3


class RowOutcome(enum.Enum):
    """The service's answer for one row."""

    ACCEPTED = 1
    """The service stored the row. It will be in exactly one batch, or be dropped once, for a recorded reason."""
    DUPLICATE = 2
    """The same row was accepted before."""
    SEALED = 3
    """The row's group was sealed into a batch before the row arrived."""
    DROPPED = 4
    """The row's group or trajectory was dropped or aborted before the row arrived."""
    SUPERSEDED = 5
    """A higher attempt of the row's trajectory exists."""

    @property
    def is_stored(self) -> bool:
        """Whether the service has the row. If not, it drops further steps of the trajectory."""
        return self in (RowOutcome.ACCEPTED, RowOutcome.DUPLICATE)


_OUTCOMES = {outcome.value: outcome for outcome in RowOutcome}


@dataclass(slots=True, eq=False)
class Delivery:
    """The outcomes of the rows of one trajectory, or of one submission.

    outcomes: one per row, in the order in which rows were added; None while pending, and after a failure.
    pending: the number of rows without an outcome or error.
    is_kept: whether the service stored all rows so far.
    failures: the errors of rows that were not delivered, by trajectory.
    """

    outcomes: list[RowOutcome | None] = field(default_factory=list)
    pending: int = 0
    is_kept: bool = True
    failures: dict[TrajectoryKey, GristmillError] = field(default_factory=dict)


class Prefix(NamedTuple):
    """The first tokens of a row, which are not sent: their number, their CRC-32, and the columns whose values for these
    tokens are not sent either."""

    length: int = 0
    checksum: int = 0
    columns: frozenset[str] = frozenset()


WHOLE = Prefix()
"""The prefix of a row that is sent whole."""


@dataclass(slots=True, eq=False)
class PendingRow:
    """A row without an outcome.

    expires: the time after which delivery is not retried; set by the first attempt. prefix: the tokens that need not be
        sent; None if the encoder must determine them. refusal: the service's last error for this row, if it answered.
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
    refusal: GristmillError | None = None

    @property
    def group(self) -> Group:
        return self.key[:2]

    @property
    def attempt(self) -> int:
        return int(self.table.attempts[self.row])


def tables_of(entries: Sequence[PendingRow]) -> list[Steps]:
    """Returns the rows of the entries, in order, as tables."""
    parts: list[tuple[Steps, list[int]]] = []
    for entry in entries:
        if parts and parts[-1][0] is entry.table:
            parts[-1][1].append(entry.row)
        else:
            parts.append((entry.table, [entry.row]))
    return [table if len(rows) == len(table) else table.take(np.array(rows)) for table, rows in parts]


def outcomes_of(response: rollout_pb2.SubmitRowsResponse, entries: Sequence[PendingRow]) -> list[RowOutcome | Failure]:
    """Reads the outcomes, and the errors of refused rows. Raises GristmillError unless there is one outcome per row."""
    if len(response.outcomes) != len(entries):
        raise GristmillError(
            f"the service returned {len(response.outcomes)} outcomes for {len(entries)} rows; check its version"
        )
    refused = {row.row: failure_of_row(row, response.request_id) for row in response.refused}
    return [
        _OUTCOMES.get(outcome) or refused.get(row) or RowOutcome(outcome)
        for row, outcome in enumerate(response.outcomes)
    ]


def form_of(table: Steps) -> Form:
    """Returns which optional fields the table has. Rows of different forms cannot share a message."""
    return (table.advantages is not None, *(getattr(table, one.name) is not None for one in TOKEN_FIELDS))


def row_sizes(table: Steps) -> Int64s:
    """Returns the approximate bytes of each row on the wire; int64 (rows,)."""
    sizes = table.tokens.lengths * 4 + _ROW_OVERHEAD
    for column in table.token_columns:
        sizes = sizes + column.lengths * column.values.itemsize
    for extra in table.extras.values():
        sizes = sizes + extra.row_bytes
    names: Int64s = (lengths_of(table.uids) + lengths_of(table.stop_reasons)) * 3
    return sizes + names


def error_of(failures: dict[TrajectoryKey, GristmillError]) -> GristmillError:
    """Combines failures to one error, of the class of the first failure. Its message names the trajectories."""
    (key, first), *others = failures.items()
    listed = [str(other) for other, _ in others[: _NAMES_IN_MESSAGE - 1]]
    if not str(first).startswith(str(key)):
        listed.insert(0, str(key))
    elif listed:
        listed[0] = f"also of {listed[0]}"
    if len(failures) > _NAMES_IN_MESSAGE:
        listed.append(f"and {len(failures) - _NAMES_IN_MESSAGE} more trajectories")
    return with_message(
        first, ": ".join(["rows were not accepted", *(["; ".join(listed)] if listed else []), str(first)])
    )
