from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.api.long_poll import LONGEST_WAIT_S, LongPoll, Question, checked_wait
from gristmill_service.run.machine.queries.conditions import Condition, Topic
from tests.run.harness import wait_until


class Counter:
    """Something that changes: a number that callers wait to reach."""

    def __init__(self) -> None:
        self.value = 0
        self.wakes: dict[Callable[[], None], int] = {}
        self.waited = threading.Semaphore(0)

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        assert isinstance(condition.key, int)
        if self.value >= condition.key:
            wake()
            return
        self.wakes[wake] = condition.key
        self.waited.release()

    def stop_waiting(self, condition: Condition, wake: Callable[[], None]) -> None:
        self.wakes.pop(wake, None)

    def set(self, value: int) -> None:
        self.value = value
        for wake in [wake for wake, key in self.wakes.items() if value >= key]:
            del self.wakes[wake]
            wake()

    def reaches(self, value: int) -> Question[int]:
        condition = Condition(Topic.VERSION, value, lambda state: False)
        return Question(self, lambda: condition, lambda: self.value, lambda found: found >= value)


class Caller:
    """One that may hang up."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.active = True

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self.active

    def hang_up(self) -> None:
        self.active = False
        for callback in self.callbacks:
            callback()


Answers = list[int | Exception]


@contextmanager
def asking(long_poll: LongPoll, counter: Counter, value: int, caller: Caller, kind: str) -> Iterator[Answers]:
    """Asks in a thread of its own; the body runs when the question waits, and the answer is there after it."""
    answers: Answers = []

    async def gone() -> None:
        left = asyncio.Event()
        loop = asyncio.get_running_loop()

        def leave() -> None:
            loop.call_soon_threadsafe(left.set)

        caller.add_callback(leave)
        await left.wait()

    def ask() -> None:
        try:
            if kind == "threads":
                answers.append(long_poll.ask(counter.reaches(value), 20, caller))
            else:
                answers.append(asyncio.run(long_poll.ask_async(counter.reaches(value), 20, gone())))
        except UnavailableError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert counter.waited.acquire(timeout=15)
    yield answers
    thread.join(15)
    assert not thread.is_alive()
    assert not counter.wakes
    assert long_poll.count == 0


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_a_question_that_is_settled_does_not_wait() -> None:
    counter = Counter()
    assert LongPoll(1).ask(counter.reaches(0), 20, Caller()) == 0


def test_a_question_without_a_wait_is_answered_as_it_stands() -> None:
    assert LongPoll(1).ask(Counter().reaches(1), 0, Caller()) == 0


def test_a_change_wakes_who_waits_for_it(kind: str) -> None:
    counter = Counter()
    with asking(LongPoll(1), counter, 2, Caller(), kind) as answers:
        counter.set(1)
        counter.set(2)
    assert answers == [2]


def test_a_wait_ends_in_time() -> None:
    start = time.monotonic()
    assert LongPoll(1).ask(Counter().reaches(1), 0.05, Caller()) == 0
    assert 0.05 <= time.monotonic() - start < 5


def test_beyond_the_limit_a_question_is_answered_as_it_stands(kind: str) -> None:
    waiting, counter = LongPoll(1), Counter()
    with asking(waiting, counter, 1, Caller(), kind):
        assert waiting.count == 1
        assert waiting.ask(Counter().reaches(1), 20, Caller()) == 0
        counter.set(1)


def test_a_caller_that_hangs_up_waits_no_longer(kind: str) -> None:
    counter, caller = Counter(), Caller()
    with asking(LongPoll(1), counter, 1, caller, kind) as answers:
        wait_until(lambda: bool(caller.callbacks))
        caller.hang_up()
    assert answers == [0]


def test_shutting_down_ends_the_wait(kind: str) -> None:
    waiting, counter = LongPoll(1), Counter()
    with asking(waiting, counter, 1, Caller(), kind) as answers:
        waiting.close()
    assert isinstance(answers[0], UnavailableError)


def test_what_is_settled_is_answered_even_while_shutting_down() -> None:
    waiting, counter = LongPoll(1), Counter()
    counter.value = 1
    waiting.close()
    assert waiting.ask(counter.reaches(1), 20, Caller()) == 1


@pytest.mark.parametrize("wait_s", [-1.0, math.nan])
def test_a_wait_that_is_no_time_is_refused(wait_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match=f"wait_s is {wait_s}"):
        checked_wait(wait_s)


def test_waits_are_capped() -> None:
    assert checked_wait(math.inf) == LONGEST_WAIT_S


def test_a_caller_that_was_woken_for_nothing_goes_on_waiting(kind: str) -> None:
    """Another was faster: the room that it was woken for is taken again."""

    class Taken(Counter):
        def set(self, value: int) -> None:
            woken, self.wakes = self.wakes, {}
            for wake in woken:
                wake()

    counter = Taken()
    with asking(LongPoll(1), counter, 1, Caller(), kind) as answers:
        counter.set(1)
        assert counter.waited.acquire(timeout=10), "it waits again"
        Counter.set(counter, 1)
    assert answers == [1]


def test_who_has_hung_up_is_not_read_for_again(kind: str) -> None:
    """What a reading admits, nobody would hear of."""
    counter, caller = Counter(), Caller()
    with asking(LongPoll(1), counter, 1, caller, kind) as answers:
        wait_until(lambda: bool(caller.callbacks))
        counter.value = 1
        caller.hang_up()
    assert answers == [0]
