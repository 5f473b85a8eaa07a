"""Rows told shortly, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def told(rows: Sequence[dict[str, Any]], *names: str) -> list[Any]:
    """Of each row the fields named, arrays as lists; alone where it is one."""
    found = [[_plain(row.get(name)) for name in names] for row in rows]
    return [values[0] if len(names) == 1 else tuple(values) for values in found]


def same(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
    """Whether two lists of rows have the same fields with the same values."""
    return [{name: _plain(value) for name, value in row.items()} for row in one] == [
        {name: _plain(value) for name, value in row.items()} for row in other
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
