"""Tables of rows for tests of what stores them."""

from __future__ import annotations

from gristmill._wire.rows import to_rows
from gristmill._wire.steps import Steps
from gristmill_service.storage.row_tables import Stored, steps_of
from tests.run.harness import row, table


def any_table(number: int = 0, rows: int = 3, tokens: int = 20) -> Steps:
    """Rows with their table's number in them."""
    made: Steps = table(*(row(f"u{number}-{index}", response=range(number, number + tokens)) for index in range(rows)))
    return made


def same(one: Stored, other: Steps) -> bool:
    return list(to_rows(steps_of(one))) == list(to_rows(other))


def whole(number: int, steps: Steps) -> bool:
    """Checks nothing of a table that is found."""
    return True
