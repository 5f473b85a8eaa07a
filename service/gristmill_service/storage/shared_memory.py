"""Stores shards as safetensors files on tmpfs, for trainer ranks to map.

A process owns one directory, `gristmill-<user>-<token>`, and a lock file next to it, which it locks until it ends. When
a process of the same user starts, it removes directories whose lock is free. Everything is readable only by its owner.
Files are created by rename and never changed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from gristmill.errors import (
    GristmillError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.settings import Settings
from gristmill_service.storage.file_names import directory_name
from gristmill_service.storage.memory_room import MemoryRoom, Writes, memory_room
from gristmill_service.storage.run_store import RunStore
from gristmill_service.storage.shard_files import write_shards
from gristmill_service.storage.shard_store import ShardLocation, ShardsLostError, ShardSource, ShardStore

_PIECE = 1 << 20
_PLAN, _TABLE = "plan.json", "table"


def open_shards(settings: Settings, runs: RunStore) -> ShardStore:
    return SharedMemoryShardStore(settings.shared_memory_dir)


class SharedMemoryShardStore:
    """Implements `gristmill_service.storage.shard_store.ShardStore`.

    directory: a tmpfs; every Linux has /dev/shm.
    """

    is_remote = False

    def __init__(self, directory: Path = Path("/dev/shm")) -> None:  # noqa: S108
        prefix = f"gristmill-{os.geteuid()}-"
        remove_leftovers(directory, prefix)
        self._root, self._lock_file = _claim(directory, prefix)
        self._located: dict[tuple[str, int], dict[ShardAddress | str, ShardLocation]] = {}
        self._lock, self._writes = threading.Lock(), Writes()
        self._closed = False

    @property
    def root(self) -> Path:
        return self._root

    def publish(self, run: str, batch: int, plan: bytes, shards: Iterable[ShardSource], table: bytes = b"") -> int:
        shards = list(shards)
        size = sum(shard.size for shard in shards)
        self._make_root()
        with self._writes.reserved(size, lambda others: self._check_room(run, batch, size, others)):
            return self._write(run, batch, {_PLAN: plan, _TABLE: table}, shards, size)

    def _write(self, run: str, batch: int, documents: Mapping[str, bytes], shards: list[ShardSource], size: int) -> int:
        final = self._path(run, batch)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.parent.mkdir(mode=0o700, exist_ok=True)
            partial.mkdir(mode=0o700)
            sizes = write_shards(partial, shards)
            for name, document in documents.items():
                _write_bytes(partial / name, document)
            located: dict[ShardAddress | str, ShardLocation] = {
                address: ShardLocation(size, str(final / address.path)) for address, size in sizes.items()
            }
            located |= {name: ShardLocation(len(document), str(final / name)) for name, document in documents.items()}
            self.free(run, batch)
            with self._lock:
                if self._closed:
                    raise UnavailableError(
                        f"run {run!r}: batch {batch} cannot be published, as its store is closed; restart the service"
                    )
                partial.rename(final)
                self._located[run, batch] = located
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Other programs used the free memory in the meantime.
                raise self._full(run, batch, size) from None
            with _explained(partial):
                raise
        return sum(map(len, documents.values())) + sum(sizes.values())

    def _make_root(self) -> None:
        """Recreates the directory if another program removed it, as some systems do when a user logs out."""
        with _explained(self._root):
            with suppress(FileExistsError):
                self._root.mkdir(mode=0o700)
            if not _is_ours(self._root.lstat(), stat.S_ISDIR):
                raise PermissionError(errno.EACCES, "it belongs to another user, or is not a directory")

    def _check_room(self, run: str, batch: int, size: int, others: int) -> None:
        """Rejects a batch that does not fit before writing, because filling memory would kill other processes. others:
        the bytes of other batches that are being written."""
        with _explained(self._root):
            system = os.statvfs(self._root)
        tmpfs = MemoryRoom(system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize)
        room = tmpfs.within(memory_room())
        if size > room.total:
            raise ResourceExhaustedError(
                f"run {run!r}: batch {batch} has {size} bytes, and {self._root.parent} has {room.total} in total; "
                "enlarge it, and the batch is built; for later runs, lower train_batch_size, or pad less (layout: "
                "packed, pad_width: micro_batch)"
            )
        if size > room.available - others:
            raise self._full(run, batch, size)

    def _full(self, run: str, batch: int, size: int) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"run {run!r}: batch {batch} does not fit into {self._root.parent}, which is full, with its {size} bytes; "
            "enlarge it, or lower max_buffered_batches"
        )

    def plan(self, run: str, batch: int) -> bytes:
        return self._document(run, batch, _PLAN)

    def table(self, run: str, batch: int) -> bytes:
        return self._document(run, batch, _TABLE)

    def _document(self, run: str, batch: int, name: str) -> bytes:
        size, path = self._files(run, batch)[name].size, self._path(run, batch) / name
        with _explained(path):
            try:
                document = path.read_bytes()
            except FileNotFoundError:
                raise self._missing(run, batch, path) from None
        if len(document) != size:
            raise _changed(run, batch, path, len(document), size)
        return document

    def locate(self, run: str, batch: int, address: ShardAddress) -> ShardLocation:
        location = self._files(run, batch).get(address)
        if location is None:
            raise NotFoundError(f"run {run!r}: batch {batch} has no shard {address.path}; request a shard of its plan")
        return location

    def read(self, run: str, batch: int, address: ShardAddress) -> Iterator[bytes]:
        """Reads a shard. Raises ShardsLostError if another program has truncated, extended or removed the file."""
        location = self.locate(run, batch, address)
        path = location.shared_memory_path
        assert path is not None
        with _explained(Path(path)):
            try:
                # Opened before the first piece, so that a batch that is freed in the meantime is read to its end.
                file = open(path, "rb", buffering=0)  # noqa: SIM115
            except FileNotFoundError:
                raise self._missing(run, batch, Path(path)) from None
            if (size := os.fstat(file.fileno()).st_size) != location.size:
                file.close()
                raise _changed(run, batch, Path(path), size, location.size)
        return _pieces(file)

    def read_frames(self, run: str, batch: int, address: ShardAddress) -> None:
        """Returns None, because this store's files are uncompressed."""

    def free(self, run: str, batch: int) -> None:
        path = self._path(run, batch)
        freed = path.with_name(f".{path.name}.freed-{secrets.token_hex(4)}")
        with self._lock, _explained(path):
            if (run, batch) not in self._located:
                return
            if path.exists():
                path.rename(freed)
            del self._located[run, batch]
        # Errors are ignored, because another thread may remove the whole run at the same time.
        shutil.rmtree(freed, ignore_errors=True)

    def delete_run(self, run: str) -> None:
        root = self._root / directory_name(run)
        deleted = root.with_name(f".deleted-{secrets.token_hex(8)}")
        with self._lock, _explained(root):
            # Renamed first, so that a new run of the same name starts without shards.
            if root.exists():
                root.rename(deleted)
            for key in [key for key in self._located if key[0] == run]:
                del self._located[key]
        shutil.rmtree(deleted, ignore_errors=True)

    def sweep(self, runs: Collection[str]) -> None:
        """Does nothing, because a process removes all files of dead processes when it starts."""

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._located.clear()
        _remove(self._root)
        os.close(self._lock_file)

    def _path(self, run: str, batch: int) -> Path:
        return self._root / directory_name(run) / f"batch-{batch:05d}"

    def _missing(self, run: str, batch: int, path: Path) -> GristmillError:
        """Returns the error for a missing file of a batch."""
        with self._lock:
            is_removed = (run, batch) in self._located and not path.exists()
        if not is_removed:
            return _gone(run, batch)
        return ShardsLostError(
            f"run {run!r}: batch {batch}: {path} was removed by another program (some systems do this when a user logs "
            "out); retry after the batch is rebuilt"
        )

    def _files(self, run: str, batch: int) -> dict[ShardAddress | str, ShardLocation]:
        """Returns the batch's shards by address, and its documents by name."""
        with self._lock:
            located = self._located.get((run, batch))
        if located is None:
            raise _gone(run, batch)
        return located


def remove_leftovers(directory: Path, prefix: str) -> None:
    """Removes the directories of this user's dead processes in `directory`. A live process has locked its lock file."""
    for path in directory.glob(f"{prefix}*.lock"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if not _is_ours(os.fstat(descriptor), stat.S_ISREG):
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            root = path.with_suffix("")
            if not os.path.lexists(root) or _is_ours(root.lstat(), stat.S_ISDIR):
                _remove(root)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _claim(directory: Path, prefix: str) -> tuple[Path, int]:
    """Creates and locks a directory for this process. Creates the lock file first, so that every directory has one."""
    while True:
        root = directory / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        lock = _lock_path(root)
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(
                f"shared_memory_dir: cannot write to {directory}: {error.strerror}; create it, or set another directory"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the file as a leftover before this process locked it.
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                root.mkdir(mode=0o700)
                return root, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)


def _remove(root: Path) -> None:
    """Removes a directory and then its lock file, without which a later start would not find the directory."""
    shutil.rmtree(root, ignore_errors=True)
    if not root.exists():
        _lock_path(root).unlink(missing_ok=True)


def _lock_path(root: Path) -> Path:
    return root.with_name(f"{root.name}.lock")


def _is_ours(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return status.st_uid == os.geteuid() and is_kind(status.st_mode)


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)


def _pieces(file: FileIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Converts errors of the operating system to UnavailableError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, GristmillError):
            raise
        raise UnavailableError(
            f"shared memory cannot be used: {path}: {error.strerror}; create the directory as this user"
        ) from error


def _gone(run: str, batch: int) -> NotFoundError:
    return NotFoundError(f"run {run!r}: batch {batch} is not published, or already freed; request another batch")


def _changed(run: str, batch: int, path: Path, size: int, published: int) -> ShardsLostError:
    return ShardsLostError(
        f"run {run!r}: batch {batch}: {path} has {size} bytes instead of {published}, because another program changed "
        "it; retry after the batch is rebuilt"
    )
