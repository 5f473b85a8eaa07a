"""Writing shards to files, with nothing assembled in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gristmill_service.store import iovec
from gristmill_service.store.base import ShardAddress, ShardSource

# The kernel copies without the interpreter's lock, so that a second thread prepares what the first one writes. More
# would take cores from the trainer that the service runs beside.
_WRITERS = 2


def write_shards(
    directory: Path, shards: Iterable[ShardSource], on_written: Callable[[int], None] = lambda size: None
) -> dict[ShardAddress, int]:
    """Writes each shard at its address's path under `directory`; returns their sizes.

    on_written: called with the bytes of each shard that is written. On an error some files may be there; raises the
    first one, as `write_file` does.
    """

    def write(shard: ShardSource) -> tuple[ShardAddress, int]:
        write_file(directory / shard.address.path, shard.iovec())
        on_written(shard.size)
        return shard.address, shard.size

    shards = list(shards)
    for parent in {os.path.dirname(shard.address.path) for shard in shards}:
        (directory / parent).mkdir(mode=0o700)
    with ThreadPoolExecutor(_WRITERS, "gristmill-writer") as pool:
        return dict(pool.map(write, shards))


def write_file(path: Path, runs: iovec.Iovec) -> None:
    """Creates `path`, readable by its owner only, with the runs' bytes in order.

    Raises FileExistsError, or OSError where space or permission is lacking; the file may then be there in part.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        iovec.write(descriptor, runs)
    finally:
        os.close(descriptor)
