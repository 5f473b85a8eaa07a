"""Figures for decisions: what a library would do in place of code of our own, beside ours, by turns.

python -m tests.bench.alternatives log [DIRECTORY]   # the event log beside SQLite, on a disk
python -m tests.bench.alternatives compact           # the compact form of shards beside zstd
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import zstandard

from gristmill._wire.codecs.compact_shards import restore
from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Steps
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.storage.journal.event_log import EventLog
from tests.bench.workloads import workload

EVENT = os.urandom(300)
"""About what a submitted turn takes of the log."""
GROUPS, ROUNDS, APPENDS = (1, 64), 7, 50
ZIPF = 1.2
"""The exponent of token ids as uneven as a language's; the workloads draw them evenly, which nothing compresses."""

T = TypeVar("T")
Append = Callable[[list[bytes]], None]


def main() -> None:
    if sys.argv[1] == "log":
        _logs(Path(sys.argv[2]) if len(sys.argv) > 2 else Path("build"))
    else:
        for name in ("short", "agent"):
            for merge in ("none", "prefix"):
                for is_zipf in (False, True):
                    _compact(name, merge, is_zipf)


def _logs(parent: Path) -> None:
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        for group in GROUPS:
            events = [EVENT] * group
            with (
                _event_log(Path(directory) / f"log-{group}") as ours,
                _sqlite(Path(directory) / f"{group}.db") as theirs,
            ):
                found = [(_timed(ours, events), _timed(theirs, events)) for _ in range(ROUNDS)]
            for name, side in (("event log", 0), ("SQLite", 1)):
                wall, cpu = (statistics.median(pair[side][of] for pair in found) for of in (0, 1))
                print(f"group of {group:2}: {name:9} {1 / wall:6,.0f} appends/s, {cpu * 1e6:5,.0f} us of CPU each")


@contextmanager
def _event_log(directory: Path) -> Iterator[Append]:
    directory.mkdir()
    log = EventLog(directory)
    log.replay()

    def append(events: list[bytes]) -> None:
        log.append(b"".join(events))
        log.sync()

    yield append
    log.close()


@contextmanager
def _sqlite(path: Path) -> Iterator[Append]:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE events (number INTEGER PRIMARY KEY, event BLOB)")

        def append(events: list[bytes]) -> None:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO events (event) VALUES (?)", [(event,) for event in events])
            database.execute("COMMIT")

        yield append


def _timed(append: Append, events: list[bytes]) -> tuple[float, float]:
    """Seconds an append, and of CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(APPENDS):
        append(events)
    return (time.perf_counter() - wall) / APPENDS, (time.process_time() - cpu) / APPENDS


def _compact(name: str, merge: str, is_zipf: bool) -> None:
    work = workload(name)
    steps = _with_uneven_ids(work.steps) if is_zipf else work.steps
    shards = build_batch(steps, work.config(merge), run="bench", batch=0).shards
    files = [join(shard.iovec()) for shard in shards]
    size = sum(map(len, files))
    compact, writing = _cpu(lambda: [join(shard.compact()) for shard in shards])
    restored, reading = _cpu(lambda: [restore([one]) for one in compact])
    assert all(bytes(one) == file for one, file in zip(restored, files, strict=True))
    packer, unpacker = zstandard.ZstdCompressor(1), zstandard.ZstdDecompressor()
    packed, packing = _cpu(lambda: [packer.compress(file) for file in files])
    _, unpacking = _cpu(lambda: [unpacker.decompress(one) for one in packed])
    both, compressing = _cpu(lambda: [packer.compress(one) for one in compact])
    print(f"{name}, merge {merge}, {'uneven' if is_zipf else 'even'} token ids: files of {size / 2**20:.0f} MiB")
    for form, parts, write, read in (
        ("compact", compact, writing, reading),
        ("zstd-1", packed, packing, unpacking),
        ("zstd-1 of compact", both, writing + compressing, None),
    ):
        told = "" if read is None else f", read {read * 1e3:4.0f} ms"
        print(f"  {form:17} {sum(map(len, parts)) / size:.3f} of the files, written {write * 1e3:4.0f} ms of CPU{told}")


def _with_uneven_ids(steps: Steps) -> Steps:
    """The same rows with each id renamed, so that prompts still begin with the turns before."""
    tokens = steps.tokens
    drawn = np.minimum(np.random.default_rng(7).zipf(ZIPF, 150_000), 150_000).astype(np.int32)
    renamed = Ragged(drawn[tokens.values % len(drawn)], tokens.starts, tokens.lengths)
    return dataclasses.replace(steps, tokens=renamed)


def _cpu(work: Callable[[], T]) -> tuple[T, float]:
    """The least CPU that it takes of three times."""
    found, least = work(), float("inf")
    for _ in range(3):
        begin = time.process_time()
        found = work()
        least = min(least, time.process_time() - begin)
    return found, least


if __name__ == "__main__":
    main()
