"""Rows of open groups that a journal or Redis has damaged or lost: they cost their groups, and no batch.

Nothing is read while a run is opened. What it had is looked through when it answers, and before it is sealed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill.errors import BatchFailedError, UnavailableError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.run.background import Background
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.rows.checked_tables import CheckedTables
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.memory import MemoryShardStore
from tests.redis.run_logs import Join
from tests.redis.servers import RedisServer
from tests.run.harness import CONFIG, build_all, group_rows, open_run, row, table, wait_until

CONFIGURATION = parse_config(CONFIG | {"train_batch_size": 3})


class Store(NamedTuple):
    """A run store, and what happens to its tables. damage, lose: the table at this place in the order of appends."""

    runs: Any
    damage: Callable[[int], None]
    lose: Callable[[int], object]


@pytest.fixture(params=["journal", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, join: Join, redis_server: RedisServer) -> Iterator[Store]:
    if request.param == "redis":
        runs = join(redis_server.url)
        client = runs._client

        def names() -> list[bytes]:
            return sorted(client.scan_iter("*:rows:*"), key=lambda name: int(name.rsplit(b":", 1)[1], 16))

        def damage(at: int) -> None:
            client.setrange(names()[at], client.strlen(names()[at]) // 2, b"\xff\xfe")

        yield Store(runs, damage, lambda at: client.unlink(names()[at]))
        return
    journal = JournalRunStore(tmp_path, "never")

    def change(at: int, statement: str) -> None:
        with closing(sqlite3.connect(tmp_path / "run-run" / "journal.sqlite")) as database, database:
            numbers = [number for [number] in database.execute("SELECT number FROM tables ORDER BY number")]
            if statement:
                database.execute(statement, [numbers[at]])
                return
            [[rows]] = database.execute("SELECT rows FROM tables WHERE number = ?", [numbers[at]])
            flipped = rows[:-1] + bytes([rows[-1] ^ 1])
            database.execute("UPDATE tables SET rows = ? WHERE number = ?", [flipped, numbers[at]])

    yield Store(journal, lambda at: change(at, ""), lambda at: change(at, "DELETE FROM tables WHERE number = ?"))
    journal.close()


class Service:
    """A process with a run that has three groups of two tables; the last one lacks its second sample."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._begin(store.runs.create("run", b"{}"))
        for rows in ([row("a")], [row("a", 1, reward=0.0)], [row("b")], [row("b", 1, reward=0.0)], [row("c")]):
            self.run.submit(table(*rows))

    def _begin(self, log: Any) -> None:
        self.log = log
        self.run, self.builders = open_run(log, CONFIGURATION, store=MemoryShardStore(), build_batch=build_batch)

    def restart(self, change: Callable[[], None]) -> None:
        """Ends the process; the next one opens the run after this change of the store."""
        self.run.close(UnavailableError("the service ends"))
        self.run.wait_idle()
        self.run.close_log()
        change()
        self._begin(self.store.runs.open("run"))

    def complete(self) -> None:
        self.run.submit(table(row("c", 1, reward=0.0)))

    def groups(self) -> dict[str, str]:
        """The groups, with what became of each."""
        return {
            one.uid: one.reason if one.state == "dropped" else one.state for part in self.run.groups() for one in part
        }


@pytest.fixture
def no_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "look_through", lambda self, looking: None)


@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_look_through_drops_the_groups_of_damaged_tables_and_no_other(store: Store, at: int) -> None:
    one = Service(store)
    one.restart(lambda: store.damage(at))
    touched = "aabbc"[at]
    wait_until(lambda: one.groups()[touched] == "rows_lost")
    one.complete()
    one.run.submit(table(*group_rows("d")))
    wait_until(lambda: one.run.status().batches_sealed == 1)
    build_all(one.run, one.builders)
    assert one.groups() == dict.fromkeys("abcd", "sealed") | {touched: "rows_lost"}
    assert one.run.batch(0).state is BatchState.PUBLISHED


@pytest.mark.usefixtures("no_look_through")
@pytest.mark.parametrize("change", ["damage", "lose"])
def test_a_group_is_checked_before_it_is_sealed(store: Store, change: str) -> None:
    one = Service(store)
    one.restart(lambda: getattr(store, change)(2))
    assert one.groups()["b"] == ("rows_lost" if change == "lose" else "complete"), "nothing was read"
    one.complete()
    one.run.submit(table(*group_rows("d")))
    wait_until(lambda: one.run.status().batches_sealed == 1)
    build_all(one.run, one.builders)
    assert one.groups() == {"a": "sealed", "b": "rows_lost", "c": "sealed", "d": "sealed"}
    assert one.run.batch(0).state is BatchState.PUBLISHED


@pytest.mark.usefixtures("no_look_through")
@pytest.mark.parametrize("call", ["finish", "seal"])
def test_calls_that_seal_check_the_groups_first(store: Store, call: str) -> None:
    one = Service(store)
    one.restart(lambda: store.damage(1))
    answer = one.run.finish() if call == "finish" else one.run.seal(None).prompts
    build_all(one.run, one.builders)
    assert answer == 1
    assert one.groups() == {"a": "rows_lost", "b": "sealed", "c": "finished" if call == "finish" else "open"}
    assert one.run.batch(0).state is BatchState.PUBLISHED


@pytest.mark.usefixtures("no_look_through")
def test_a_sealed_batch_fails_as_a_whole(store: Store) -> None:
    one = Service(store)
    one.complete()
    build_all(one.run, one.builders)
    one.restart(lambda: store.damage(1))
    build_all(one.run, one.builders)
    with pytest.raises(BatchFailedError, match=r"rows of it are lost: table .* damaged"):
        one.run.batch(0)
    assert one.groups() == dict.fromkeys("abc", "batch_failed")


def test_a_store_that_does_not_answer_delays_the_check_and_costs_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, plain = iter([True, True, True]), CheckedTables.lost

    def refuse(tables: CheckedTables, numbers: Sequence[int]) -> set[int]:
        if next(refusals, False):
            raise UnavailableError("the store is away")
        return plain(tables, numbers)

    one = Service(store)
    monkeypatch.setattr(CheckedTables, "lost", refuse)
    one.restart(lambda: None)
    one.complete()

    def is_sealed() -> bool:
        one.run.tick()
        return bool(one.run.status().batches_sealed)

    wait_until(is_sealed)
    build_all(one.run, one.builders)
    assert one.groups() == dict.fromkeys("abc", "sealed")


@pytest.mark.usefixtures("no_look_through")
def test_what_this_process_wrote_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Service(store)
    monkeypatch.setattr(one.log, "get_all", None)
    one.complete()
    assert one.run.status().batches_sealed == 1
