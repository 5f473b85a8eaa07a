"""This machine's places for shards and runs: whether they can be written to, their size, and their room."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from gristmill_service.cli.checks.check import Check
from gristmill_service.settings import Settings

_LEAST_BYTES = 1_000_000_000
# A container without a setting of its own has 64 MB of shared memory.
_LARGER = (
    "give it the size that docs/operations.md, 'Sizing', comes to (docker run --shm-size, in Kubernetes an emptyDir of "
    "medium Memory), or name another tmpfs by --shared-memory-dir"
)


def check_machine(settings: Settings) -> Iterator[Check]:
    """The places that these settings name."""
    for store, directory in settings.store_directories.items():
        if store == "shared_memory":
            yield _place("shared memory", directory, _LARGER)
            continue
        # The service makes the directory when it starts.
        whole = directory.absolute()
        existing = next(path for path in (whole, *whole.parents) if path.exists())
        yield _place(store, existing, "make room on the disk, or name another directory for it")


def _place(what: str, directory: Path, remedy: str) -> Check:
    what = f"{what} in {directory}"
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
        system = os.statvfs(directory)
    except OSError as error:
        return Check(what, f"cannot be written to: {error.strerror}", f"let the service write there, or {remedy}")
    size, room = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    found = f"{decimal(room)} free of {decimal(size)}"
    if room >= _LEAST_BYTES:
        return Check(what, found)
    return Check(what, f"{found}, and real batches need {decimal(_LEAST_BYTES)} and more", remedy)
