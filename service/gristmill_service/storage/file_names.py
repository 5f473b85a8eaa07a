"""File names for runs, whatever they are called."""

from __future__ import annotations

from hashlib import sha256
from urllib.parse import quote

_LONGEST_NAME = 200


def directory_name(run: str) -> str:
    """A file name for any run name: escaped, and by its hash where that is too long. Never `..`, never a separator."""
    escaped = quote(run, safe="")
    if len(escaped) <= _LONGEST_NAME:
        return f"run-{escaped}"
    return f"hash-{sha256(run.encode()).hexdigest()}"
