"""Places that callers share: bounded, and no caller's are used up by another."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from gristmill.errors import ResourceExhaustedError
from gristmill_service.api.places import Place, Places
from tests.run.harness import wait_until

PATIENCE_S = 60.0


class Shared:
    """Three places under a clock of the test's, and the callers whose places were ended."""

    def __init__(self, **more: Any) -> None:
        self.now = 0.0
        self.ended: list[str] = []
        self.places = Places(3, "all are taken; retry", PATIENCE_S, clock=lambda: self.now, **more)
        self.held = ExitStack()

    def take(self, caller: str, wait_s: float = 0.0) -> Place:
        self.now += 1
        return self.held.enter_context(self.places.place(caller, lambda: self.ended.append(caller), wait_s))


def test_one_more_than_there_are_is_refused_until_one_is_given_back() -> None:
    shared = Shared()
    for _ in range(2):
        shared.take("a")
    with shared.places.place("a", lambda: None), pytest.raises(ResourceExhaustedError, match="all are taken"):
        shared.take("a")
    shared.take("a")
    assert not shared.ended


def test_one_that_is_idle_for_too_long_is_ended_for_whoever_needs_a_place() -> None:
    shared = Shared()
    for caller in "abc":
        shared.take(caller).idle_since = None if caller == "a" else shared.now
    shared.now = PATIENCE_S - 1
    with pytest.raises(ResourceExhaustedError):
        shared.take("d")
    shared.take("d")
    assert shared.ended == ["b"], "longer idle than c's; a's is at work"


def test_a_caller_who_has_fewer_takes_an_idle_place_of_the_one_who_has_the_most() -> None:
    shared = Shared(takes_back=True)
    for _ in range(3):
        shared.take("greedy")
    shared.take("modest")
    assert shared.ended == ["greedy"]
    with pytest.raises(ResourceExhaustedError):
        shared.take("modest")
    shared.take("third")
    assert shared.ended == ["greedy", "greedy"], "of three callers each has one"


def test_of_those_who_wait_the_caller_who_has_the_fewest_comes_first() -> None:
    shared = Shared()
    for _ in range(2):
        shared.take("greedy")
    order: list[str] = []

    def wait(caller: str) -> None:
        with shared.places.place(caller, lambda: None, wait_s=20):
            order.append(caller)

    with ExitStack() as last:
        last.enter_context(shared.places.place("greedy", lambda: None))
        threads = [threading.Thread(target=wait, args=[caller]) for caller in ("greedy", "modest")]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(shared.places._waiting) == 2)
    for thread in threads:
        thread.join(20)
    assert order == ["modest", "greedy"]


def test_callers_who_have_as_many_take_turns() -> None:
    places, order = Places(1, "taken", PATIENCE_S), list[str]()

    def wait(caller: str) -> None:
        with places.place(caller, lambda: None, wait_s=20):
            order.append(caller)

    with places.place("first", lambda: None):
        threads = [threading.Thread(target=wait, args=[caller]) for caller in ("greedy", "greedy", "greedy", "modest")]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: sum(map(len, places._waiting.values())) == number + 1)  # type: ignore[misc]
    for thread in threads:
        thread.join(20)
    assert order == ["greedy", "modest", "greedy", "greedy"]


def test_one_caller_never_has_them_all_where_others_are_to_find_some() -> None:
    shared = Shared(share=0.7)
    for _ in range(2):
        shared.take("greedy")
    with pytest.raises(ResourceExhaustedError):
        shared.take("greedy")
    shared.take("modest")


def test_who_waits_in_vain_is_refused_and_waits_no_more() -> None:
    shared = Shared()
    for _ in range(3):
        shared.take("a")
    with pytest.raises(ResourceExhaustedError, match="all are taken"):
        shared.take("b", wait_s=0.01)
    shared.held.close()
    assert [shared.take("c") for _ in range(3)], "nobody stands before them"
