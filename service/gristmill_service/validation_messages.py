"""Messages for what pydantic refuses: a few problems, each with its place and its value, however large the input is."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST = 10
"""How many problems a message names."""

_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxlong = _VALUES.maxother = 100


def problems(messages: Iterable[str]) -> str:
    """Returns the first problems as one text. Reads no more of them than it names."""
    named = list(islice(messages, MOST + 1))
    return "; ".join(named[:MOST]) + ("; and more" if len(named) > MOST else "")


def place(item: Any) -> str:
    """Returns where in the input an error of pydantic's stands, such as `micro_batch.size`."""
    return ".".join(part if part.isprintable() and len(part) <= 100 else shown(part) for part in map(str, item["loc"]))


def complaint(item: Any) -> str:
    """Returns what is wrong with which part of the input, without its value: an error of pydantic's in our form."""
    return f"{place(item)}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def shown(value: object) -> str:
    """Returns the value as Python writes it, cut short where it is long."""
    try:
        return _VALUES.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a number of {int(value).bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
