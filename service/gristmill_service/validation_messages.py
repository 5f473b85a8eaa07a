"""Messages for pydantic errors: they name a few problems with location and value, and stay short for large inputs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MOST = 10
"""The maximum number of problems in a message."""

_VALUES = reprlib.Repr()
_VALUES.maxstring = _VALUES.maxlong = _VALUES.maxother = 100


def problems(messages: Iterable[str]) -> str:
    """Joins the first `MOST` messages, and reads only one more."""
    named = list(islice(messages, MOST + 1))
    return "; ".join(named[:MOST]) + ("; and more" if len(named) > MOST else "")


def place(item: Any) -> str:
    """Returns where in the input a pydantic error is, such as `micro_batch.size`. Omits the blank tags of unions."""
    parts = filter(str.strip, map(str, item["loc"]))
    return ".".join(part if part.isprintable() and len(part) <= 100 else shown(part) for part in parts)


def complaint(item: Any) -> str:
    """Returns the message of a pydantic error as `<where>: <what>`, without the value."""
    return f"{place(item)}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def shown(value: object) -> str:
    """Returns the value's `repr`, shortened if it is long."""
    try:
        return _VALUES.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"a number of {int(value).bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
