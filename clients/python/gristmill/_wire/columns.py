"""Ragged columns, which store all token data.

A ragged column has one flat buffer, and the start and the number of values of each row. Rows can be reordered, selected
and shared without moving values. Functions of this module copy token data only if their docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """A column whose row i is `values[starts[i] : starts[i] + lengths[i]]`.

    values: (n,) of any dtype; starts, lengths: int64 (rows,).
    """

    values: Array
    starts: Int64s
    lengths: Int64s

    @classmethod
    def from_lengths(cls, values: Array, lengths: Int64s) -> Ragged:
        """Returns a column of rows that are adjacent in `values`."""
        return cls(values, starts_of(lengths), lengths)

    @classmethod
    def from_arrays(cls, arrays: Sequence[Array], dtype: Any) -> Ragged:
        """Copies one array per row to one buffer."""
        values = np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.empty(0, dtype)
        return cls.from_lengths(values, lengths_of(arrays))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Array:
        start = int(self.starts[row])
        return self.values[start : start + int(self.lengths[row])]

    @property
    def total(self) -> int:
        """The number of values of all rows."""
        return sum_of(self.lengths)

    def take(self, rows: Any) -> Ragged:
        """Returns the rows at these indices, or of this slice. Values are shared."""
        return Ragged(self.values, self.starts[rows], self.lengths[rows])

    def part(self, rows: slice) -> Ragged:
        """Returns the rows of a slice with step 1. If they are adjacent, the result references only their values."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        first = int(starts[0]) if len(starts) else 0
        if not np.array_equal(starts - first, starts_of(lengths)):
            return Ragged(self.values, starts, lengths)
        return Ragged(self.values[first : first + sum_of(lengths)], starts - first, lengths)

    def arrays(self) -> list[Array]:
        """Returns a view of each row."""
        values = self.values
        return [
            values[start : start + length]
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def memory(self) -> list[memoryview]:
        """Returns a memoryview of each row. Values must be scalars."""
        data = np.ascontiguousarray(self.values).data
        return [
            data[start : start + length]
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def is_compact(self) -> bool:
        """Returns whether the rows are adjacent and fill `values`."""
        return len(self.values) == self.total and _are_equal(self.starts, starts_of(self.lengths))

    def compact(self) -> Ragged:
        """Returns a column with adjacent rows: itself if they are already adjacent, else a copy."""
        return self if self.is_compact() else Ragged.from_arrays(self.arrays(), self.values.dtype)

    def row_sums(self) -> NDArray[np.float64]:
        """Returns the `exact_sum` of each row; float64 (rows,)."""
        return np.array([exact_sum(array) for array in self.arrays()], np.float64)


def exact_sum(values: Array) -> float:
    """Returns the correctly rounded sum in float64, which is independent of the order of values and of zeros.

    The sum is not finite if a value is not.
    """
    terms = values[values != 0].tolist()
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # opposite infinities, or too large for float64
        return math.nan


FEW_ROWS = 32
"""Up to this many rows, plain Python is faster than NumPy, because each NumPy call takes microseconds."""


def least(column: Array) -> Any:
    """Returns the smallest number of a column; 0 if it is empty."""
    if len(column) <= FEW_ROWS:
        return min(column.tolist(), default=0)
    return column.min()


def greatest(column: Array) -> Any:
    """Returns the largest number of a column; 0 if it is empty."""
    if len(column) <= FEW_ROWS:
        return max(column.tolist(), default=0)
    return column.max()


def sum_of(lengths: Int64s) -> int:
    return sum(lengths.tolist()) if len(lengths) <= FEW_ROWS else int(lengths.sum())


def _are_equal(one: Int64s, other: Int64s) -> bool:
    if len(one) <= FEW_ROWS:
        return bool(one.tolist() == other.tolist())
    return bool(np.array_equal(one, other))


def lengths_of(values: Sequence[Sized]) -> Int64s:
    """Returns the length of each value; int64 (n,)."""
    return np.fromiter(map(len, values), np.int64, len(values))


def starts_of(lengths: Int64s) -> Int64s:
    """Returns the start of each row if rows are adjacent."""
    starts = np.zeros(len(lengths), np.int64)
    if len(lengths) == 1:
        return starts
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts


def bytes_of(values: Array) -> memoryview:
    """Returns the array's memory as bytes; copies it only if it is not contiguous."""
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
