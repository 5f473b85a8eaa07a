"""A machine that dies while a journal is written.

A process works on a journal under `syscalls.c`, which notes each write and each sync, and notes itself what the journal
promised. From that come the files as a disk may have them at any moment: what was synced, and any part of what came
later, in any order.

python -m tests.storage.power_loss DIRECTORY FSYNC SEED   # the process
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from gristmill._wire.steps import Steps
from gristmill_service.storage.journal import run_log
from gristmill_service.storage.journal.disk_room import DiskRoom
from gristmill_service.storage.journal.run_log import JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.tables import any_table

_NOTE = struct.Struct("=cqII")
_BLOCK = 4096
_STEPS = 150
_PROMISES = "promises"

Part = Literal["nothing", "a beginning", "any blocks", "all"]
"""What a disk has of the writes after the last sync."""


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
    promises = os.open(directory / _PROMISES, os.O_CREAT | os.O_WRONLY)
    log = JournalRunStore(directory / "journal", fsync).create("run", b"{}")
    log.replay()
    answered = flushed = 0
    for kind, numbers in history(seed):
        if kind == "flush":
            log.flush()
            flushed = answered
        elif kind == "compact":
            log.compact(b"%d" % answered)
        else:
            log.append(_record(kind, numbers), {number: table(number) for number in numbers} if kind == "add" else {})
            answered += 1
        if kind == "free":
            log.remove(numbers)
        os.pwrite(promises, struct.pack("=II", answered, flushed), 0)
    # It ends as one that is killed.
    os._exit(0)


@dataclass(slots=True)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    later: list[tuple[bytes, int, bytes]] = field(default_factory=list)

    def left(self, part: Part, generator: random.Random) -> bytes:
        content = bytearray(self.synced)
        upto = {"nothing": 0, "a beginning": generator.randint(0, len(self.later))}.get(part, len(self.later))
        likelihood = generator.choice([0.2, 0.5, 0.8, 0.95]) if part == "any blocks" else 1.0
        for kind, offset, data in self.later[:upto]:
            if kind == b"t":
                if generator.random() < likelihood:
                    _change(content, kind, offset, data)
                continue
            at = 0
            while at < len(data):
                end = at + _BLOCK - (offset + at) % _BLOCK
                if generator.random() < likelihood:
                    _change(content, kind, offset + at, data[at:end])
                at = end
        return bytes(content)


def _change(content: bytearray, kind: bytes, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    if kind == b"t":
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


class Disk:
    """The files of a directory, write by write. answered, flushed: of the records, what `work` noted."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._files = directory, dict[str, _File]()
        self.answered = self.flushed = 0

    def apply(self, kind: bytes, offset: int, path: str, data: bytes) -> None:
        name = str(Path(path).relative_to(self._directory))
        if name == _PROMISES:
            self.answered, self.flushed = struct.unpack("=II", data)
        elif kind in b"wt":
            self._files.setdefault(name, _File()).later.append((kind, offset, data))
        elif kind == b"s" and name in self._files:
            file = self._files[name]
            file.synced, file.later = bytearray(file.left("all", random.Random())), []
        elif kind == b"u":
            self._files.pop(name, None)
        elif kind == b"r":
            to = str(Path(data.decode()).relative_to(self._directory))
            for below in [below for below in self._files if below == name or below.startswith(f"{name}/")]:
                self._files[to + below[len(name) :]] = self._files.pop(below)

    def write(self, directory: Path, part: Part, generator: random.Random) -> None:
        """Writes the files as they may be after the machine died now."""
        for name, file in self._files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.left(part, generator))


def noted(directory: Path, library: Path, fsync: str, seed: int) -> list[tuple[bytes, int, str, bytes]]:
    """Runs the process. Returns what it did: kind, offset, path and data."""
    notes = directory.with_suffix(".notes")
    directory.mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(library), "NOTED": str(directory), "NOTES": str(notes)}
    command = [sys.executable, "-m", "tests.storage.power_loss", str(directory), fsync, str(seed)]
    subprocess.run(command, env=environment, check=True, cwd=Path(__file__).parents[2])
    data, at, done = notes.read_bytes(), 0, []
    while at < len(data):
        kind, offset, length, size = _NOTE.unpack_from(data, at)
        at += _NOTE.size + length + size
        done.append((kind, offset, data[at - length - size : at - size].decode(), data[at - size : at]))
    return done


def opened(store: JournalRunStore) -> tuple[JournalRunLog, int, bool]:
    """The run's log, how many records it has, and whether it is short."""
    log = store.open("run")
    replay = log.replay()
    return log, int(replay.snapshot or b"0") + len(list(replay.records)), replay.is_short()


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))  # type: ignore[arg-type]
