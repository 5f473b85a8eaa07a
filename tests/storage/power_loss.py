"""A machine that dies while a journal is written.

A process works on a journal, on a `dying_disk`, and notes itself what the journal promised.

python -m tests.storage.power_loss DIRECTORY FSYNC SEED   # the process
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gristmill._wire.steps import Steps
from gristmill_service.storage.journal import run_log
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.dying_disk import Note, Promises, environment, read_notes
from tests.storage.tables import any_table, snapshot_in

_STEPS = 150


class Moment(NamedTuple):
    """What holds after a step. records: since the run began. live: tables that they need."""

    records: list[bytes]
    live: frozenset[int]


def history(seed: int) -> Iterator[tuple[str, list[int]]]:
    """Yields what is done, and with which tables: `add`, `free` and `flush` and `compact`."""
    generator, live, number = random.Random(seed), list[int](), 0
    for _ in range(_STEPS):
        kind = generator.choices(["add", "free", "flush", "compact"], [60, 25, 12, 3])[0]
        numbers: list[int] = []
        if kind == "add":
            numbers = [*range(number, number + generator.choice([1, 1, 1, 3]))]
            number += len(numbers)
            live += numbers
        elif kind == "free":
            numbers = [
                live.pop(generator.randrange(len(live))) for _ in range(min(len(live), generator.choice([1, 4])))
            ]
        yield kind, numbers


def moments(seed: int) -> list[Moment]:
    """What holds after each record."""
    listed = [Moment([], frozenset())]
    for kind, numbers in history(seed):
        records, live = listed[-1]
        if kind in ("add", "free"):
            changed = live | {*numbers} if kind == "add" else live - {*numbers}
            listed.append(Moment([*records, _record(kind, numbers)], frozenset(changed)))
    return listed


def table(number: int) -> Steps:
    return any_table(number, rows=1, tokens=(5, 50, 400, 4000, 12_000)[number * 7 % 5])


def _record(kind: str, numbers: list[int]) -> bytes:
    return f"{kind} {numbers}".encode()


def work(directory: Path, fsync: run_log.Fsync, seed: int) -> None:
    """The process: notes how many records were answered, and how many when the last flush that ended began."""
    run_log._SHORT_WAL = 1 << 16
    DiskRoom.wal_limit = 200_000  # type: ignore[assignment, method-assign]
    promises = Promises(Path(os.environ["NOTES"]))
    log = JournalRunStore(directory / "journal", fsync).create("run", b"{}")
    log.replay()
    answered = flushed = 0
    for kind, numbers in history(seed):
        if kind == "flush":
            log.flush()
            flushed = answered
        elif kind == "compact":
            log.compact(log.end, [b"%d" % answered, b" " * 9000])
        else:
            log.append(_record(kind, numbers), {number: table(number) for number in numbers} if kind == "add" else {})
            answered += 1
        if kind == "free":
            log.remove(numbers)
        promises.note((answered, flushed))
    # It ends as one that is killed.
    os._exit(0)


def noted(directory: Path, library: Path, fsync: str, seed: int) -> list[Note]:
    """Runs the process. Returns what it did."""
    notes = directory.parent / "notes"
    directory.mkdir()
    command = [sys.executable, "-m", "tests.storage.power_loss", str(directory), fsync, str(seed)]
    subprocess.run(command, env=environment(library, directory, notes), check=True, cwd=Path(__file__).parents[2])
    return read_notes(notes)


def opened(store: JournalRunStore) -> tuple[JournalRunLog, int, bool]:
    """The run's log, how many records it has, and whether it is short."""
    log = store.open("run")
    replay = log.replay()
    return log, int(snapshot_in(replay) or b"0") + len(list(replay.records)), replay.is_short()


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))  # type: ignore[arg-type]
