"""File names for runs, whatever they are called."""

from __future__ import annotations

import re
from hashlib import sha256
from urllib.parse import quote, unquote

_LONGEST_NAME = 200
_HASH_NAME = re.compile(r"hash-[0-9a-f]{64}")


def directory_name(run: str) -> str:
    """A file name for any run name: escaped, and by its hash where that is too long. Never `..`, never a separator."""
    escaped = quote(run, safe="")
    if len(escaped) <= _LONGEST_NAME:
        return f"run-{escaped}"
    return f"hash-{sha256(run.encode()).hexdigest()}"


def is_hash_name(directory: str) -> bool:
    """Whether the directory's name does not tell its run's name."""
    return _HASH_NAME.fullmatch(directory) is not None


def run_name(directory: str) -> str | None:
    """The run of a directory that is not named by a hash; None where `directory_name` gives no such name."""
    run = unquote(directory.removeprefix("run-"))
    return run if directory_name(run) == directory else None
