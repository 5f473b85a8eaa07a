"""Plain lists of numbers to arrays: at the speed of the standard library, and each token of a trajectory once.

A conversion that finds anything unusual returns None, and `gristmill._wire.tables` converts or refuses it by name.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

_INT32 = np.dtype(np.int32)


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
        return np.frombuffer(struct.pack(f"{len(values)}{dtype.char}", *values), dtype)
    except (TypeError, ValueError, OverflowError, struct.error):
        return None


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


class ConvertedTokens:
    """Tokens that were given as lists. A prompt that begins with all of its trajectory's step before, or is the first
    one of another sample of its group, is compared with it, which costs a twentieth of converting it again."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], tuple[list[Any], tuple[Array, Array]]] = {}
        self._prompts: dict[str, tuple[list[Any], Array]] = {}

    def prompt(self, uid: str, sample: int, values: list[Any]) -> Array | None:
        """As `from_list`; int32."""
        if step := self._steps.get((uid, sample)):
            tokens, arrays = step
            if values[: len(tokens)] == tokens:
                rest = from_list(values[len(tokens) :], _INT32)
                return None if rest is None else np.concatenate((*arrays, rest))
        elif (known := self._prompts.get(uid)) and known[0] == values:
            return known[1]
        return from_list(values, _INT32)

    def keep(self, uid: str, sample: int, prompt: list[Any], response: Any, arrays: tuple[Array, Array]) -> None:
        """Keeps a step that another follows: prompt and response as they were given, and the arrays of both. The lists
        are copied: agents go on adding to them."""
        if (uid, sample) not in self._steps:
            self._prompts.setdefault(uid, (prompt.copy(), arrays[0]))
        listed = response if type(response) is list else arrays[1].tolist()
        self._steps[uid, sample] = prompt + listed, arrays
