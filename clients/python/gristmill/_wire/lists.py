"""Plain lists of numbers to arrays: at the speed of the standard library, and each token of a trajectory once.

A conversion that finds anything unusual returns None, and `gristmill._wire.tables` converts or refuses it by name.
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
"""Values that stay in the processor's cache between two looks at them, and take longer to convert than a call does."""
_MOST_PIECES = 16
_SHORT = 256
"""Values of a row that take longer to convert than the call does."""


def from_list(values: list[Any], dtype: np.dtype[Any]) -> Array | None:
    """The values as an array of int32, uint8, float32 or float64; None where one does not fit, or the first is a bool.

    Nearly twice as quick as NumPy, which looks for a type first; masks are ten times as quick.
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
    """The values of all lists in one array, each as `from_list` has it; None where one does not fit, or where they are
    long ones: for short lists a call for many costs a fraction of a call for each."""
    if sum(map(len, lists)) > _SHORT * len(lists):
        return None
    try:
        # A list of small integers is quicker by itself.
        parts = map(bytes, lists) if dtype == np.uint8 else [_packed(some, dtype) for some in _some_at_once(lists)]
        return np.frombuffer(b"".join(parts), dtype)
    except (TypeError, ValueError, OverflowError, struct.error):
        return None


def _some_at_once(lists: list[list[Any]]) -> Iterator[list[Any]]:
    """Their values, so many at a time that they are looked at again while they are at hand. Raises TypeError where a
    list begins with true or false."""
    some: list[Any] = []
    for values in lists:
        if values and isinstance(values[0], bool):
            raise TypeError("true and false are no numbers")
        some += values
        if len(some) >= _AT_ONCE:
            yield some
            some = []
    yield some


def _packed(values: list[Any], dtype: np.dtype[Any]) -> bytes:
    return struct.pack(f"{len(values)}{dtype.char}", *values)


def check_no_null(values: Any, name: str, where: str) -> None:
    """Raises InvalidArgumentError naming the first entry that is null, of lists within lists too."""
    if place := _null_in(values):
        raise InvalidArgumentError(f"{where}: {name}{place} is null; each is a number")


def _null_in(values: Any) -> str:
    for index, value in enumerate(values if isinstance(values, (list, tuple)) else ()):
        if value is None:
            return f"[{index}]"
        if place := _null_in(value):
            return f"[{index}]{place}"
    return ""


def size_of(values: Any) -> int:
    """How many values a list or array has, of a list without a look at them."""
    return len(values) if type(values) is list else np.size(values)


Pieces = list[Array]
"""Tokens, one array after another."""


class ConvertedTokens:
    """The token lists of a table's rows, converted once.

    A prompt that begins with the same number objects as its trajectory's last step, or another sample's first prompt,
    is compared with it, which takes a third of the time of converting it again. Equal numbers that are other objects
    are converted, which takes no longer than comparing them. The lists must not change in the meantime.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], tuple[list[list[Any]], Pieces]] = {}
        self._prompts: dict[str, tuple[list[Any], Pieces]] = {}

    def prompt(self, key: tuple[str, int], values: list[Any]) -> Pieces | None:
        """Returns the tokens like `from_list`; int32. key: uid and sample."""
        before, begin = Pieces(), 0
        if step := self._steps.get(key):
            if (known := _known(values, step[0])) is not None:
                begin, before = known, step[1]
        elif (first := self._prompts.get(key[0])) and _known(values, [first[0]]) == len(values):
            return first[1]
        rest = from_list(values[begin:] if begin else values, _INT32)
        return None if rest is None else [*before, rest]

    def keep(self, key: tuple[str, int], prompt: list[Any], response: Any, pieces: Pieces) -> None:
        """Stores a step that another one follows: its prompt and response, and the pieces of both."""
        if key not in self._steps:
            self._prompts.setdefault(key[0], (prompt, pieces[:-1]))
        listed = response if type(response) is list else pieces[-1].tolist()
        if len(pieces) > _MOST_PIECES:
            pieces = [np.concatenate(pieces)]
        self._steps[key] = [prompt, listed], pieces


def _known(values: list[Any], lists: list[list[Any]]) -> int | None:
    """How many tokens the lists have, if the values begin with these; None if not, or if they seem to be other objects:
    some are looked at first."""
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
