"""The journal's directory: a directory a run, and a lock that says whose it is.

DIR/lock
DIR/run-<name>/run.json            what the run is, and the format of all this
DIR/run-<name>/events-000000.log   what happened to it
DIR/run-<name>/rows-000000.seg     its rows
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import orjson
import structlog

from gristmill._wire.steps import Steps
from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.storage.file_names import directory_name
from gristmill_service.storage.journal.event_log import EventLog
from gristmill_service.storage.journal.files import FullError, explained, sync_directory
from gristmill_service.storage.journal.row_segments import RowSegments
from gristmill_service.storage.run_store import CheckTable, LogLostError, Replay

_log = structlog.get_logger(__name__)

_FORMAT = 1
# What is free below this (or below a part of a small file system) counts as full, so that who waits for room is not
# told that there is some.
_LEAST_FREE, _LEAST_PART = 16 << 20, 8
# Given up when the file system is full, so that what frees memory (acknowledgements) can still be logged.
_BALLAST = 1 << 20

Fsync = Literal["always", "interval", "never"]


class JournalRunStore:
    """See `gristmill_service.storage.run_store.RunStore`. One process at a time uses a directory."""

    is_shared = False

    def __init__(self, directory: Path, fsync: Fsync = "interval") -> None:
        self._directory, self._fsync = directory, fsync
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgumentError(
                f"journal_dir: cannot use {directory}: {error.strerror}; choose another"
            ) from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_file)
            raise FailedPreconditionError(
                f"journal_dir: {directory} is in use by another gristmill; stop it, or give each its own directory"
            ) from None
        for left in (*directory.glob(".creating-*"), *directory.glob(".deleted-*")):
            shutil.rmtree(left, ignore_errors=True)
        self._ballast = _ReserveFile(directory / "ballast")
        self._lock = threading.Lock()
        self._full = ""

    def names(self) -> list[str]:
        return sorted(_description(path)["run"] for path in self._directory.glob("run-*"))

    def create(self, name: str, config: bytes) -> JournalRunLog:
        path = self._path(name)
        if path.exists():
            raise AlreadyExistsError(f"run {name!r} exists in {self._directory}")
        draft = self._directory / f".creating-{secrets.token_hex(8)}"
        description = {"format": _FORMAT, "run": name, "config": orjson.Fragment(config)}
        try:
            with explained(draft):
                draft.mkdir(mode=0o700)
                (draft / "run.json").write_bytes(orjson.dumps(description) + b"\n")
                EventLog(draft).close()
                sync_directory(draft)
                draft.rename(path)
                sync_directory(self._directory)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return self.open(name)

    def open(self, name: str) -> JournalRunLog:
        path = self._path(name)
        if not path.exists():
            raise NotFoundError(f"run {name!r} is not in {self._directory}")
        config = orjson.dumps(_description(path)["config"])
        return JournalRunLog(path, config, self._fsync, self)

    def delete(self, name: str) -> None:
        deleted = self._directory / f".deleted-{secrets.token_hex(8)}"
        with explained(deleted):
            try:
                self._path(name).rename(deleted)
            except FileNotFoundError:
                return
            sync_directory(self._directory)
        shutil.rmtree(deleted, ignore_errors=True)

    def unreachable_reason(self) -> str:
        return ""

    def unhealthy_reason(self) -> str:
        if self._full and self._has_room() and self._ballast.refill():
            self.note("")
        return self._full

    def check_room(self) -> None:
        """Raises UnavailableError where rows would take what is kept for what makes room: acknowledgements."""
        if self._full:
            raise UnavailableError(self._full)

    def close(self) -> None:
        os.close(self._lock_file)

    def _path(self, name: str) -> Path:
        return self._directory / directory_name(name)

    def _has_room(self) -> bool:
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize >= min(_LEAST_FREE, found.f_blocks * found.f_frsize // _LEAST_PART)

    def give_up_ballast(self) -> bool:
        return self._ballast.give_up()

    def note(self, trouble: str) -> None:
        with self._lock:
            before, self._full = self._full, trouble
        if trouble and not before:
            _log.error("journal in trouble", reason=trouble)
        elif before and not trouble:
            _log.info("journal well again")


class JournalRunLog:
    """See `gristmill_service.storage.run_store.RunLog`."""

    maps_rows = reads_rows = True
    is_lost = False
    lease: float | None = None

    def __init__(self, path: Path, config: bytes, fsync: Fsync, ledger: JournalRunStore) -> None:
        self.config, self.run_id = config, ""
        self._path, self._fsync, self._ledger = path, fsync, ledger
        self._events, self._rows = EventLog(path), RowSegments(path)
        self._syncing = threading.Lock()
        self._appended = self._synced = 0
        self._is_broken = False

    def replay(self) -> Replay:
        return self._events.replay()

    def append(self, record: bytes, tables: Collection[int] = ()) -> None:
        self._check()
        try:
            try:
                self._events.append(record)
            except FullError:
                if not self._ledger.give_up_ballast():
                    raise
                self._events.append(record)
        except FullError as error:
            self._ledger.note(str(error))
            raise
        self._appended += 1

    def sync(self) -> None:
        """Several callers share one: whoever comes while one is under way waits for the next."""
        if self._fsync == "always":
            self._sync_up_to(self._appended)

    def flush(self) -> None:
        if self._fsync == "interval":
            self._sync_up_to(self._appended)

    def _sync_up_to(self, wanted: int) -> None:
        if self._synced >= wanted:
            return
        with self._syncing:
            if self._synced >= wanted:
                return
            appended = self._appended
            try:
                self._rows.sync()
                self._events.sync()
            except OSError as error:
                # The kernel may have dropped what it could not write, and will not say so again.
                self._is_broken = True
                raise LogLostError(f"the journal cannot be made safe: {self._path}: {error.strerror}") from None
            self._synced = appended

    @property
    def log_bytes(self) -> int:
        return self._events.size

    @property
    def is_long(self) -> bool:
        return self._events.is_long

    def compact(self, snapshot: bytes) -> None:
        with self._syncing:
            self._events.compact(snapshot)

    def put(self, table: Steps) -> tuple[int, Steps]:
        self._check()
        self._ledger.check_room()
        try:
            return self._rows.put(table)
        except FullError as error:
            self._ledger.note(str(error))
            raise

    def get(self, number: int) -> Steps:
        return self._rows.get(number)

    def remove(self, numbers: Collection[int]) -> None:
        self._rows.remove(numbers)

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        return self._rows.retain(numbers, check)

    def close(self) -> None:
        with self._syncing:
            self._events.close()
            self._rows.close()

    def _check(self) -> None:
        if self._is_broken:
            raise LogLostError(f"the journal {self._path} is read anew")


class _ReserveFile:
    """A file that only takes room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.refill()

    def refill(self) -> bool:
        """Whether it takes its room."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _BALLAST)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True

    def give_up(self) -> bool:
        """Whether there is room now that was not there before."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


def _description(path: Path) -> Any:
    """What `run.json` says. Raises InvalidArgumentError for what this version does not read."""
    try:
        description = orjson.loads((path / "run.json").read_bytes())
        version = description["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path}: run.json cannot be read ({error}); restore it, or remove the run"
        ) from None
    if version > _FORMAT:
        raise InvalidArgumentError(
            f"{path} has format {version} and this version reads up to {_FORMAT}; use a newer gristmill"
        )
    return description
