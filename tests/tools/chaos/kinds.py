"""The kinds of run that a campaign may train: what their settings have beyond those of all."""

from __future__ import annotations

from typing import Any

PLAIN, COLUMNS = "plain", "columns"

KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {"merge": "prefix"},
    # Columns of every scope, of workers and of trainers, on rows that share their beginnings.
    COLUMNS: {
        "merge": "tree",
        "advantage_estimator": "gae",
        "columns": [
            {"name": "experts", "dtype": "int16", "scope": "token", "shape": [2], "fill": -1},
            {"name": "teacher", "dtype": "float32", "scope": "response"},
            {"name": "calls", "dtype": "int32", "scope": "row", "merge": "sum"},
            {"name": "images", "dtype": "uint8", "scope": "items", "shape": [3], "merge": "concat", "required": False},
            {"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"},
            {"name": "launch", "dtype": "int32", "scope": "row", "source": "trainer"},
        ],
    },
}
WRITTEN = ("values", "launch")
