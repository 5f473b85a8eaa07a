"""Figures for decisions: what a library would do in place of code of our own, beside ours, by turns.

python -m tests.bench.alternatives [DIRECTORY]   # the event log beside SQLite, on a disk
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gristmill_service.storage.journal.event_log import EventLog

EVENT = os.urandom(300)
"""About what a submitted turn takes of the log."""
GROUPS, ROUNDS, APPENDS = (1, 64), 7, 50
Append = Callable[[list[bytes]], None]


def main() -> None:
    _logs(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build"))


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


if __name__ == "__main__":
    main()
