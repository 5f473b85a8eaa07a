"""A row's value of a column that has a value per step: that of one of its steps, or their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec, by_name, from_bfloat16, to_bfloat16
from gristmill._wire.columns import Array, Int64s, Ragged
from gristmill._wire.steps import Extra, Steps, no_extra
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.merge import Rows

Bools = NDArray[np.bool_]

_FLOAT64_MAX = float(np.finfo(np.float64).max)


def extra_of(spec: ColumnSpec, steps: Steps) -> Extra:
    return steps.extras.get(spec.name) or no_extra(len(steps), spec.empty())


def any_given(given: Bools, rows: Rows) -> Bools:
    """Returns whether any of each row's visits is given; bool (rows,)."""
    return np.logical_or.reduceat(given, rows.edges[:-1]) if len(rows) else given


def last_given(given: Bools, rows: Rows) -> Int64s:
    """Returns the last of each row's given visits, -1 where there is none; int64 (rows,)."""
    visits = np.where(given, np.arange(len(given)), -1)
    return np.maximum.reduceat(visits, rows.edges[:-1]) if len(rows) else visits


def _first_given(given: Bools, rows: Rows) -> Int64s:
    visits = np.where(given, np.arange(len(given)), len(given))
    first = np.minimum.reduceat(visits, rows.edges[:-1]) if len(rows) else visits
    return np.where(first == len(given), -1, first)


def visits_with_value(spec: ColumnSpec, given: Bools, rows: Rows) -> Int64s:
    """Returns the visit with each row's element, -1 for none; (rows,)."""
    return _first_given(given, rows) if spec.merge == "first" else last_given(given, rows)


def row_values(spec: ColumnSpec, values: Ragged, given: Bools, rows: Rows) -> Array:
    """Returns each row's element: the fill for the padding row and where no visit has one; (rows + 1, *shape)."""
    elements = np.full((len(rows) + 1, *spec.value_shape), spec.fill_value, spec.storage)
    if spec.merge == "sum":
        has = np.append(any_given(given, rows), False)
        # A step that rows share counts once, so that a sum over rows is that over steps.
        elements[has] = _sums(spec, values, given & rows.is_first, rows)[has[:-1]]
        return elements
    visits = visits_with_value(spec, given, rows)
    has = visits >= 0
    elements[:-1][has] = values.values[values.starts[rows.steps[visits[has]]]]
    return elements


def row_costs(steps: Steps, rows: Rows, config: RunConfig) -> NDArray[np.float64] | None:
    """Returns the cost of each row that `flops` reads from a column; (rows,), None if it reads none."""
    name = None if config.flops is None else config.flops.column
    if name is None:
        return None
    spec = by_name(config.columns)[name]
    extra = extra_of(spec, steps)
    values = row_values(spec, extra.values, extra.given[rows.steps], rows)[:-1]
    return (from_bfloat16(values) if spec.dtype == "bfloat16" else values).astype(np.float64)


def _sums(spec: ColumnSpec, values: Ragged, given: Bools, rows: Rows) -> Array:
    """Returns each row's sum, limited to the range of the column's type; (rows, *shape)."""
    exact: Any = np.float64 if spec.is_float else np.int64
    terms = np.zeros((len(given), *spec.value_shape), exact)
    chosen = values.values[values.starts[rows.steps[given]]]
    terms[given] = from_bfloat16(chosen) if spec.dtype == "bfloat16" else chosen
    if not len(rows):
        return terms.astype(spec.storage)
    if not spec.is_float:
        limits = np.iinfo(spec.storage)
        return np.clip(_int64_sums(terms, rows.edges[:-1]), limits.min, limits.max).astype(spec.storage)
    sums, most = _float64_sums(terms, rows.edges[:-1]), _most(spec)
    sums = np.where(np.isfinite(sums), np.clip(sums, -most, most), sums)
    return to_bfloat16(sums) if spec.dtype == "bfloat16" else sums.astype(spec.storage)


def _most(spec: ColumnSpec) -> float:
    """Returns the largest finite number of a column of floats."""
    if spec.dtype == "bfloat16":
        return float(from_bfloat16(np.array([0x7F7F], np.uint16))[0])
    return float(np.finfo(spec.storage).max)


def _int64_sums(terms: NDArray[np.int64], begins: Int64s) -> NDArray[np.int64]:
    """Returns sums of consecutive terms along the first axis, limited to the range of int64."""
    # The sums of the low and high halves do not overflow; the carry is added to the high one.
    low = np.add.reduceat(terms & 0xFFFFFFFF, begins)
    high = np.add.reduceat(terms >> 32, begins) + (low >> 32)
    limits = np.iinfo(np.int64)
    sums = (high << 32) + (low & 0xFFFFFFFF)
    return np.select([high > limits.max >> 32, high < limits.min >> 32], [limits.max, limits.min], sums)


def _float64_sums(terms: NDArray[np.float64], begins: Int64s) -> NDArray[np.float64]:
    """Returns sums of consecutive terms along the first axis, limited to the range of float64; not finite where a term
    is not."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums: NDArray[np.float64] = np.add.reduceat(terms, begins)
        if np.isfinite(sums).all():
            return sums
        # Scaled down so that no partial sum overflows.
        scaled = np.clip(np.add.reduceat(np.ldexp(terms, -32), begins), *np.ldexp([-_FLOAT64_MAX, _FLOAT64_MAX], -32))
    is_finite = np.logical_and.reduceat(np.isfinite(terms), begins)
    return np.where(is_finite & ~np.isfinite(sums), np.ldexp(scaled, 32), sums)
