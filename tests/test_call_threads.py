"""The threads that calls are answered in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from gristmill_service import call_threads
from gristmill_service.call_threads import CallThreads, waiting

LONG_S = 30.0


@contextmanager
def pool(at_work: int, threads: int = 64) -> Iterator[CallThreads]:
    """Calls are `submit(call, ..., caller)`."""
    opened = CallThreads(at_work, threads, lambda call, *arguments: arguments[-1])
    try:
        yield opened
    finally:
        opened.shutdown()


class Calls:
    """Calls that note that they began, and go on when they are let."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.let = threading.Event()

    def __call__(self, caller: str = "") -> str:
        self.begun.append(caller)
        assert self.let.wait(LONG_S)
        return caller


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


def work(cpu_s: float, order: list[str], caller: str) -> None:
    """A call that takes so much of a core's time, and notes when it has."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass
    order.append(caller)


def test_every_call_is_answered_once_however_few_threads_there_are() -> None:
    answered: list[int] = []
    with pool(at_work=2, threads=2) as threads:
        for number in range(500):
            threads.submit(lambda _, number=number: answered.append(number), "")
    assert sorted(answered) == list(range(500))


def test_a_call_that_raises_gives_its_error_and_the_thread_goes_on() -> None:
    with pool(at_work=1, threads=1) as threads:
        failed = threads.submit(lambda _: 1 // 0, "")
        assert isinstance(failed.exception(LONG_S), ZeroDivisionError)
        assert threads.submit(lambda _: 7, "").result(LONG_S) == 7


def test_a_call_that_says_that_it_waits_lets_the_next_one_work() -> None:
    woken = threading.Event()

    def wait(_: str) -> bool:
        with waiting():
            return woken.wait(LONG_S)

    with pool(at_work=1) as threads:
        waits = [threads.submit(wait, "") for _ in range(20)]
        assert threads.submit(lambda _: "worked", "").result(LONG_S) == "worked"
        woken.set()
        assert all(one.result(LONG_S) for one in waits)


def test_a_thread_outside_of_pools_may_say_that_it_waits() -> None:
    with waiting():
        assert threading.current_thread() is threading.main_thread()


def test_calls_that_wait_without_a_word_do_not_keep_others_from_work() -> None:
    stuck = Calls()
    with pool(at_work=2) as threads:
        found: list[Future[Any]] = [threads.submit(stuck, "") for _ in range(10)]
        assert threads.submit(lambda _: "worked", "").result(LONG_S) == "worked"
        until(lambda: len(stuck.begun) == 10)
        stuck.let.set()
        assert [one.result(LONG_S) for one in found] == [""] * 10


def test_no_more_threads_are_started_than_there_may_be() -> None:
    stuck = Calls()
    with pool(at_work=1, threads=3) as threads:
        found = [threads.submit(stuck, "") for _ in range(5)]
        until(lambda: len(stuck.begun) == 3)
        time.sleep(0.2)
        assert len(stuck.begun) == 3
        stuck.let.set()
        assert [one.result(LONG_S) for one in found] == [""] * 5


def test_callers_take_turns() -> None:
    first, order = Calls(), list[str]()
    with pool(at_work=1, threads=1) as threads:
        threads.submit(first, "crowd")
        # So long that what a call costs beside its work makes no difference.
        found = [threads.submit(work, 0.003, order, caller) for caller in ["crowd"] * 50 + ["single"] * 2]
        first.let.set()
        for one in found:
            one.result(LONG_S)
    assert order.index("single") < 3
    assert order[:4].count("single") == 2


def test_a_pool_that_is_shut_down_answers_what_it_took_and_takes_no_more() -> None:
    slow = Calls()
    with pool(at_work=1, threads=1) as threads:
        found = [threads.submit(slow, "") for _ in range(3)]
        closing = threading.Thread(target=threads.shutdown)
        closing.start()
        until(lambda: _is_refused(threads))
        slow.let.set()
        closing.join(LONG_S)
        assert [one.result(0) for one in found] == [""] * 3


def _is_refused(threads: CallThreads) -> bool:
    try:
        threads.submit(lambda _: None, "")
    except RuntimeError:
        return True
    return False


def test_a_pool_that_was_never_used_is_shut_down() -> None:
    threads = CallThreads(1, 1, lambda *_: "")
    threads.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(lambda _: None, "")


def test_threads_time_is_shared_and_not_the_number_of_calls() -> None:
    first, order = Calls(), list[str]()
    with pool(at_work=1, threads=1) as threads:
        threads.submit(first, "flood")
        found = [threads.submit(work, 0.02, order, "flood") for _ in range(10)]
        found += [threads.submit(work, 0.001, order, "victim") for _ in range(50)]
        first.let.set()
        for one in found:
            one.result(LONG_S)
    # As many calls of each in turn would be 10 of the flood among the first 20.
    assert order[:20].count("flood") <= 3
    assert order[:50].count("victim") >= 45


@contextmanager
def turn(threads: CallThreads, caller: str, queued: list[str] | None = None) -> Iterator[None]:
    """A call that is answered in this thread, which is none of the pool's. queued: has its caller once it waits."""
    begun = threading.Event()
    found = threads.queue(caller, begun.set)
    if queued is not None:
        queued.append(caller)
    assert begun.wait(LONG_S)
    try:
        with found.at_work():
            yield
    finally:
        found.end()


def test_calls_that_are_answered_elsewhere_take_turns_with_those_of_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However late the one that has its turn is ended here, nobody works beside it.
    monkeypatch.setattr(call_threads, "_STUCK_S", 5.0)
    first, order = Calls(), list[str]()
    with pool(at_work=1, threads=1) as threads:
        threads.submit(first, "crowd")
        found = [threads.submit(order.append, "crowd") for _ in range(50)]
        begun = [threads.queue("single", lambda: order.append("single")) for _ in range(2)]
        assert order == []
        first.let.set()
        until(lambda: "single" in order)
        for one in begun:
            one.end()
        for answered in found:
            answered.result(LONG_S)
    assert order.index("single") < 3
    assert order.count("single") == 1, "one was given up before its turn came"


def test_a_call_elsewhere_lets_others_work_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "_STUCK_S", 10.0)
    with pool(at_work=1) as threads, turn(threads, "a"):
        after = threads.submit(lambda _: "worked", "")
        with pytest.raises(TimeoutError):
            after.result(0.1)
        with waiting():
            assert after.result(LONG_S) == "worked"


def test_a_call_elsewhere_that_says_nothing_does_not_keep_others_from_work() -> None:
    with pool(at_work=1) as threads, turn(threads, "a"):
        assert threads.submit(lambda _: "worked", "").result(LONG_S) == "worked"


def test_calls_elsewhere_share_the_time_too() -> None:
    first, order, queued = Calls(), list[str](), list[str]()

    def work(seconds: float, caller: str) -> None:
        with turn(threads, caller, queued):
            order.append(caller)
            time.sleep(seconds)

    with pool(at_work=1, threads=1) as threads, ThreadPoolExecutor(60) as elsewhere:
        threads.submit(first, "crowd")
        # So long that what it takes until a thread knows of its turn makes no difference.
        calls = [elsewhere.submit(work, 0.2, "flood") for _ in range(10)]
        calls += [elsewhere.submit(work, 0.0, "victim") for _ in range(50)]
        until(lambda: len(queued) == 60)
        first.let.set()
        for one in calls:
            one.result(LONG_S)
    assert order[:20].count("flood") <= 5


def test_a_pool_that_is_shut_down_keeps_no_call_elsewhere_waiting() -> None:
    slow = Calls()
    with pool(at_work=1, threads=1) as threads:
        stuck = threads.submit(slow, "")
        queued = threading.Event()
        before = threads.queue("a", queued.set)
        closing = threading.Thread(target=threads.shutdown)
        closing.start()
        until(lambda: _is_refused(threads))
        with turn(threads, "late"):
            slow.let.set()
        assert queued.wait(LONG_S)
        before.end()
        before.end()
        closing.join(LONG_S)
        assert stuck.result(0) == ""
