"""Writing a shard's runs of bytes to a file, with nothing assembled in between."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from gristmill_service.store.base import Buffer

# The most buffers that one writev takes on Linux (IOV_MAX).
_BUFFERS_AT_ONCE = 1024


def write_file(path: Path, groups: Iterable[Sequence[Buffer]]) -> None:
    """Creates `path`, readable by its owner only, with the buffers' bytes in order.

    Raises FileExistsError, or OSError where space or permission is lacking; the file may then be there in part.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        for group in groups:
            for start in range(0, len(group), _BUFFERS_AT_ONCE):
                _write_all(descriptor, group[start : start + _BUFFERS_AT_ONCE])
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    missing = sum(map(len, buffers)) - os.writev(descriptor, buffers)
    if not missing:
        return
    # A short write: a signal, or more than 2 GiB at once. Rare, so the rest may be joined.
    rest = memoryview(b"".join(buffers))[-missing:]
    while rest:
        rest = rest[os.write(descriptor, rest) :]
