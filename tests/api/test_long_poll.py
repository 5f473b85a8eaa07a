"""Calls that wait for a run to change."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.api.admission import Admission, Limits, Slot
from gristmill_service.api.long_poll import LONGEST_WAIT_S, LongPoll, Question, checked_wait
from gristmill_service.run.waiters import Condition, Topic


class Counter:
    """Something that changes: a number that callers wait to reach."""

    def __init__(self) -> None:
        self.value = self.reads = 0
        self.wakes: dict[Callable[[], None], int] = {}

    def wait(self, condition: Condition, wake: Callable[[], None]) -> None:
        assert isinstance(condition.key, int)
        if self.value >= condition.key:
            wake()
        else:
            self.wakes[wake] = condition.key

    def stop_waiting(self, condition: Condition, wake: Callable[[], None]) -> None:
        self.wakes.pop(wake, None)

    def set(self, value: int) -> None:
        self.value = value
        for wake in [wake for wake, key in self.wakes.items() if value >= key]:
            del self.wakes[wake]
            wake()

    async def read(self) -> int:
        self.reads += 1
        return self.value

    def reaches(self, value: int) -> Question[int]:
        condition = Condition(Topic.VERSION, value, lambda state: False)
        return Question(self, lambda: condition, self.read, lambda current: current >= value)


async def slot(waits: int = 1) -> Slot:
    return await Admission(Limits(waits=waits)).enter("someone", "call")


@asynccontextmanager
async def asking(long_poll: LongPoll, counter: Counter, value: int) -> AsyncIterator[asyncio.Task[int]]:
    """The body runs when the question waits."""
    task = asyncio.ensure_future(long_poll.ask(counter.reaches(value), 20, await slot()))
    while not counter.wakes:
        await asyncio.sleep(0)
    yield task
    async with asyncio.timeout(15):
        with suppress(asyncio.CancelledError, UnavailableError):
            await task
    assert not counter.wakes
    assert long_poll.count == 0


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await test()

    asyncio.run(all_of_it())


def ask(counter: Counter, value: int, wait_s: float, long_poll: LongPoll | None = None) -> int:
    async def ask() -> int:
        return await (long_poll or LongPoll()).ask(counter.reaches(value), wait_s, await slot())

    return asyncio.run(ask())


def test_a_question_that_is_settled_does_not_wait() -> None:
    assert ask(Counter(), 0, 20) == 0


def test_a_question_without_a_wait_is_answered_as_it_is() -> None:
    assert ask(Counter(), 1, 0) == 0


def test_a_wait_ends_in_time() -> None:
    start = time.monotonic()
    assert ask(Counter(), 1, 0.05) == 0
    assert 0.05 <= time.monotonic() - start < 5


def test_a_change_wakes_the_caller_that_waits_for_it() -> None:
    async def test() -> None:
        counter = Counter()
        async with asking(LongPoll(), counter, 2) as answer:
            counter.set(1)
            counter.set(2)
        assert answer.result() == 2

    run(test)


def test_beyond_the_limit_a_question_is_answered_as_it_is() -> None:
    async def test() -> None:
        admission, long_poll, counter = Admission(Limits(waits=1)), LongPoll(), Counter()
        first = asyncio.ensure_future(long_poll.ask(counter.reaches(1), 20, await admission.enter("a", "call")))
        while not counter.wakes:
            await asyncio.sleep(0)
        assert await long_poll.ask(Counter().reaches(1), 20, await admission.enter("a", "call")) == 0
        counter.set(1)
        assert await first == 1
        other = asyncio.ensure_future(long_poll.ask(counter.reaches(2), 20, await admission.enter("a", "call")))
        while not counter.wakes:
            await asyncio.sleep(0)
        counter.set(2)
        assert await other == 2

    run(test)


def test_a_caller_that_hangs_up_is_not_read_for_again() -> None:
    """Nobody would hear what the reading admits."""

    async def test() -> None:
        counter = Counter()
        async with asking(LongPoll(), counter, 1) as answer:
            reads = counter.reads
            answer.cancel()
            counter.set(1)
        assert answer.cancelled()
        assert counter.reads == reads

    run(test)


def test_shutting_down_ends_the_wait() -> None:
    async def test() -> None:
        long_poll, counter = LongPoll(), Counter()
        async with asking(long_poll, counter, 1) as answer:
            long_poll.close()
        assert isinstance(answer.exception(), UnavailableError)

    run(test)


def test_what_is_settled_is_answered_even_while_shutting_down() -> None:
    counter, long_poll = Counter(), LongPoll()
    counter.value = 1
    long_poll.close()
    assert ask(counter, 1, 20, long_poll) == 1


def test_a_caller_that_was_woken_for_nothing_goes_on_waiting() -> None:
    """Another was faster: the room that it was woken for is taken again."""

    async def test() -> None:
        counter = Counter()
        async with asking(LongPoll(), counter, 1) as answer:
            woken, counter.wakes = counter.wakes, {}
            for wake in woken:
                wake()
            while not counter.wakes:
                await asyncio.sleep(0)
            counter.set(1)
        assert answer.result() == 1

    run(test)


@pytest.mark.parametrize("wait_s", [-1.0, math.nan])
def test_a_wait_that_is_no_time_is_refused(wait_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match=f"wait_s {wait_s} is not a duration"):
        checked_wait(wait_s)


def test_waits_are_capped() -> None:
    assert checked_wait(math.inf) == LONGEST_WAIT_S
