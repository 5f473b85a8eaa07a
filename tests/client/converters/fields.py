"""Fields of rows as plain values, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def fields_of(rows: Sequence[dict[str, Any]], *names: str) -> list[Any]:
    """Return the named fields of each row, arrays as lists: a tuple for each row, or the value if one is named."""
    fields = [tuple(_plain(row.get(name)) for name in names) for row in rows]
    return [values[0] for values in fields] if len(names) == 1 else fields


def same(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
    """Return whether two lists of rows have the same fields with the same values."""
    return [{name: _plain(value) for name, value in row.items()} for row in one] == [
        {name: _plain(value) for name, value in row.items()} for row in other
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
