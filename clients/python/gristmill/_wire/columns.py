"""Ragged columns: the one data structure that token data lives in.

A ragged column is one flat buffer and, per row, where its values start and how many there are. Rows may be reordered,
selected and shared without moving a value. Nothing here copies token data unless it says so.
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
    """Row i holds `values[starts[i] : starts[i] + lengths[i]]`.

    values: (n,) of any dtype; starts, lengths: int64 (rows,).
    """

    values: Array
    starts: Int64s
    lengths: Int64s

    @classmethod
    def from_lengths(cls, values: Array, lengths: Int64s) -> Ragged:
        """Rows that stand in `values` one after another."""
        return cls(values, starts_of(lengths), lengths)

    @classmethod
    def from_arrays(cls, arrays: Sequence[Array], dtype: Any) -> Ragged:
        """A copy of the arrays in one buffer."""
        values = np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.empty(0, dtype)
        return cls.from_lengths(values, lengths_of(arrays))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Array:
        start = int(self.starts[row])
        return self.values[start : start + int(self.lengths[row])]

    @property
    def total(self) -> int:
        """Values in all rows."""
        return sum_of(self.lengths)

    def take(self, rows: Any) -> Ragged:
        """The rows at these indices (or slice), sharing the values."""
        return Ragged(self.values, self.starts[rows], self.lengths[rows])

    def part(self, rows: slice) -> Ragged:
        """The rows of a slice without a step, sharing no values but theirs where these stand one after another."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        first = int(starts[0]) if len(starts) else 0
        if not np.array_equal(starts - first, starts_of(lengths)):
            return Ragged(self.values, starts, lengths)
        return Ragged(self.values[first : first + sum_of(lengths)], starts - first, lengths)

    def arrays(self) -> list[Array]:
        """Each row as a view."""
        values = self.values
        return [
            values[start : start + length]
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def memory(self) -> list[memoryview]:
        """The memory of each row, where values are single numbers; item by item as these."""
        data = np.ascontiguousarray(self.values).data
        return [
            data[start : start + length]
            for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        ]

    def is_compact(self) -> bool:
        """Whether the rows stand one after another and fill `values`."""
        return len(self.values) == self.total and _are_equal(self.starts, starts_of(self.lengths))

    def compact(self) -> Ragged:
        """The same rows one after another; itself where they stand so already, else a copy."""
        return self if self.is_compact() else Ragged.from_arrays(self.arrays(), self.values.dtype)

    def row_sums(self) -> NDArray[np.float64]:
        """Each row's `exact_sum`; float64 (rows,)."""
        return np.array([exact_sum(array) for array in self.arrays()], np.float64)


def exact_sum(values: Array) -> float:
    """The sum in float64, correctly rounded: it does not depend on the order of the values, nor on zeros among them.

    Not finite where a value is not.
    """
    terms = values[values != 0].tolist()
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # of opposite infinities, or beyond float64
        return math.nan


FEW_ROWS = 32
"""For so few rows Python's own numbers are quicker than NumPy's, whose every call costs microseconds."""


def least(column: Array) -> Any:
    """The smallest of a column of numbers; 0 where there are none."""
    if len(column) <= FEW_ROWS:
        return min(column.tolist(), default=0)
    return column.min()


def greatest(column: Array) -> Any:
    """The largest of a column of numbers; 0 where there are none."""
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
    """How many each of them has; int64 (n,)."""
    return np.fromiter(map(len, values), np.int64, len(values))


def starts_of(lengths: Int64s) -> Int64s:
    """The start of each row when they stand one after another."""
    starts = np.zeros(len(lengths), np.int64)
    if len(lengths) == 1:
        return starts
    np.cumsum(lengths[:-1], out=starts[1:])
    return starts


def bytes_of(values: Array) -> memoryview:
    """The array's memory as bytes, not copied where it is contiguous."""
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
