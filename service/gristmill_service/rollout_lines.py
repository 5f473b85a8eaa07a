"""Writes rows as the lines of a rollout file (specification, section 10)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.rows import to_rows
from gristmill._wire.steps import Steps

CONVERSATION = "conversation"
"""The column in which a recorder writes what was said: one line of JSON per step."""


def json_lines(steps: Steps, columns: Sequence[ColumnSpec]) -> Iterator[bytes]:
    """Yields each row as one line. columns: the run's declared columns."""
    # JSON has no NaN. Python's slower encoder writes it in a form that readers of these files accept.
    write: Callable[[Any], bytes] = _with_nonfinite if any(one.allow_nonfinite for one in columns) else orjson.dumps
    for row in to_rows(steps, columns):
        yield write(row) + b"\n"


def conversation_lines(steps: Steps, columns: Sequence[ColumnSpec]) -> Iterator[bytes]:
    """Yields each row as one line, with the messages of its column `conversation` and its tokens."""
    others = {column.name for column in columns}
    for row in to_rows(steps, columns):
        said = orjson.loads(bytes(row.get(CONVERSATION) or b"{}"))
        yield orjson.dumps({**{name: row[name] for name in row if name not in others}, **said}) + b"\n"


def _with_nonfinite(row: Any) -> bytes:
    return json.dumps(row).encode()
