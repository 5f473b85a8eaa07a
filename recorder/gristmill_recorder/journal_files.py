"""The files of a journal: the database, its log, in which new steps are, and a lock.

The lock file is empty, except while a recorder has the journal open and after it was killed. Then steps may be in the
log alone.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gristmill.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

_HEADER_BYTES = 100


class JournalFiles:
    """Locks the journal for this process until `close`. Raises UnavailableError if it cannot, and
    InvalidArgumentError, without changing a file, if one was deleted or cut."""

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, path.with_name(f"{path.name}-wal")
        self._lock = _locked(path)
        try:
            self._check_complete()
        except InvalidArgumentError:
            os.close(self._lock)
            raise
        self.closing()
        self._inodes: dict[Path, int] = {}

    def _check_complete(self) -> None:
        size, log_size = _size(self._path), _size(self._log)
        if (size or 0) < _HEADER_BYTES and (size or log_size):
            raise InvalidArgumentError(
                f"journal: {self._path} was cut to {size or 0} bytes; restore it, or delete it and {self._log} to "
                "start without its steps"
            )
        if size and log_size is None and os.fstat(self._lock).st_size:
            raise InvalidArgumentError(
                f"journal: {self._log} was deleted, and may have contained the newest steps; restore it, or create an "
                "empty file of this name to start without it"
            )

    def opened(self) -> None:
        """Notes that the database and its log are open."""
        # On a full disk the recorder starts, too: it delivers steps, and refuses calls until there is space.
        with suppress(OSError):
            os.pwrite(self._lock, b"open", 0)
        self._inodes = {path: os.stat(path).st_ino for path in (self._path, self._log)}

    def check_present(self) -> None:
        """Raises FailedPreconditionError if a file was deleted or replaced: what the open one contains would be lost
        with this process."""
        for path, inode in self._inodes.items():
            try:
                is_here = os.stat(path).st_ino == inode
            except FileNotFoundError:
                is_here = False
            if not is_here:
                raise FailedPreconditionError(
                    f"the journal {path} was deleted or replaced, so the call is not answered; restart the recorder"
                )

    def closing(self) -> None:
        """Notes that the database will be closed, which deletes the log."""
        os.ftruncate(self._lock, 0)

    def close(self) -> None:
        os.close(self._lock)


def _locked(path: Path) -> int:
    """Returns the descriptor of the locked lock file."""
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnavailableError(f"journal: cannot write {path}: {error.strerror}; choose another file") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UnavailableError(f"journal: another recorder uses {path}; set another --journal") from None
    return lock


def _size(path: Path) -> int | None:
    """Returns the file's bytes; None if there is no file."""
    return path.stat().st_size if path.exists() else None
