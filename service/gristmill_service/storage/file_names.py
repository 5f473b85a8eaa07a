"""File names for runs of any name."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import quote, unquote

_LONGEST_NAME = 200
_HASH_NAME = re.compile(r"hash-[0-9a-f]{64}")


def directory_name(run: str) -> str:
    """Returns a file name for a run: its name escaped, or a hash if that is too long. Never `..`, never a separator."""
    escaped = quote(run, safe="")
    if len(escaped) <= _LONGEST_NAME:
        return f"run-{escaped}"
    return f"hash-{sha256(run.encode()).hexdigest()}"


def is_hash_name(directory: str) -> bool:
    """Returns whether the directory is named by a hash, from which its run's name cannot be derived."""
    return _HASH_NAME.fullmatch(directory) is not None


def run_name(directory: str) -> str | None:
    """Returns the run of a directory that is not named by a hash; None if `directory_name` makes no such name."""
    run = unquote(directory.removeprefix("run-"))
    return run if directory_name(run) == directory else None
