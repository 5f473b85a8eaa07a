"""One run is deleted and created again without end while threads write to it; its neighbours lose nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.errors import UnavailableError
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.tables import any_table, same, whole

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
        first = 1000 * self._number + len(self.records)
        number, stored = self._log.put(any_table(first, rows=1, tokens=50))
        assert same(stored, any_table(first, rows=1, tokens=50))
        self._tables[number] = first
        self.records.append(f"{self.name} {first}".encode())
        self._log.append(self.records[-1], [number])
        self._log.sync()
        if len(self._tables) % 7 == 0:
            removed, _ = self._tables.popitem()
            self._log.remove([removed])

    def check(self, store: JournalRunStore) -> None:
        log = store.open(self.name)
        assert list(log.replay().records) == self.records
        assert log.retain(self._tables, whole) == set()
        for number, first in self._tables.items():
            assert same(log.get(number), any_table(first, rows=1, tokens=50))


class Deleted:
    """A run that is deleted under whoever writes to it."""

    def __init__(self, store: JournalRunStore) -> None:
        self._store, self.deletes = store, 0
        self._log = store.create("deleted", b"{}")
        self._log.replay()

    def recreate(self) -> None:
        time.sleep(0.002)
        self._log.close()
        self._store.delete("deleted")
        self._log.close()
        self.deletes += 1
        log = self._store.create("deleted", b"{}")
        log.replay()
        self._log = log

    def put(self) -> None:
        log = self._log
        number, _ = log.put(any_table(FOREIGN, rows=2, tokens=3000))
        log.sync()
        log.remove([number])

    def append(self) -> None:
        log = self._log
        for _ in range(20):
            log.append(b"foreign")
        log.compact(b"foreign")


@pytest.mark.parametrize("fsync", ["never", "always"])
def test_neighbours_of_a_run_that_is_deleted_under_load_lose_nothing(tmp_path: Path, fsync: str) -> None:
    store = JournalRunStore(tmp_path, fsync)  # type: ignore[arg-type]
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
    threads += [threading.Thread(target=repeat, args=(deleted.put, UnavailableError)) for _ in range(3)]
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

    again = JournalRunStore(tmp_path, fsync)  # type: ignore[arg-type]
    for neighbour in neighbours:
        neighbour.check(again)
    again.close()
