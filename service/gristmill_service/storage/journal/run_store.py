"""The journal's directory: a lock, and one directory per run.

DIR/lock                        locked by the process that uses the directory
DIR/reserve                     space that is released when the file system is full
DIR/run-<name>/journal.sqlite   a run, as `database` describes it; `-wal` and `-shm` next to it are SQLite's
DIR/run-<name>/dormant.json     the description of a dormant run
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakValueDictionary

from gristmill.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.storage.file_names import directory_name, is_hash_name, run_name
from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.database import Description, explained
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import Fsync, JournalRunLog
from gristmill_service.storage.run_store import CheckNames, any_names, check_config

_DORMANT = "dormant.json"


class JournalRunStore:
    """Implements `gristmill_service.storage.run_store.RunStore`. Only one process at a time can use a directory."""

    is_shared = False

    def __init__(self, directory: Path, fsync: Fsync = "interval") -> None:
        """Raises InvalidArgumentError if the directory cannot be used, and UnavailableError if it is in use."""
        self._directory, self._fsync = directory, fsync
        self._lock_file: int | None = _locked(directory)
        for leftover in (*directory.glob(".creating-*"), *directory.glob(".deleted-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        self._room = DiskRoom(directory)
        # Guards the renaming of runs' directories and the opening of their logs.
        self._lock = threading.Lock()
        self._logs: WeakValueDictionary[str, JournalRunLog] = WeakValueDictionary()

    def names(self) -> list[str]:
        """Returns all runs' names. If the name of a damaged run is unreadable, returns its directory's name, for which
        `open` raises the reason."""
        with explained(self._directory):
            names = [_name_of(path) for path in self._directory.iterdir()]
        return sorted(name for name in names if name is not None)

    def create(self, name: str, config: bytes, check: CheckNames = any_names) -> JournalRunLog:
        check_config(name, config)
        path = self._path(name)
        self._check_new(name)
        with _draft(self._directory) as draft, explained(path):
            database.create(draft, name, Description(uuid.uuid4().hex, config))
            with self._lock:
                self._check_new(name)
                draft.rename(path)
                try:
                    database.sync_directory(self._directory)
                    return self._open(name, path)
                except BaseException:
                    path.rename(draft)
                    raise

    def open(self, name: str) -> JournalRunLog:
        """Opens a run. Closes the run's log if it is already open."""
        with self._lock:
            path = self._path(name)
            if not path.exists():
                raise NotFoundError(f"run {name!r} does not exist in {self._directory}; create it first")
            if (before := self._logs.get(name)) is not None:
                before.close()
            return self._open(name, path)

    def delete(self, name: str) -> None:
        """Deletes a run. Closes its open log before another run can use the directory's name."""
        deleted = self._directory / f".deleted-{secrets.token_hex(8)}"
        with self._lock:
            path = self._path(name)
            if (log := self._logs.pop(name, None)) is not None:
                log.close()
            with explained(path):
                if path.exists():
                    path.rename(deleted)
                    database.sync_directory(self._directory)
        shutil.rmtree(deleted, ignore_errors=True)

    def set_dormant(self, name: str, description: bytes) -> None:
        path = self._path(name) / _DORMANT
        # Not synced: without it, the next process opens the run once more.
        with explained(path):
            path.write_bytes(description)

    def dormant(self) -> list[str]:
        # A run of which this cannot be told is opened, which reports the reason, and the others are served.
        return [name for name in self.names() if os.access(self._path(name) / _DORMANT, os.F_OK)]

    def descriptions(self, names: Collection[str]) -> dict[str, bytes]:
        read = {}
        for name in names:
            with suppress(OSError):
                read[name] = (self._path(name) / _DORMANT).read_bytes()
        return read

    def unreachable_reason(self) -> str:
        return ""

    def unhealthy_reason(self) -> str:
        logs = [log for reference in self._logs.valuerefs() if (log := reference()) and not log.is_closed]
        return self._room.unhealthy_reason([log.reusable for log in logs])

    def close(self) -> None:
        """Releases the directory to other processes. Open logs stay open."""
        descriptor, self._lock_file = self._lock_file, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self, name: str, path: Path) -> JournalRunLog:
        run = database.read_description(path, name)
        log = self._logs[name] = JournalRunLog(path, run, self._fsync, self._room)
        with explained(path):
            (path / _DORMANT).unlink(missing_ok=True)
        return log

    def _check_new(self, name: str) -> None:
        if self._path(name).exists():
            raise AlreadyExistsError(f"run {name!r} already exists in {self._directory}; choose another name")

    def _path(self, name: str) -> Path:
        # `names` returns the directory's name for a damaged run with a long name.
        damaged = self._directory / name if is_hash_name(name) else None
        return damaged if damaged and damaged.exists() else self._directory / directory_name(name)


def _locked(directory: Path) -> int:
    """Opens and locks the lock file. Closing the file releases the lock."""
    try:
        _make_directory(directory)
        descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidArgumentError(f"journal_dir: cannot use {directory}: {error.strerror}; set another") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UnavailableError(
            f"journal_dir: {directory} is in use by another gristmill; stop it, or set a different directory for each"
        ) from None
    return descriptor


def _make_directory(path: Path) -> None:
    """Creates the directory and missing parents durably, accessible only by their owner."""
    if path.exists():
        return
    _make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    database.sync_directory(path.parent)


@contextmanager
def _draft(directory: Path) -> Iterator[Path]:
    """Creates a directory for incomplete data. Removes it at the end, with everything that was not moved elsewhere."""
    draft = directory / f".creating-{secrets.token_hex(8)}"
    with explained(draft):
        draft.mkdir(mode=0o700)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name_of(path: Path) -> str | None:
    """Returns the name of a directory's run, or of the directory if that is unreadable; None for other directories."""
    if not is_hash_name(path.name):
        return run_name(path.name)
    try:
        name = database.read_name(path)
    except (InvalidArgumentError, UnavailableError):
        return path.name
    return name if directory_name(name) == path.name else path.name
