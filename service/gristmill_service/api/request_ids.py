"""The id of the call that is being answered: the caller's where it sends a valid one, else one that is made here.

It is sent back to the caller, passed on to the run's owner, and added to every line that is logged meanwhile.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

HEADER = "x-request-id"
"""The name in gRPC metadata and among HTTP headers."""

# One word in a log, a header and a shell.
_VALID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_MINE, _numbers = secrets.token_hex(4), itertools.count(1)

_current: ContextVar[str] = ContextVar("gristmill_request_id", default="")


def begin(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Takes a call's id from its metadata, or makes one. It is current until the next call of the thread or task."""
    request_id = ""
    for key, value in metadata:
        if key == HEADER:
            request_id = value if isinstance(value, str) else value.decode("latin-1")
    if not request_id or _VALID.fullmatch(request_id) is None:
        request_id = f"{_MINE}-{next(_numbers):x}"
    _current.set(request_id)
    return request_id


def current() -> str:
    """The id of the call that is being answered; empty outside of calls."""
    return _current.get()
