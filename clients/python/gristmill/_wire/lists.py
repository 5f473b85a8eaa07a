"""Plain lists of numbers to arrays: at the speed of the standard library, and each token of a trajectory once.

A conversion that finds anything unusual returns None, and `gristmill._wire.tables` converts or refuses it by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from gristmill._wire.columns import Array
from gristmill.errors import InvalidArgumentError

_INT32 = np.dtype(np.int32)
_AT_ONCE = 1 << 16
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
        return np.frombuffer(struct.pack(f"{len(values)}{dtype.char}", *values), dtype)
    except (TypeError, ValueError, OverflowError, struct.error):
        return None


def from_lists(rows: list[Any], dtype: np.dtype[Any]) -> list[Array] | None:
    """Each row as `from_list` has it, where all rows are plain lists that it converts, and short ones; else None. For
    these a call for many costs a fraction of a call for each."""
    if set(map(type, rows)) != {list} or sum(map(len, rows)) > _SHORT * len(rows):
        return None
    found: list[Array] = []
    for some in _some_at_once(rows):
        if any(row and isinstance(row[0], bool) for row in some) and dtype != np.uint8:
            return None
        try:
            # A list of small integers is quicker by itself.
            whole = b"".join(map(bytes, some)) if dtype == np.uint8 else _packed(some, dtype)
        except (TypeError, ValueError, OverflowError, struct.error):
            return None
        values, ends = np.frombuffer(whole, dtype), [0, *accumulate(map(len, some))]
        found += [values[begin:end] for begin, end in pairwise(ends)]
    return found


def _some_at_once(rows: list[list[Any]]) -> Iterator[list[list[Any]]]:
    """The rows in their order, so many at a time that their numbers are looked at once while they are at hand."""
    some, count = list[list[Any]](), 0
    for row in rows:
        some.append(row)
        count += len(row)
        if count >= _AT_ONCE:
            yield some
            some, count = [], 0
    if some:
        yield some


def _packed(rows: list[list[Any]], dtype: np.dtype[Any]) -> bytes:
    return struct.pack(f"{sum(map(len, rows))}{dtype.char}", *chain.from_iterable(rows))


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
    """Tokens that were given as lists. A prompt that begins with the objects of its trajectory's step before, or has
    those of another sample's first one, is compared with it, which costs a third of converting it again. Equal numbers
    that are other objects are converted, which costs no more than comparing them.

    are_kept: whether prompts come later that begin with lists which are changed until then, as agents add to theirs:
    lists are copied for it.
    """

    def __init__(self, are_kept: bool = True) -> None:
        self._are_kept = are_kept
        self._steps: dict[tuple[str, int], tuple[list[list[Any]], tuple[Array, Array]]] = {}
        self._prompts: dict[str, tuple[list[Any], Array]] = {}

    def prompt(self, uid: str, sample: int, values: list[Any]) -> Array | None:
        """As `from_list`; int32."""
        if step := self._steps.get((uid, sample)):
            lists, arrays = step
            begin = 0
            for tokens in lists:
                if not _goes_on(values, begin, tokens):
                    return from_list(values, _INT32)
                begin += len(tokens)
            rest = from_list(values[begin:], _INT32)
            return None if rest is None else np.concatenate((*arrays, rest))
        if (known := self._prompts.get(uid)) and len(known[0]) == len(values) and _goes_on(values, 0, known[0]):
            return known[1]
        return from_list(values, _INT32)

    def keep(self, uid: str, sample: int, prompt: list[Any], response: Any, arrays: tuple[Array, Array]) -> None:
        """Keeps a step that another follows: prompt and response as they were given, and the arrays of both."""
        if (uid, sample) not in self._steps:
            self._prompts.setdefault(uid, (prompt.copy() if self._are_kept else prompt, arrays[0]))
        listed = response if type(response) is list else arrays[1].tolist()
        self._steps[uid, sample] = [prompt + listed] if self._are_kept else [prompt, listed], arrays


def _goes_on(values: list[Any], begin: int, tokens: list[Any]) -> bool:
    """Whether these tokens stand in `values` from there on, as the same objects; some are looked at first."""
    if not tokens:
        return True
    end, middle = begin + len(tokens), len(tokens) // 2
    if end > len(values) or values[begin] is not tokens[0] or values[end - 1] is not tokens[-1]:
        return False
    return values[begin + middle] is tokens[middle] and values[begin:end] == tokens
