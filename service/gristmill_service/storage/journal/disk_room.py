"""The room on the journal's file system: rows are refused before it takes what acknowledgements need."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import structlog

from gristmill.errors import UnavailableError

_log = structlog.get_logger(__name__)

# Less free room than this (or than a part of a small file system) counts as full, so that a little room that comes and
# goes does not look like an end of it.
_LEAST_FREE, _LEAST_PART = 16 << 20, 8
_RESERVE_BYTES = 1 << 20


class DiskRoom:
    """Thread-safe. Holds a reserve file, which is given up when the file system is full: then acknowledgements, which
    make room, can still be logged."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._reserve = directory, directory / "reserve"
        self._lock = threading.Lock()
        self._full = ""
        self._fill_reserve()

    def check(self) -> None:
        """Raises UnavailableError while the file system is full."""
        if self._full:
            raise UnavailableError(self._full)

    def unhealthy_reason(self) -> str:
        """Why rows are refused; empty when they are not. Finds out whether there is room again."""
        if self._full and self._has_room() and self._fill_reserve():
            self.set_full("")
        return self._full

    def set_full(self, reason: str) -> None:
        """Refuses rows from now on, until there is room; an empty reason takes them again."""
        with self._lock:
            before, self._full = self._full, reason
        if reason and not before:
            _log.error("the journal is full", reason=reason)
        elif before and not reason:
            _log.info("the journal has room again")

    def give_up_reserve(self) -> bool:
        """Whether there is room now that was not there before."""
        try:
            self._reserve.unlink()
        except OSError:
            return False
        return True

    def _has_room(self) -> bool:
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize >= min(_LEAST_FREE, found.f_blocks * found.f_frsize // _LEAST_PART)

    def _fill_reserve(self) -> bool:
        """Whether the file takes all of its room."""
        try:
            descriptor = os.open(self._reserve, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True
