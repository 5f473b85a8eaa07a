"""File names for runs of any name."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import quote, unquote

_LONGEST_NAME = 200
_HASH_NAME = re.compile(r"hash-[0-9a-f]{64}")


def directory_name(run: str) -> str:
    """Returns a file name for a run: its escaped name, or a hash if that is too long. It contains no separator, and is
    not `..`."""
    escaped = quote(run, safe="")
    if len(escaped) <= _LONGEST_NAME:
        return f"run-{escaped}"
    return f"hash-{sha256(run.encode()).hexdigest()}"


def is_hash_name(directory: str) -> bool:
    """Returns whether the directory's name is a hash, from which the run's name cannot be derived."""
    return _HASH_NAME.fullmatch(directory) is not None


def run_name(directory: str) -> str | None:
    """Returns the run's name for a directory's name that is not a hash; None if `directory_name` does not return it."""
    run = unquote(directory.removeprefix("run-"))
    return run if directory_name(run) == directory else None
