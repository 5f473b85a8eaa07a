"""The journal's directory: a directory a run, and a lock that says whose it is.

DIR/lock                           held by the process that uses the directory
DIR/reserve                        room that is given up when the file system is full
DIR/.spare-0                       a file of rows that nobody needs, to be written anew; gone after some seconds
DIR/run-<name>/run.json            what the run is, and the format of all this
DIR/run-<name>/events-000000.log   what happened to it
DIR/run-<name>/rows-000000.seg     its rows
DIR/run-<name>/boot-id             there while records may not be on the disk: the machine's boot
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from gristmill_service.storage.file_names import directory_name, is_hash_name, run_name
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.event_log import EventLog
from gristmill_service.storage.journal.files import create_file, explained, sync_directory
from gristmill_service.storage.journal.open_file import OpenFile
from gristmill_service.storage.journal.run_description import (
    FILE_NAME,
    described_name,
    new_description,
    read_description,
)
from gristmill_service.storage.journal.run_log import Fsync, JournalRunLog
from gristmill_service.storage.journal.spare_segments import SpareSegments


class JournalRunStore:
    """See `gristmill_service.storage.run_store.RunStore`. One process at a time uses a directory."""

    is_shared = False

    def __init__(self, directory: Path, fsync: Fsync = "interval") -> None:
        """Raises InvalidArgumentError where the directory cannot be used, and FailedPreconditionError where another
        process uses it."""
        self._directory, self._fsync = directory, fsync
        self._lock_file = _locked(directory)
        for left in (*directory.glob(".creating-*"), *directory.glob(".deleted-*")):
            shutil.rmtree(left, ignore_errors=True)
        self._spares, self._room = SpareSegments(directory), DiskRoom(directory)
        # Held while a run's directory gets or loses its name, or its log is opened.
        self._lock = threading.Lock()
        self._logs: WeakValueDictionary[str, JournalRunLog] = WeakValueDictionary()

    def names(self) -> list[str]:
        """A run whose directory cannot be read is named as far as that is known, so that `open` can say why."""
        with explained(self._directory, "read"):
            found = [_name_of(path) for path in self._directory.iterdir()]
        return sorted(name for name in found if name is not None)

    def create(self, name: str, config: bytes) -> JournalRunLog:
        """Raises InvalidArgumentError where the configuration could not be read again. On an error nothing is left."""
        path, description = self._path(name), new_description(name, config)
        self._check_new(name)
        with _draft(self._directory) as draft, explained(path):
            create_file(draft / FILE_NAME, description)
            EventLog.create(draft)
            with self._lock:
                self._check_new(name)
                draft.rename(path)
                try:
                    sync_directory(self._directory)
                    return self._open(name, path)
                except BaseException:
                    path.rename(draft)
                    raise

    def open(self, name: str) -> JournalRunLog:
        """A log of the run that is open already is closed."""
        with self._lock:
            path = self._path(name)
            if not path.exists():
                raise NotFoundError(f"run {name!r} is not in {self._directory}")
            if (before := self._logs.get(name)) is not None:
                before.close()
            return self._open(name, path)

    def delete(self, name: str) -> None:
        """A log of the run that is open is closed, before its directory's name can be another run's."""
        deleted = self._directory / f".deleted-{secrets.token_hex(8)}"
        with self._lock:
            log = self._logs.pop(name, None)
            segments = [] if log is None else log.abandon()
            path = self._path(name)
            with explained(path):
                if not path.exists():
                    return
                path.rename(deleted)
                sync_directory(self._directory)
        for segment in segments:
            self._spares.offer(deleted / segment.path.name, segment.file, segment.memory)
        shutil.rmtree(deleted, ignore_errors=True)

    def unreachable_reason(self) -> str:
        return ""

    def unhealthy_reason(self) -> str:
        # It is asked about once a second.
        self._spares.give_back_old()
        return self._room.unhealthy_reason()

    def close(self) -> None:
        """Gives the directory to whoever opens it next. Logs that are open stay their owners' to close."""
        self._spares.give_back()
        self._lock_file.close()

    def _open(self, name: str, path: Path) -> JournalRunLog:
        description = read_description(path, name)
        log = self._logs[name] = JournalRunLog(path, description, self._fsync, self._room, self._spares)
        return log

    def _check_new(self, name: str) -> None:
        if self._path(name).exists():
            raise AlreadyExistsError(f"run {name!r} exists in {self._directory}")

    def _path(self, name: str) -> Path:
        # A damaged run of a long name goes by its directory's name.
        damaged = self._directory / name if is_hash_name(name) else None
        return damaged if damaged and damaged.exists() else self._directory / directory_name(name)


def _locked(directory: Path) -> OpenFile:
    try:
        _make_directory(directory)
        path = directory / "lock"
        file = OpenFile(path, os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InvalidArgumentError(f"journal_dir: cannot use {directory}: {error.strerror}; choose another") from None
    try:
        with file.use() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FailedPreconditionError(
            f"journal_dir: {directory} is in use by another gristmill; stop it, or give each its own directory"
        ) from None
    return file


def _make_directory(path: Path) -> None:
    """Makes the directory and the missing ones above it, for its owner only."""
    if not path.parent.exists():
        _make_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _draft(directory: Path) -> Iterator[Path]:
    """A directory that gets its name when it is whole, and is removed where it does not get that far."""
    draft = directory / f".creating-{secrets.token_hex(8)}"
    with explained(draft):
        draft.mkdir(mode=0o700)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name_of(path: Path) -> str | None:
    """The run of a directory, as far as it is known; None where it is no run's."""
    if not is_hash_name(path.name):
        return run_name(path.name)
    try:
        name = described_name(path)
    except InvalidArgumentError:
        return path.name
    return name if directory_name(name) == path.name else path.name
