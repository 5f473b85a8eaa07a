"""Whether the machine went down while a run's log held records that only its memory had."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

from gristmill_service.storage.journal.files import create_file, explained, sync_directory


class BootMark:
    """A file in a run's directory that names the boot of the machine in which records were appended to its log.

    It is there from the first append that is not synced at once until the log is closed and synced. A log that is
    found with the mark of another boot may have lost records.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "boot-id"
        with explained(self._path, "read"):
            self._boot = self._path.read_bytes() if self._path.exists() else None
        self.is_of_another_boot = self._boot not in (None, _this_boot())

    def set(self) -> None:
        """Raises UnavailableError."""
        if self._boot == _this_boot():
            return
        with explained(self._path):
            create_file(self._path, _this_boot())
            sync_directory(self._path.parent)
        self._boot = _this_boot()

    def clear(self) -> None:
        """Never raises: a mark that stays only makes more logs suspect than needed."""
        if self._boot is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
                self._boot = None


@cache
def _this_boot() -> bytes:
    """A number that the kernel makes up when the machine starts; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return b""
