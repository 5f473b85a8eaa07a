"""Converts lists of numbers to arrays, as fast as the standard library allows, and each token of a trajectory once.

A conversion returns None for an unusual value; `gristmill._wire.tables` then converts or refuses the value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

_INT32 = np.dtype(np.int32)
_AT_ONCE = 2048
"""Values to convert per call: few enough for the processor's cache, and enough to outweigh the cost of a call."""
_MOST_PIECES = 16
_SHORT = 256
"""Longer lists are converted one by one."""


def from_list(values: list[Any], dtype: np.dtype[Any]) -> Array | None:
    """Converts a list to an array of int32, uint8, float32 or float64. Returns None if a value does not fit, or if the
    first value is a bool.

    Nearly twice as fast as NumPy, which first determines a common type; ten times as fast for masks.
    """
    if not values:
        return np.empty(0, dtype)
    try:
        if dtype == np.uint8:
            return np.frombuffer(bytes(values), np.uint8)
        if isinstance(values[0], bool):
            return None
        return np.frombuffer(_packed(values, dtype), dtype)
    except (TypeError, ValueError, OverflowError, struct.error):
        return None


def joined(lists: list[list[Any]], dtype: np.dtype[Any]) -> Array | None:
    """Converts all lists to one array, like `from_list`. Returns None if a value does not fit, or if the lists are
    long, because one call for many lists is faster only for short lists."""
    if sum(map(len, lists)) > _SHORT * len(lists):
        return None
    try:
        # bytes() of one list is faster than packing several.
        parts = map(bytes, lists) if dtype == np.uint8 else [_packed(some, dtype) for some in _some_at_once(lists)]
        return np.frombuffer(b"".join(parts), dtype)
    except (TypeError, ValueError, OverflowError, struct.error):
        return None


def _some_at_once(lists: list[list[Any]]) -> Iterator[list[Any]]:
    """Yields the values of the lists, about `_AT_ONCE` at a time. Raises TypeError if a list begins with a bool."""
    some: list[Any] = []
    for values in lists:
        if values and isinstance(values[0], bool):
            raise TypeError("true and false are not numbers")
        some += values
        if len(some) >= _AT_ONCE:
            yield some
            some = []
    yield some


def _packed(values: list[Any], dtype: np.dtype[Any]) -> bytes:
    return struct.pack(f"{len(values)}{dtype.char}", *values)


def check_no_null(values: Any, name: str, where: str) -> None:
    """Raises InvalidArgumentError that names the first null entry. Also searches nested lists."""
    if place := _null_in(values):
        raise InvalidArgumentError(f"{where}: {name}{place} is null; pass a number")


def _null_in(values: Any) -> str:
    for index, value in enumerate(values if isinstance(values, (list, tuple)) else ()):
        if value is None:
            return f"[{index}]"
        if place := _null_in(value):
            return f"[{index}]{place}"
    return ""


def size_of(values: Any) -> int:
    """Returns the number of values of a list or array, without reading a list."""
    return len(values) if type(values) is list else np.size(values)


Pieces = list[Array]
"""Tokens as arrays to concatenate."""


class ConvertedTokens:
    """Converts the token lists of a table's rows, each token once.

    If a prompt begins with the same objects as its trajectory's last step, or as the first prompt of another sample, it
    is compared instead of converted, which takes a third of the time. Equal numbers that are different objects are
    converted, because comparing them is not faster. The lists must not change meanwhile.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], tuple[list[list[Any]], Pieces]] = {}
        self._prompts: dict[str, tuple[list[Any], Pieces]] = {}

    def prompt(self, key: tuple[str, int], values: list[Any]) -> Pieces | None:
        """Converts a prompt, like `from_list`; int32. key: uid and sample."""
        before, begin = Pieces(), 0
        if step := self._steps.get(key):
            if (known := _known(values, step[0])) is not None:
                begin, before = known, step[1]
        elif (first := self._prompts.get(key[0])) and _known(values, [first[0]]) == len(values):
            return first[1]
        rest = from_list(values[begin:] if begin else values, _INT32)
        return None if rest is None else [*before, rest]

    def keep(self, key: tuple[str, int], prompt: list[Any], response: Any, pieces: Pieces) -> None:
        """Stores a step that is not the last of its trajectory: its prompt and response, and the pieces of both."""
        if key not in self._steps:
            self._prompts.setdefault(key[0], (prompt, pieces[:-1]))
        listed = response if type(response) is list else pieces[-1].tolist()
        if len(pieces) > _MOST_PIECES:
            pieces = [np.concatenate(pieces)]
        self._steps[key] = [prompt, listed], pieces


def _known(values: list[Any], lists: list[list[Any]]) -> int | None:
    """Returns the number of tokens in the lists if `values` begins with them, else None. Compares the identity of a few
    objects first, because converting a list of different objects is faster than comparing it."""
    begin = 0
    for tokens in lists:
        end, middle = begin + len(tokens), begin + len(tokens) // 2
        if begin < end:
            if end > len(values) or values[begin] is not tokens[0] or values[end - 1] is not tokens[-1]:
                return None
            if values[middle] is not tokens[middle - begin] or values[begin:end] != tokens:
                return None
        begin = end
    return begin
