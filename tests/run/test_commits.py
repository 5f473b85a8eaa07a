"""Appends to a run's log: one at a time, snapshots of what the log has, and callers that go away."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from gristmill.errors import UnavailableError
from gristmill_service.off_loop import each
from gristmill_service.run.commits import Commits
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.codec import encode_event
from gristmill_service.run.machine.events import PolicyVersionAnnounced
from gristmill_service.run.rows.declared_prefixes import prepare
from gristmill_service.storage.run_store import LogEnd, LogLostError
from tests.on_loop import loop, on_loop
from tests.run.harness import Bench, group_rows, row, table, wait_until
from tests.run.logs import PATIENCE_S, HeldAppends, RecordingLog

EVENT = encode_event(PolicyVersionAnnounced(1))


class CompactingLog(RecordingLog):
    """One that is compacted whenever that is asked for. errors: of the next compactions. compacting: set when one
    begins, which then waits for `may_compact`."""

    is_long = True

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        self.compacting, self.may_compact, self.snapshots = threading.Event(), threading.Event(), 0
        self.may_compact.set()

    def compact(self, end: LogEnd, snapshot: Iterable[bytes]) -> None:
        self.compacting.set()
        assert self.may_compact.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.pop(0)
        super().compact(end, snapshot)
        self.snapshots += 1


def start(call: Callable[..., Any], *args: Any) -> Any:
    """Starts a call of a run on the loop. Returns its future, which can be cancelled."""
    return asyncio.run_coroutine_threadsafe(call(*args), loop())


class TestCompaction:
    def test_a_snapshot_and_the_records_after_it_are_the_state(self) -> None:
        log = CompactingLog()
        bench = Bench(log=log, train_batch_size=1)
        for number, uid in enumerate("abc"):
            bench.submit(*group_rows(uid))
            bench.make_batches()
            bench.run.acknowledge("policy", 0, Position(number), 0, commit=True)
            bench.now += 6
        assert log.snapshots == 2, "not with each record"
        assert bench.replayed() == bench.state
        bench.reopen()
        assert bench.state == bench.replayed()
        assert bench.submit(row("d")) == ["ACCEPTED"]

    def test_it_waits_for_the_append_that_is_under_way_and_has_all_that_came_meanwhile(self) -> None:
        log = CompactingLog()
        log.is_long = False
        bench = Bench(log=log)
        held = HeldAppends(log)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(bench.run.submit, table(row("a")))]
            assert held.entered.wait(PATIENCE_S)
            log.is_long = True
            calls += [pool.submit(bench.run.submit, table(row(uid))) for uid in "bc"]
            wait_until(lambda: len(bench.run._writer.commits._waiting) == 3)
            assert not log.compacting.is_set()
            held.go_on()
            for call in calls:
                call.result(PATIENCE_S)
        assert (log.snapshots, log.records) == (1, [])
        assert bench.replayed() == bench.state

    def test_appends_go_on_meanwhile(self) -> None:
        log = CompactingLog()
        log.may_compact.clear()
        log.is_long = False
        bench = Bench(log=log)
        log.is_long = True
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(bench.run.submit, table(row("a")))
            assert log.compacting.wait(PATIENCE_S)
            other = pool.submit(bench.run.submit, table(row("b")))
            wait_until(lambda: len(log.records) == 2 and not bench.run._writer.commits._waiting)
            assert log.snapshots == 0
            log.may_compact.set()
            first.result(PATIENCE_S)
            other.result(PATIENCE_S)
        assert (log.snapshots, len(log.records)) == (1, 1)
        assert bench.replayed() == bench.state

    def test_one_that_cannot_be_written_leaves_the_log_as_it_is_and_the_run_goes_on(self) -> None:
        log = CompactingLog()
        log.errors = [UnavailableError("the disk is full")] * 2
        bench = Bench(log=log)
        assert bench.submit(row("a")) == ["ACCEPTED"]
        assert (log.snapshots, bench.run.is_lost) == (0, False)
        bench.now += 100
        assert bench.submit(row("b")) == ["ACCEPTED"]
        bench.now += 100
        assert bench.submit(row("c")) == ["ACCEPTED"]
        assert log.snapshots == 1
        assert bench.replayed() == bench.state

    def test_one_of_which_nobody_knows_whether_it_was_written_loses_the_run(self) -> None:
        log = CompactingLog()
        log.is_long = False
        bench = Bench(log=log)
        log.is_long, log.errors = True, [LogLostError("another process owns the run")]
        assert bench.submit(row("a")) == ["ACCEPTED"]
        assert bench.run.is_lost

    def test_it_is_encoded_beside_the_loop(self) -> None:
        log, threads = CompactingLog(), list[threading.Thread]()
        log.is_long = False
        bench = Bench(log=log)
        log.is_long = True

        def take() -> Iterator[bytes]:
            threads.append(threading.current_thread())
            return encode()

        def encode() -> Iterator[bytes]:
            threads.append(threading.current_thread())
            yield b""

        async def this_thread() -> threading.Thread:
            return threading.current_thread()

        bench.run._writer.compaction._snapshot = take
        bench.submit(row("a"))
        on_the_loop = on_loop(this_thread)
        assert threads[0] is on_the_loop
        assert threads[1] is not on_the_loop

    def test_a_state_that_is_half_applied_is_no_snapshot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = CompactingLog()
        log.is_long = False
        bench = Bench(log=log)
        before, held = bench.replayed(), HeldAppends(log)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(bench.run.submit, table(row("a")))
            assert held.entered.wait(PATIENCE_S)
            log.is_long = True
            bench.run._writer.commits.compact(bench.run._writer.compaction)
            monkeypatch.setattr("gristmill_service.run.machine.decisions.sealing.consequences", lambda *given: 1 / 0)
            defect = pool.submit(bench.run.announce, 1)
            wait_until(lambda: bool(bench.run.is_lost))
            held.go_on()
            first.result(PATIENCE_S)
            assert isinstance(defect.exception(PATIENCE_S), ZeroDivisionError)
        assert log.snapshots == 0
        assert bench.replayed().rows_accepted == before.rows_accepted + 1
        assert bench.replayed().policy_version == 0


class TestCallersThatGoAway:
    def test_one_whose_append_is_under_way_leaves_nothing_behind(self) -> None:
        bench = Bench()
        held, commits = HeldAppends(bench.log), bench.run._writer.commits
        gone, stays = (start(bench.run._target.submit, table(row(uid))) for uid in "ab")
        assert held.entered.wait(PATIENCE_S)
        wait_until(lambda: len(commits._waiting) == 2)
        gone.cancel()
        held.go_on()
        stays.result(PATIENCE_S)
        with pytest.raises(CancelledError):
            gone.result(PATIENCE_S)
        wait_until(lambda: not commits._waiting and commits._safe == commits._added)
        assert bench.replayed() == bench.state
        assert bench.submit(row("a"), row("b")) == ["DUPLICATE", "DUPLICATE"], "what was applied has happened"

    def test_one_whose_append_fails_is_nobodys_error(self, caplog: pytest.LogCaptureFixture) -> None:
        # Of the tests before, whose runs nobody closed.
        gc.collect()
        caplog.clear()
        bench = Bench()
        held = HeldAppends(bench.log)
        gone, stays = (start(bench.run._target.submit, table(row(uid))) for uid in "ab")
        wait_until(lambda: len(bench.run._writer.commits._waiting) == 2)
        gone.cancel()
        held.go_on(UnavailableError("the log is full"))
        with pytest.raises(UnavailableError):
            stays.result(PATIENCE_S)
        with pytest.raises(CancelledError):
            gone.result(PATIENCE_S)
        gc.collect()
        on_loop(asyncio.sleep, 0)
        assert caplog.records == [], "asyncio reports errors that nobody looked at"

    def test_one_whose_rows_are_being_prepared_has_sent_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        preparing, may_prepare = threading.Event(), threading.Event()

        def prepare_slowly(*given: Any) -> Any:
            preparing.set()
            assert may_prepare.wait(PATIENCE_S)
            return prepare(*given)

        monkeypatch.setattr("gristmill_service.run.run._LARGE_BYTES", 0)
        monkeypatch.setattr("gristmill_service.run.run.prepare", prepare_slowly)
        bench = Bench()
        gone = start(bench.run._target.submit, table(row("a")))
        assert preparing.wait(PATIENCE_S)
        gone.cancel()
        with pytest.raises(CancelledError):
            gone.result(PATIENCE_S)
        may_prepare.set()
        assert bench.submit(row("a")) == ["ACCEPTED"]

    def test_one_that_reads_a_shard_closes_what_it_read_from(self) -> None:
        reading, may_read, closed = threading.Event(), threading.Event(), threading.Event()

        def read() -> Iterator[bytes]:
            try:
                reading.set()
                assert may_read.wait(PATIENCE_S)
                yield b"piece"
            finally:
                closed.set()

        async def consume() -> None:
            async for _ in each(read()):
                pass

        gone = start(consume)
        assert reading.wait(PATIENCE_S)
        gone.cancel()
        may_read.set()
        assert closed.wait(PATIENCE_S)
        with pytest.raises(CancelledError):
            gone.result(PATIENCE_S)


class TestDefects:
    """Nobody waits for ever."""

    @pytest.mark.parametrize("is_encoding", [False, True])
    def test_a_snapshot_that_cannot_be_made_leaves_the_log_long(self, is_encoding: bool) -> None:
        log = CompactingLog()
        log.is_long = False
        bench = Bench(log=log)
        log.is_long = True

        def fail() -> Iterator[bytes]:
            raise ZeroDivisionError

        def fail_later() -> Iterator[bytes]:
            yield b""
            raise ZeroDivisionError

        bench.run._writer.compaction._snapshot = fail_later if is_encoding else fail
        assert bench.submit(row("a")) == ["ACCEPTED"]
        assert bench.run._writer.compaction.failed == "ZeroDivisionError()"
        assert bench.submit(row("b")) == ["ACCEPTED"]
        assert not bench.run.is_lost
        assert (bench.log.snapshots, bench.replayed()) == (0, bench.state)

    def test_threads_that_are_gone_lose_the_run(self) -> None:
        lost, threads = list[bool](), ThreadPoolExecutor(1)
        threads.shutdown()

        async def append() -> None:
            commits = Commits(RecordingLog(), threads, lambda: lost.append(True))
            commits.add([EVENT], {})
            await commits.safe()

        with pytest.raises(UnavailableError):
            on_loop(append)
        assert lost == [True]
