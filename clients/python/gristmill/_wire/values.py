"""Converts the value of a row's field to an array or a plain value. An error for an invalid value names the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Array, least
from gristmill._wire.lists import check_no_null, from_list
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.steps import FLOAT32_MAX, INT32_MAX
from gristmill._wire.texts import check_text
from gristmill._wire.unlike_numbers import unlike_numbers
from gristmill.errors import InvalidArgumentError

Read = Callable[[Any, str, str], Array]
"""Converts a field's value. Arguments: the value, the field's name, and a description of the row for errors."""

_KIND_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def is_vector(value: Any) -> bool:
    """Returns whether the value is a sequence with one entry per token. Does not check the entries."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def scalar(value: Any, name: str, kind: type, where: str) -> Any:
    """Converts Python's or NumPy's scalars to a string, integer, number or bool. Raises InvalidArgumentError."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        # Larger numbers become infinite, and a later check refuses them.
        return float(value) if abs(value) <= FLOAT32_MAX else math.inf
    if kind is bool and isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArgumentError(f"{where}: {name} is {value!r}; expected {_KIND_NAMES[kind]}")
    if isinstance(value, int) and not -INT32_MAX <= value <= INT32_MAX:
        raise InvalidArgumentError(f"{where}: {name} is {value}; it must fit a 32-bit integer")
    if isinstance(value, str):
        check_text(value, f"{where}: {name}")
    return value


def _vector(values: Any, name: str, where: str) -> Array:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.empty((0, 0), object)
    if array.dtype == object:
        check_no_null(values, name, where)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iufb"):
        raise unlike_numbers(values, name, where)
    return array


def tokens(values: Any, name: str, where: str) -> NDArray[np.int32]:
    """Converts token ids. `gristmill._wire.steps.check` later refuses negative ones, for a whole table."""
    array = _vector(values, name, where)
    if not array.size:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{where}: {name} has {array.dtype} values; token ids are integers 0..{INT32_MAX}")
    if array.dtype != np.int32:
        outside = np.less(array, 0) | np.greater(array, INT32_MAX)
        if outside.any():
            bad = int(outside.argmax())
            raise InvalidArgumentError(f"{where}: {name}[{bad}] is {array[bad]}; token ids are 0..{INT32_MAX}")
    return array.astype(np.int32, copy=False)


def token_ids(values: Any, name: str, where: str) -> NDArray[np.int32]:
    """Converts token ids to an array. Raises InvalidArgumentError that names the field and the value."""
    array = from_list(values, np.dtype(np.int32)) if type(values) is list else None
    ids = tokens(values, name, where) if array is None else array
    if ids.size and least(ids) < 0:
        bad = int((ids < 0).argmax())
        raise InvalidArgumentError(f"{where}: {name}[{bad}] is {ids[bad]}; token ids are 0..{INT32_MAX}")
    return ids


def version_array(values: Any, name: str, where: str) -> NDArray[np.int32]:
    """Converts policy versions, one per response token."""
    array = _vector(values, name, where)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{where}: {name} has {array.dtype} values; policy versions are integers")
    outside = np.less(array, UNKNOWN) | np.greater(array, INT32_MAX)
    if outside.any():
        bad = int(outside.argmax())
        raise InvalidArgumentError(f"{where}: {name}[{bad}] is {array[bad]}; it must be -1 (unknown) or 0..{INT32_MAX}")
    return array.astype(np.int32, copy=False)


def mask(values: Any, name: str, where: str) -> NDArray[np.uint8]:
    """Converts a mask: 0 or 1 for each response token."""
    array = _vector(values, name, where)
    good = (array == 0) | (array == 1)
    if not good.all():
        bad = int((~good).argmax())
        raise InvalidArgumentError(f"{where}: {name}[{bad}] is {array[bad]}; it must be 0 or 1")
    return array.astype(np.uint8, copy=False)


def float32s(values: Any, name: str, where: str) -> Array:
    """Converts numbers, one per response token, to float32."""
    return floats(values, name, where, np.float32)


def floats(values: Any, name: str, where: str, dtype: Any) -> Array:
    """Converts numbers, one per response token. Returns float32 unchanged, because the table converts it on copying."""
    array = _vector(values, name, where)
    if array.size and array.dtype.kind not in "iuf":
        raise InvalidArgumentError(f"{where}: {name} has {array.dtype} values; expected numbers")
    if dtype == np.float64 and array.dtype == np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)
