"""The id of the call that is being answered: its caller's own where that is one, else made here.

It goes back to the caller, on to the process that decides for the run, and into every line that is logged meanwhile.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

HEADER = "x-request-id"
"""Of gRPC metadata and of HTTP."""

# What stays one word in a log, a header and a shell.
_VALID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_MINE, _numbers = secrets.token_hex(4), itertools.count(1)

_current: ContextVar[str] = ContextVar("gristmill_request_id", default="")


def begin(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The id of a call that came with this metadata; it is the current one until the thread's, or task's, next call."""
    found = ""
    for key, value in metadata:
        if key == HEADER:
            found = value if isinstance(value, str) else value.decode("latin-1")
    if not found or _VALID.fullmatch(found) is None:
        found = f"{_MINE}-{next(_numbers):x}"
    _current.set(found)
    return found


def current() -> str:
    """Empty where no call is being answered."""
    return _current.get()
