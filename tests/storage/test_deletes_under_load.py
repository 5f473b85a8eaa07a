"""One run is deleted and created again without end while threads write to it; its neighbours lose nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.errors import NotFoundError, UnavailableError
from gristmill_service.storage.journal.run_log import Fsync, JournalRunLog
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.tables import any_table, compact, same

DELETES, SECONDS = 20, 60.0
NEIGHBOURS = 4
FOREIGN = 999_000


class Neighbour:
    """A run that remembers what it stored."""

    def __init__(self, store: JournalRunStore, number: int) -> None:
        self.name, self._number = f"neighbour-{number}", number
        self._log = store.create(self.name, b"{}")
        self._log.replay()
        self.records: list[bytes] = []
        self._tables: dict[int, int] = {}

    def store_one(self) -> None:
        number = len(self.records)
        first = 1000 * self._number + number
        self.records.append(f"{self.name} {first}".encode())
        self._log.append(self.records[-1], {number: any_table(first, rows=1, tokens=50)})
        self._tables[number] = first
        assert same(self._log.get(number), any_table(first, rows=1, tokens=50))
        if len(self._tables) % 7 == 0:
            removed, _ = self._tables.popitem()
            self._log.remove([removed])

    def flush(self) -> None:
        self._log.flush()
        time.sleep(0.01)

    def check(self, store: JournalRunStore) -> None:
        log = store.open(self.name)
        assert list(log.replay().records) == self.records
        assert log.retain(self._tables) == set()
        for number, first in self._tables.items():
            assert same(log.get(number), any_table(first, rows=1, tokens=50))
        log.close()


class Deleted:
    """A run that is deleted under the threads that write to it."""

    def __init__(self, store: JournalRunStore) -> None:
        self._store, self.deletes = store, 0
        self._log = self._created()

    def _created(self) -> JournalRunLog:
        log = self._store.create("deleted", b"{}")
        log.replay()
        return log

    def recreate(self) -> None:
        time.sleep(0.002)
        log = self._log
        if self.deletes % 2:
            log.close()
        self._store.delete("deleted")
        log.close()
        self.deletes += 1
        self._log = self._created()

    def append(self) -> None:
        log = self._log
        for _ in range(20):
            number = log.first_number
            log.append(b"foreign", {number: any_table(FOREIGN, rows=2, tokens=3000)})
            log.remove([number])
        compact(log, b"foreign")

    def read(self) -> None:
        log = self._log
        log.flush()
        assert same(log.get(log.first_number - 1), any_table(FOREIGN, rows=2, tokens=3000))


@pytest.mark.parametrize("fsync", ["never", "always"])
def test_neighbours_of_a_run_that_is_deleted_under_load_lose_nothing(tmp_path: Path, fsync: Fsync) -> None:
    store = JournalRunStore(tmp_path, fsync)
    neighbours = [Neighbour(store, number) for number in range(NEIGHBOURS)]
    deleted = Deleted(store)
    stopped, errors = threading.Event(), list[BaseException]()

    def repeat(step: Callable[[], None], *expected: type[Exception]) -> None:
        while not stopped.is_set() and not errors:
            try:
                step()
            except expected:
                continue
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

    threads = [threading.Thread(target=repeat, args=(one.store_one,)) for one in neighbours]
    threads += [threading.Thread(target=repeat, args=(one.flush,)) for one in neighbours]
    threads += [threading.Thread(target=repeat, args=(deleted.read, UnavailableError, NotFoundError)) for _ in range(3)]
    threads.append(threading.Thread(target=repeat, args=(deleted.append, UnavailableError)))
    threads.append(threading.Thread(target=repeat, args=(deleted.recreate,)))
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not errors:
        if deleted.deletes >= DELETES and all(len(one.records) > 5 for one in neighbours):
            break
        time.sleep(0.05)
    stopped.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert deleted.deletes > 5, "it was deleted under load"
    for neighbour in neighbours:
        assert len(neighbour.records) > 5
        for path in (tmp_path / f"run-{neighbour.name}").iterdir():
            with path.open("rb") as file:
                stored = file.read(4 << 20)
            assert b"foreign" not in stored
            assert b"u999000-" not in stored
    store.close()  # as a killed process leaves it

    again = JournalRunStore(tmp_path, fsync)
    for neighbour in neighbours:
        neighbour.check(again)
    again.close()
