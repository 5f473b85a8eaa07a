"""Writes shards to files without assembling them in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from gristmill_service.helper_thread import in_two_threads
from gristmill_service.pipeline.layout import iovec
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage.shard_store import ShardSource


def write_shards(
    directory: Path, shards: Iterable[ShardSource], on_written: Callable[[int], None] = lambda size: None
) -> dict[ShardAddress, int]:
    """Writes each shard to its address's path under `directory`. Returns their sizes.

    on_written: called with the size of each written shard, by one of two threads. Raises like `write_file`, and may
    then leave some files. No thread is still writing when the function returns or raises.
    """
    shards = list(shards)
    for parent in {os.path.dirname(shard.address.path) for shard in shards}:
        (directory / parent).mkdir(mode=0o700)

    def write(shard: ShardSource) -> None:
        # One thread computes byte ranges while the kernel copies for the other.
        write_file(f"{directory}/{shard.address.path}", shard.iovec())
        on_written(shard.size)

    in_two_threads(shards, write)
    return {shard.address: shard.size for shard in shards}


def write_file(path: Path | str, runs: iovec.Iovec) -> None:
    """Creates `path`, readable only by its owner, with the bytes of the ranges in order.

    Raises FileExistsError, or OSError if space or permission is missing, and may then leave a partial file.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        iovec.write(descriptor, runs)
    finally:
        os.close(descriptor)
