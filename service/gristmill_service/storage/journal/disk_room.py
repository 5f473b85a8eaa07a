"""Monitors the free space of the journal's file system, and rejects rows before they use the space that
acknowledgements need."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from gristmill_service.storage.run_store import FullError

_log = structlog.get_logger(__name__)

# A file system with less free space than this, or than this fraction of a small one, counts as full. Rows in progress
# may then use three quarters of the free space; the rest is for acknowledgements.
_LEAST_FREE, _LEAST_PART, _KEPT_PART = 16 << 20, 8, 4
_RESERVE_BYTES, _RESERVE_PART = 4 << 20, 32
_WAL_BYTES, _WAL_PART = 32 << 20, 16
_WAL_FILE_BYTES, _WAL_FILE_PART = 256 << 20, 4
# Workers repeat a refused request every few seconds. After a failed write, appends are tried again after a while,
# because not all limits of a file system show in its free space.
_REFUSED_S, _FAILED_S = 30.0, 5.0


class _Shortage(NamedTuple):
    """A lack of space. needed: the free bytes that end it. until: when it is forgotten. text: the error's message."""

    needed: int = 0
    until: float = 0.0
    text: str = ""

    def lasts(self, free: int) -> bool:
        return free < self.needed and time.monotonic() < self.until


class DiskRoom:
    """Tracks how many bytes may still be written to the file system. Thread-safe.

    It owns a reserve file, which is deleted when the file system is full, so that acknowledgements, which free rows,
    can still be logged. Runs report how much their databases will grow at the next checkpoint. Rows cannot use that
    space, so that a checkpoint succeeds, after which the WAL needs no space.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._reserve = directory, directory / "reserve"
        self._growth: dict[Path, int] = {}
        self._free = self._least = self._total = 0
        self._was_full = False
        # The last rows that were refused because they are too large for the free space, and the last failed writes of
        # rows and of records.
        self._refused = self._rows_failed = self._records_failed = _Shortage()
        self.measure()
        self._fill_reserve()

    def check(self, reusable: int = 0) -> None:
        """Raises FullError if rows are rejected, according to the last measurement. Neither blocks nor locks, as the
        other checks. reusable: free bytes inside the run's database."""
        if self._is_full(reusable) or self._rows_failed.lasts(self._free):
            raise full_error(self._directory)

    def check_record(self) -> None:
        """Raises FullError if a record without rows could not be written lately."""
        if self._records_failed.lasts(self._free):
            raise full_error(self._directory)

    def check_for(self, nbytes: int, reusable: int) -> None:
        """Raises FullError if `nbytes` of rows, in a WAL and a database, would not leave space for acknowledgements,
        according to the last measurement."""
        needed = nbytes + max(0, nbytes - reusable) + self._least // _KEPT_PART
        if self._free < needed:
            error = full_error(self._directory, f" ({max(0, self._free)} bytes are free, a request needs {needed})")
            self._refused = _Shortage(needed, time.monotonic() + _REFUSED_S, str(error))
            raise error

    def check_snapshot(self, nbytes: int, reusable: int) -> None:
        """Raises FullError if `nbytes` of a snapshot, next to the current one, would leave too little for rows."""
        self.measure()
        needed = min(nbytes, self.wal_limit) + max(0, nbytes - reusable) + self._least
        if self._free < needed:
            how_full = f" ({max(0, self._free)} bytes are free, a snapshot of the log needs {needed})"
            raise full_error(self._directory, how_full)

    def note_growth(self, run: Path, nbytes: int) -> None:
        """Records how much the database of a run will grow at its next checkpoint."""
        self._growth[run] = nbytes

    def forget(self, run: Path) -> None:
        self._growth.pop(run, None)

    @property
    def wal_limit(self) -> int:
        """The size of a WAL above which a checkpoint is made."""
        return min(_WAL_BYTES, self._total // _WAL_PART)

    @property
    def wal_file_limit(self) -> int:
        """The maximum size of a WAL's file that is retained for later writes."""
        return min(_WAL_FILE_BYTES, max(0, self._free) // _WAL_FILE_PART)

    def failed(self, *, has_rows: bool) -> None:
        """Rejects appends for some seconds, or until more space is free, because a write failed. has_rows: rejects only
        rows."""
        self.measure()
        shortage = _Shortage(self._free + 1, time.monotonic() + _FAILED_S, str(full_error(self._directory)))
        if has_rows:
            self._rows_failed = shortage
        else:
            self._records_failed = shortage

    def give_up_reserve(self) -> None:
        with suppress(OSError):
            self._reserve.unlink()

    def unhealthy_reason(self, reusable: Collection[int]) -> str:
        """Measures, and returns why rows are rejected; empty if they are not. Recreates the reserve if there is space.
        Not thread-safe. reusable: each run's argument of `check`."""
        self.measure()
        if not self._is_full(0):
            self._fill_reserve()
        is_full = any(map(self._is_full, reusable or (0,)))
        reason = str(full_error(self._directory)) if is_full else self._shortage()
        is_full = bool(reason)
        if is_full and not self._was_full:
            _log.error("journal full", reason=reason)
        elif self._was_full and not is_full:
            _log.info("journal accepts rows again")
        self._was_full = is_full
        return reason

    def _shortage(self) -> str:
        shortages = (self._records_failed, self._rows_failed, self._refused)
        return next((one.text for one in shortages if one.lasts(self._free)), "")

    def _is_full(self, reusable: int) -> bool:
        return self._free + reusable < self._least

    def measure(self) -> None:
        with suppress(OSError):
            system = os.statvfs(self._directory)
            self._total = system.f_blocks * system.f_frsize
            self._least = min(_LEAST_FREE, self._total // _LEAST_PART)
            # The list is a copy: other threads change the dictionary.
            self._free = system.f_bavail * system.f_frsize - sum(list(self._growth.values()))

    def _fill_reserve(self) -> None:
        with suppress(OSError):
            descriptor = os.open(self._reserve, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, min(_RESERVE_BYTES, max(1, self._total // _RESERVE_PART)))
            finally:
                os.close(descriptor)


def full_error(directory: Path, how_full: str = "") -> FullError:
    return FullError(
        f"the journal cannot be written: the file system of {directory} is full{how_full}; free or add space, or lower "
        "max_row_bytes or max_buffered_batches; the service continues by itself when there is space"
    )
