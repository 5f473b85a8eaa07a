"""What is answered, built or removed is in the log: nobody learns of what a failed append may lose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from gristmill.errors import AlreadyExistsError, GristmillError, UnavailableError
from gristmill_service.run.compaction import Compaction
from gristmill_service.run.machine.answers import BatchState, Position, RewardUpdate, Sealed
from gristmill_service.run.machine.decisions import sealing
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.run.machine.events import GroupKey
from tests.on_loop import on_loop
from tests.pipeline.written import column
from tests.run.harness import Bench, group_rows, key, row, table, wait_until
from tests.run.logs import PATIENCE_S, HeldAppends, RecordingLog

VERDICT = column("verdict", scope="row")
FULL = UnavailableError("the log is full")


def waiting(bench: Bench) -> int:
    """How many calls and tasks wait for the log."""
    return sum(not future.done() for _, future in bench.run._writer.commits._waiting)


@contextmanager
def while_appending(bench: Bench) -> Iterator[HeldAppends]:
    """A version is announced, and its append is under way until it is released."""
    held = HeldAppends(bench.log)
    with ThreadPoolExecutor(1) as pool:
        announced = pool.submit(bench.run.announce, 9)
        assert held.entered.wait(PATIENCE_S)
        try:
            yield held
        finally:
            if held.holds:
                held.go_on()
            announced.exception(PATIENCE_S)


def published() -> Bench:
    """A run with a batch that was trained on, one that waits for columns, a group that is complete, and an open one."""
    bench = Bench(columns=[VERDICT])
    bench.submit(*group_rows("a"), *group_rows("b"))
    bench.make_batches()
    bench.write_rest(0, 1.0)
    bench.make_batches()
    for mini_batch in range(2):
        bench.run.acknowledge("policy", 0, Position(0, 0, mini_batch), 1, commit=False)
    bench.submit(*group_rows("c"), *group_rows("d"))
    bench.make_batches()
    bench.submit(*group_rows("whole"))
    bench.submit(row("open"), row("open", 1, reward=None, last=False))
    assert [bench.run.batch(number).state for number in (0, 1)] == [BatchState.PUBLISHED, BatchState.FORWARD]
    return bench


CALLS: dict[str, Callable[[Bench], Any]] = {
    "begin_groups": lambda bench: bench.run.begin_groups(0, ["new"]),
    "submit": lambda bench: bench.run.submit(table(row("new"))),
    "set_rewards": lambda bench: bench.run.set_rewards([RewardUpdate(key("open", 1), 0, 1.0)]),
    "abort_trajectories": lambda bench: bench.run.abort_trajectories([key("open")], "broken"),
    "abort_groups": lambda bench: bench.run.abort_groups(0, ["open"], "tired"),
    "seal": lambda bench: bench.run.seal(None),
    "finish": lambda bench: bench.run.finish(),
    "announce": lambda bench: bench.run.announce(3),
    "write": lambda bench: bench.run.write(1, 0, 0, 1, {"verdict": np.array([1.0], np.float32)}),
    "acknowledge": lambda bench: bench.run.acknowledge("policy", 0, Position(0, 0, 1), 1, True),
    "commit": lambda bench: bench.run.commit("policy", Position(1), 1),
    "resume": lambda bench: bench.run.resume("policy", Checkpoint(None), "again"),
}
READS: dict[str, Callable[[Bench], Any]] = {
    "policy_version": lambda bench: bench.run.policy_version(),
    "batch": lambda bench: bench.run.batch(0),
    "shard": lambda bench: bench.run.shard("policy", 0, None, 1),
    "status": lambda bench: bench.run.status(),
    "groups": lambda bench: list(bench.run.groups()),
    "open_row": lambda bench: bench.run.open_row(GroupKey(0, "open"), 0, 0),
    "export": lambda bench: list(bench.run.export(0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_when_the_log_has_it(name: str) -> None:
    bench = published()
    records, held = len(bench.log.records), HeldAppends(bench.log)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(CALLS[name], bench)
        assert held.entered.wait(PATIENCE_S)
        assert not call.done()
        held.go_on()
        call.result(PATIENCE_S)
    assert len(bench.log.records) == records + 1
    assert bench.replayed() == bench.state


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_append_fails_has_not_happened(name: str) -> None:
    bench = published()
    before, held = bench.replayed(), HeldAppends(bench.log)
    held.go_on(FULL)
    with pytest.raises(UnavailableError, match="the log is full; the run is being recovered from its store, so retry"):
        CALLS[name](bench)
    assert bench.run.is_lost
    assert bench.replayed() == before


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("error", [None, FULL])
def test_a_read_that_saw_what_is_not_logged_is_answered_when_it_is(name: str, error: Exception | None) -> None:
    bench = published()
    with ThreadPoolExecutor(1) as pool, while_appending(bench) as held:
        reading = pool.submit(READS[name], bench)
        wait_until(lambda: waiting(bench) == 2)
        assert not reading.done()
        held.go_on(error)
        if error is None:
            reading.result(PATIENCE_S)
        else:
            assert isinstance(reading.exception(PATIENCE_S), UnavailableError)


@pytest.mark.parametrize("error", [None, FULL])
def test_a_refusal_for_what_is_not_logged_is_given_when_it_is(error: Exception | None) -> None:
    bench = published()
    with ThreadPoolExecutor(2) as pool, while_appending(bench) as held:
        first = pool.submit(bench.run.submit, table(row("new")))
        wait_until(lambda: waiting(bench) == 2)
        other = pool.submit(bench.run.submit, table(row("new", reward=9.0)))
        wait_until(lambda: waiting(bench) == 3)
        held.go_on(error)
        with pytest.raises(AlreadyExistsError if error is None else UnavailableError):
            other.result(PATIENCE_S)
        assert first.exception(PATIENCE_S) is None or error is not None


def test_reads_and_refusals_of_what_is_safe_do_not_wait() -> None:
    bench = published()
    records = len(bench.log.records)
    for read in READS.values():
        read(bench)
    with pytest.raises(GristmillError, match="sample 99 is outside of"):
        bench.submit(row("open", 99))
    assert len(bench.log.records) == records


class TestNothingIsRemovedOrBuiltBeforeItsEventIsSafe:
    @pytest.mark.parametrize("is_remote", [False, True])
    @pytest.mark.parametrize("error", [None, FULL])
    def test_rows_that_others_took_the_place_of(self, is_remote: bool, error: Exception | None) -> None:
        log = RecordingLog()
        log.is_remote = is_remote
        bench = Bench(log=log)
        bench.submit(row("a", attempt=0))
        with ThreadPoolExecutor(1) as pool, while_appending(bench) as held:
            again = pool.submit(bench.run.submit, table(row("a", attempt=1)))
            wait_until(lambda: waiting(bench) >= 3)
            assert set(log.tables) == {0}
            held.go_on(error)
            again.exception(PATIENCE_S)
        on_loop(bench.run._background.idle)
        assert set(log.tables) == ({0} if error else {1})

    @pytest.mark.parametrize("error", [None, FULL])
    def test_rows_and_shards_of_a_batch_that_was_trained_on(self, error: Exception | None) -> None:
        bench = published()
        tables = set(bench.log.tables)
        with ThreadPoolExecutor(1) as pool, while_appending(bench) as held:
            committed = pool.submit(bench.run.commit, "policy", Position(1), 1)
            wait_until(lambda: waiting(bench) >= 4)
            assert bench.run._writer.state.freed == 1
            assert ("run", 0) in bench.store.batches
            assert set(bench.log.tables) == tables
            held.go_on(error)
            committed.exception(PATIENCE_S)
        on_loop(bench.run._background.idle)
        assert (("run", 0) in bench.store.batches) == (error is not None)
        assert (set(bench.log.tables) == tables) == (error is not None)

    @pytest.mark.parametrize("error", [None, FULL])
    def test_shards_of_a_batch_that_is_cut_again(self, error: Exception | None) -> None:
        bench = Bench(train_batch_size=1)
        bench.submit(*group_rows("a"))
        bench.make_batches()
        with ThreadPoolExecutor(1) as pool, while_appending(bench) as held:
            resumed = pool.submit(bench.run.resume, "policy", Checkpoint(None), "launch", 2)
            wait_until(lambda: waiting(bench) >= 3)
            assert bench.run._writer.state.batches_to_build
            assert ("run", 0) in bench.store.batches
            held.go_on(error)
            resumed.exception(PATIENCE_S)
        assert (("run", 0) in bench.store.batches) == (error is not None)

    @pytest.mark.parametrize("error", [None, FULL])
    def test_forward_shards_of_a_batch_whose_columns_were_written(self, error: Exception | None) -> None:
        bench = published()
        bench.write(1, 0, 0, {"verdict": 1.0})
        held = HeldAppends(bench.log)
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(bench.write, 1, 1, 0, {"verdict": 1.0})
            assert held.entered.wait(PATIENCE_S)
            wait_until(lambda: waiting(bench) >= 2)
            assert ("run", 1) in bench.store.batches
            held.go_on(error)
            written.exception(PATIENCE_S)
        assert (("run", 1) in bench.store.batches) == (error is not None)

    @pytest.mark.parametrize("error", [None, FULL])
    def test_batches_that_were_sealed(self, error: Exception | None) -> None:
        bench = Bench(train_batch_size=1)
        with ThreadPoolExecutor(1) as pool, while_appending(bench) as held:
            sealing = pool.submit(bench.run.submit, table(*group_rows("a")))
            wait_until(lambda: waiting(bench) >= 3)
            assert bench.run._writer.state.batches_to_build
            assert bench.builders.waiting == []
            held.go_on(error)
            sealing.exception(PATIENCE_S)
        assert len(bench.builders.waiting) == (0 if error else 1)

    def test_a_batch_that_was_sealed_just_when_another_record_became_safe(self) -> None:
        bench = Bench(train_batch_size=2)
        bench.submit(*group_rows("a"), *group_rows("b"))
        bench.submit(*group_rows("c"))
        held, writer = HeldAppends(bench.log), bench.run._writer
        end, sealed = writer.commits._end, list[Sealed]()

        def end_and_seal(number: int, error: BaseException | None, compaction: Compaction | None) -> None:
            end(number, error, compaction)
            # Before what waited for this record goes on.
            if not sealed:
                held.hold()
                sealed.append(writer.execute(lambda view: sealing.seal_batch(view.state, view.config, None)))

        writer.commits._end = end_and_seal
        bench.builders.build()
        assert held.entered.wait(PATIENCE_S)
        held.go_on()
        wait_until(lambda: bool(sealed) and held.entered.is_set())
        on_loop(asyncio.sleep, 0.02)
        assert ([*bench.run._writer.state.batches_to_build], bench.builders.waiting) == ([1], [])
        held.go_on()
        wait_until(lambda: len(bench.builders.waiting) == 1)
