"""Parquet files with the tables of batches, a line per training row."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gristmill._wire.batch_table import BatchTable
from gristmill.errors import InvalidArgumentError


def check_table(path: Path) -> None:
    """Raises InvalidArgumentError if the file cannot be written because its name or a package is wrong."""
    if path.suffix != ".parquet":
        raise InvalidArgumentError(f"--table {path} is not a .parquet file; name it {path.with_suffix('.parquet')}")
    _parquet()


def write_table(path: Path, tables: Iterable[tuple[int, BatchTable]]) -> None:
    """Writes the tables of these batches to one file, with the number of the batch in the column `batch`."""
    pyarrow, parquet = _parquet()
    parts = [
        pyarrow.table({"batch": np.full(len(columns["row"]), number), **columns})
        for number, columns in ((number, table.by_row()) for number, table in tables)
    ]
    parquet.write_table(pyarrow.concat_tables(parts), path)


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidArgumentError("--table needs pyarrow, not installed; pip install pyarrow") from None
    return pyarrow, pyarrow.parquet
