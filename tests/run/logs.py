"""Logs of runs that tests look into, hold up, and make fail."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.run.machine.codec import decode_events
from gristmill_service.run.machine.events import Event
from gristmill_service.storage.journal.database import FILE_NAME
from gristmill_service.storage.memory import MemoryRunLog, MemoryRunStore
from gristmill_service.storage.run_store import CheckNames, LogEnd, Replay, any_names

PATIENCE_S = 60.0


class RecordingLog(MemoryRunLog):
    """Keeps the events and the tables, for the next process. `refuses`: how many of the next appends fail."""

    reads_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.snapshot: list[bytes] | None = None
        self.records: list[bytes] = []
        self.tables: dict[int, Steps] = {}
        self.refuses = self.generation = self.first_number = 0
        self._lock = threading.Lock()

    def of(self, config: bytes) -> RecordingLog:
        self.config = config
        return self

    @property
    def events(self) -> list[Event]:
        """The records that no snapshot has."""
        return [event for record in self.records for event in decode_events(record)]

    def note_generation(self, generation: int) -> None:
        self.generation = generation

    def replay(self) -> Replay:
        return Replay(self.snapshot, list(self.records))

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise UnavailableError("the book is full")
        with self._lock:
            self.records.append(record)
            self.end = LogEnd(self.end.number + 1)
        self.tables |= tables
        self.first_number = max([self.first_number, *(number + 1 for number in tables)])

    def compact(self, end: LogEnd, snapshot: Iterable[bytes]) -> None:
        pieces = [*snapshot]
        with self._lock:
            after = self.end.number - end.number
            self.snapshot, self.records = pieces, self.records[len(self.records) - after :]

    def get(self, number: int) -> Steps:
        if number not in self.tables:
            raise NotFoundError(f"table {number} is not in the book")
        return self.tables[number]

    def remove(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self.tables[number]

    def retain(self, numbers: Collection[int]) -> set[int]:
        self.tables = {number: table for number, table in self.tables.items() if number in numbers}
        return {*numbers} - self.tables.keys()


class RemoteLog(RecordingLog):
    """One that is elsewhere: rows are on the heap, too, until their batch is published."""

    is_remote = True


class RecordingStore(MemoryRunStore):
    """Stores such logs. opened: how often one was opened again."""

    def __init__(self) -> None:
        self.logs: dict[str, RecordingLog] = {}
        self.opened = 0

    def names(self) -> list[str]:
        return sorted(self.logs)

    def create(self, name: str, config: bytes, check: CheckNames = any_names) -> RecordingLog:
        self.logs[name] = log = RecordingLog().of(config)
        return log

    def open(self, name: str) -> RecordingLog:
        if name not in self.logs:
            raise NotFoundError(f"run {name!r} is in no book")
        self.opened += 1
        return self.logs[name]

    def delete(self, name: str) -> None:
        self.logs.pop(name, None)


def lose_rows(directory: Path, number: int) -> None:
    """Overwrites a table of rows in the journal of a run with zeros."""
    with closing(sqlite3.connect(directory / FILE_NAME)) as database, database:
        database.execute("UPDATE tables SET rows = zeroblob(length(rows)) WHERE number = ?", [number])
        assert database.execute("SELECT changes()").fetchone() == (1,)


class HeldAppends:
    """Holds every append to a log until `go_on` is called, which may have all of them fail.

    entered: set while an append waits. holds: until then. count: of all that came.
    """

    def __init__(self, log: Any) -> None:
        self.entered, self._may_go_on, self.count = threading.Event(), threading.Event(), 0
        self._append, self.holds = log.append, True
        self._error: Exception | None = None
        log.append = self._held

    def go_on(self, error: Exception | None = None) -> None:
        """Lets this append and those after it go on, or fail."""
        self._error, self.holds = error, False
        self._may_go_on.set()

    def hold(self) -> None:
        """Holds those after this one again."""
        self.holds = True
        self.entered.clear()
        self._may_go_on.clear()

    def _held(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        self.count += 1
        self.entered.set()
        assert self._may_go_on.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        self._append(record, tables)
