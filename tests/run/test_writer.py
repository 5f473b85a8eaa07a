"""One writer a run: commands are decided in the order of their arrival, logged together, and nobody waits for ever."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gristmill._wire.steps import Steps
from gristmill.errors import (
    AlreadyExistsError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.run import waiters as conditions
from gristmill_service.run.capacity import RowBudget
from gristmill_service.run.machine.answers import Outcome, Position, Taken
from gristmill_service.run.machine.codec import decode_events
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import RowsStored, RunFinished
from gristmill_service.storage.memory import MemoryShardStore
from gristmill_service.storage.run_store import LogLostError
from tests.on_loop import Runs
from tests.run.harness import CONFIG, Bench, group_rows, row, table, wait_until
from tests.run.logs import HeldAppends
from tests.run.test_served_bytes import await_batch
from tests.strategies import Row

PATIENCE_S = 60.0


def begun(**settings: Any) -> Bench:
    """A run that has begun its groups and knows what its rows are like."""
    bench = Bench(max_buffered_batches=50, **settings)
    bench.begin("first", *(f"u{number}" for number in range(40)))
    bench.submit(row("first"))
    return bench


def await_callers(bench: Bench, count: int) -> None:
    """Returns when that many calls, or tasks, wait for the log."""
    wait_until(lambda: len(bench.run._writer.commits._waiting) >= count)


def queue(pool: ThreadPoolExecutor, bench: Bench, *submissions: list[Row]) -> list[Future[Taken]]:
    """Submissions that are decided in this order, behind one that is being appended."""
    futures = []
    for submission in submissions:
        futures.append(pool.submit(bench.run.submit, table(*submission)))
        await_callers(bench, 1 + len(futures))
    return futures


def test_calls_that_come_while_the_log_is_written_are_logged_in_one_append() -> None:
    bench = begun()
    before, held = len(bench.log.records), HeldAppends(bench.log)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(bench.run.submit, table(row("u0")))
        assert held.entered.wait(PATIENCE_S)
        others = queue(pool, bench, *([row(f"u{number}")] for number in range(1, 11)))
        held.go_on()
        assert first.result(PATIENCE_S).outcomes == [Outcome.ACCEPTED]
        assert [other.result(PATIENCE_S).outcomes for other in others] == [[Outcome.ACCEPTED]] * 10
    assert held.count == 2, "the one that was being written, and one for all that waited"
    assert len(bench.log.records) == before + 2
    assert len(decode_events(bench.log.records[-1])) == 10
    assert bench.replayed() == bench.state


def test_the_same_row_sent_twice_at_once_is_accepted_once() -> None:
    bench = begun()
    held = HeldAppends(bench.log)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(bench.run.submit, table(row("u0")))
        assert held.entered.wait(PATIENCE_S)
        others = queue(pool, bench, [row("u1")], [row("u1")], [row("u1", reward=9.0)], [row("u2")])
        held.go_on()
        first.result(PATIENCE_S)
        assert others[0].result(PATIENCE_S).outcomes == [Outcome.ACCEPTED]
        assert others[1].result(PATIENCE_S).outcomes == [Outcome.DUPLICATE]
        with pytest.raises(AlreadyExistsError):
            others[2].result(PATIENCE_S)
        assert others[3].result(PATIENCE_S).outcomes == [Outcome.ACCEPTED]
    assert bench.replayed() == bench.state


def test_a_refused_call_hurts_none_that_is_logged_with_it() -> None:
    bench = begun()
    held = HeldAppends(bench.log)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(bench.run.submit, table(row("u0")))
        assert held.entered.wait(PATIENCE_S)
        others = queue(pool, bench, [row("u1")], [row("u2", sample=99)], [row("u3")])
        held.go_on()
        first.result(PATIENCE_S)
        assert others[0].result(PATIENCE_S).outcomes == others[2].result(PATIENCE_S).outcomes == [Outcome.ACCEPTED]
        with pytest.raises(GristmillError, match="sample 99 is outside of"):
            others[1].result(PATIENCE_S)
    stored = [row for event in bench.log.events if isinstance(event, RowsStored) for row in event.rows]
    assert [row.trajectory.uid for row in stored] == ["first", "u0", "u1", "u3"]
    assert set(bench.log.tables) == {row.ref.table for row in stored}, "a refused request's rows are not kept"


@pytest.mark.parametrize("error", [UnavailableError("the log is full"), LogLostError("another process owns the run")])
def test_an_append_that_fails_ends_every_call_and_every_wait_and_the_run_is_what_its_log_says(error: Exception) -> None:
    bench = begun()
    before, woken, held = bench.state.rows_accepted, threading.Event(), HeldAppends(bench.log)
    bench.run.wait(conditions.version_is_reached(7), woken.set)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(bench.run.submit, table(row("u0")))
        assert held.entered.wait(PATIENCE_S)
        others = queue(pool, bench, *([row(f"u{number}")] for number in range(1, 4)))
        reading = pool.submit(bench.run.status)
        await_callers(bench, 5)
        held.go_on(error)
        errors = [one.exception(PATIENCE_S) for one in (first, *others, reading)]
    assert all(isinstance(error, UnavailableError) for error in errors)
    assert len({id(error) for error in errors}) == 5, "each caller has an error of its own"
    assert woken.wait(PATIENCE_S)
    assert bench.run.is_lost
    for call in (bench.run.status, bench.run.finish, lambda: bench.submit(row("u9"))):
        with pytest.raises(UnavailableError):
            call()
    assert held.count == 1, "nothing is appended behind what failed"
    held.go_on()
    bench.reopen()
    assert bench.state == bench.replayed()
    assert bench.state.rows_accepted == before
    assert bench.submit(row("u0"), row("u1")) == ["ACCEPTED", "ACCEPTED"]


def test_a_defect_in_a_command_is_its_callers_alone_and_the_writer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = begun()
    monkeypatch.setattr("gristmill_service.run.machine.decisions.aborts.abort_groups", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.run.abort_groups(0, ["u0"], "why")
    assert bench.submit(row("u0")) == ["ACCEPTED"]


def test_an_acknowledgement_that_commits_and_frees_is_one_append() -> None:
    bench = Bench(train_batch_size=1)
    bench.submit(*group_rows("a"))
    bench.make_batches()
    before = len(bench.log.records)
    bench.run.acknowledge("policy", 0, Position(0), 0, commit=True)
    assert len(bench.log.records) == before + 1
    assert bench.state.freed == 1
    assert [type(event).__name__ for event in decode_events(bench.log.records[-1])] == [
        "Acknowledged",
        "PositionCommitted",
        "BatchFreed",
    ]


def test_ranks_that_acknowledge_at_once_are_logged_together_and_commit_once() -> None:
    bench = Bench(dp_size=4, train_batch_size=1, max_buffered_batches=4)
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    before, held = len(bench.log.records), HeldAppends(bench.log)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(bench.run.announce, 1)
        assert held.entered.wait(PATIENCE_S)
        acks = []
        for rank in range(4):
            acks.append(pool.submit(bench.run.acknowledge, "policy", rank, Position(0), 0, True))
            await_callers(bench, 1 + len(acks))
        held.go_on()
        first.result(PATIENCE_S)
        assert [ack.result(PATIENCE_S).position for ack in acks] == [Position(1)] * 4
    # The version; and the acknowledgements, their commit, and what the commit frees.
    assert len(bench.log.records) == before + 2
    assert bench.state.freed == 1
    assert bench.replayed() == bench.state


@pytest.mark.parametrize("is_collected", [False, True], ids=["its rows", "the run itself"])
def test_a_deleted_run_leaves_memory_without_the_garbage_collector(is_collected: bool) -> None:
    runs = Runs(MemoryShardStore(), make_monitor=Monitor)
    runs.create("run", CONFIG | {"train_batch_size": 1})
    run = runs.get("run")
    for number in range(3):
        run.submit(table(*group_rows(f"u{number}", prompt_token_ids=[number], response=[7] * 200_000)))
    await_batch(run, 0)
    with pytest.raises(GristmillError):
        run.submit(table(row("u9", sample=99)))
    held = next(iter(run._writer.rows._tables.values())).stored
    assert isinstance(held, Steps), "it is large"
    gone = weakref.ref(run._target if is_collected else held.tokens.values)
    gc.collect()
    gc.disable()
    try:
        del run, held
        runs.delete("run")
        deadline = time.monotonic() + PATIENCE_S
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()
    runs.close(PATIENCE_S)


def test_closing_returns_when_nothing_is_appended_any_more() -> None:
    bench = begun()
    held = HeldAppends(bench.log)
    with ThreadPoolExecutor(4) as pool:
        writing = pool.submit(bench.run.submit, table(row("u0")))
        assert held.entered.wait(PATIENCE_S)
        queued = pool.submit(bench.run.submit, table(row("u1")))
        await_callers(bench, 2)
        closing = pool.submit(bench.run.close, NotFoundError("deleted"))
        await_callers(bench, 3)
        for call in (bench.run.finish, bench.run.status):
            late = pool.submit(call)
            with pytest.raises(NotFoundError):
                late.result(PATIENCE_S)
        assert not closing.done()
        held.go_on()
        assert writing.result(PATIENCE_S).outcomes == queued.result(PATIENCE_S).outcomes == [Outcome.ACCEPTED]
        closing.result(PATIENCE_S)
    assert bench.replayed() == bench.state


def test_callers_that_wait_in_a_run_whose_lease_ran_out_are_woken() -> None:
    runs = Runs(MemoryShardStore(), make_monitor=Monitor)
    runs.create("run", CONFIG)
    run, woken = runs.get("run"), threading.Event()
    run.wait(conditions.version_is_reached(7), woken.set)
    run.lose()
    assert woken.wait(PATIENCE_S)
    runs.close(PATIENCE_S)


def test_a_value_that_no_log_can_hold_is_refused_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = begun()
    with pytest.raises(InvalidArgumentError, match="launch is '\\\\ud800', which is not valid Unicode"):
        bench.run.resume("policy", Checkpoint(None), "\ud800")
    monkeypatch.setattr(
        "gristmill_service.run.machine.decisions.progress.PolicyVersionAnnounced", lambda _: RunFinished
    )
    with pytest.raises(InvalidArgumentError, match="cannot be written to the run's log"):
        bench.run.announce(1)
    assert bench.submit(row("u0")) == ["ACCEPTED"]
    assert not bench.run.is_lost
    assert bench.replayed() == bench.state


def test_a_repeated_acknowledgement_that_could_not_be_committed_is_not_answered() -> None:
    bench = begun(dp_size=2)
    bench.submit(row("first", sample=1), *group_rows("u39"))
    bench.make_batches()
    bench.run.acknowledge("policy", 0, Position(0), 0, commit=False)
    held = HeldAppends(bench.log)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(bench.run.submit, table(row("u0")))
        assert held.entered.wait(PATIENCE_S)
        repeated = pool.submit(bench.run.acknowledge, "policy", 0, Position(0), 0, True)
        await_callers(bench, 2)
        held.go_on(UnavailableError("the log is full"))
        for one in (first, repeated):
            assert isinstance(one.exception(PATIENCE_S), UnavailableError)


def test_a_run_deleted_while_a_call_is_logged_gives_the_room_of_its_rows_back() -> None:
    budget = RowBudget(8 << 30)
    bench = Bench(budget=budget)
    bench.submit(row("a"))
    held = HeldAppends(bench.log)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(bench.run.submit, table(row("b")))
        assert held.entered.wait(PATIENCE_S)
        assert budget.held > 0
        closing = pool.submit(bench.run.close, NotFoundError("deleted"))
        await_callers(bench, 2)
        held.go_on()
        writing.result(PATIENCE_S)
        closing.result(PATIENCE_S)
    bench.run.close_log()
    assert budget.held == 0


def test_who_waits_is_woken_also_where_the_writer_ends_in_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = begun()
    woken = threading.Event()
    bench.run.wait(conditions.version_is_reached(1), woken.set)
    monkeypatch.setattr("gristmill_service.run.machine.decisions.sealing.consequences", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.run.announce(1)
    assert woken.is_set()
    assert bench.run.is_lost
    monkeypatch.undo()
    bench.reopen()
    assert bench.state.policy_version == 0, "nothing of the half applied command is in the log"
