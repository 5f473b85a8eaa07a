"""Messages for errors of pydantic: a few problems with their place and value, however large the input is."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST = 10
"""The most problems that a message names."""

_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxlong = _VALUES.maxother = 100


def problems(messages: Iterable[str]) -> str:
    """Joins the first messages. Reads only as many as it needs."""
    named = list(islice(messages, MOST + 1))
    return "; ".join(named[:MOST]) + ("; and more" if len(named) > MOST else "")


def place(item: Any) -> str:
    """Returns the place of an error of pydantic in the input, such as `micro_batch.size`."""
    return ".".join(part if part.isprintable() and len(part) <= 100 else shown(part) for part in map(str, item["loc"]))


def complaint(item: Any) -> str:
    """Returns the message of an error of pydantic in our form, without the value."""
    return f"{place(item)}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def shown(value: object) -> str:
    """Returns the value as Python writes it, shortened if it is long."""
    try:
        return _VALUES.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a number of {int(value).bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
