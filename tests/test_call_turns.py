"""Whose call is answered next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from gristmill_service.call_turns import CallTurns


def nothing() -> None:
    """A call."""


def answered(costs: Mapping[str, float], seconds: float) -> tuple[list[str], Counter[str]]:
    """Of callers who always have calls, each of this cost: whose calls are answered in this time, in order, and how
    much of it each got."""
    turns, order, got = CallTurns[Callable[[], object]](), list[str](), Counter[str]()
    for caller in costs:
        turns.put(caller, nothing)
        turns.put(caller, nothing)
    while got.total() < seconds:
        caller, _ = turns.take()
        order.append(caller)
        got[caller] += costs[caller]  # type: ignore[assignment]  # a Counter of seconds
        turns.charge(caller, costs[caller])
        turns.put(caller, nothing)
    return order, got


def test_who_sends_costly_calls_gets_fewer_of_them_answered_than_others_of_cheap_ones() -> None:
    order, got = answered({"flood": 0.02, "victim": 0.001}, 1.0)
    assert Counter(order)["victim"] > 15 * Counter(order)["flood"]
    assert 0.45 < got["victim"] / got.total() < 0.55


@given(st.lists(st.floats(0.002, 0.04), min_size=2, max_size=6))
def test_whatever_calls_cost_callers_get_the_same_time(costs: list[float]) -> None:
    named = {f"caller {number}": cost for number, cost in enumerate(costs)}
    _, got = answered(named, 50 * max(costs))
    assert max(got.values()) - min(got[caller] for caller in named) <= 2 * max(costs) + 1e-9


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2)), max_size=60))
def test_nothing_is_lost_and_a_callers_calls_keep_their_order(calls: list[tuple[str, float]]) -> None:
    turns, taken = CallTurns[Callable[[], object]](), list[tuple[str, int]]()
    for number, (caller, cost) in enumerate(calls):
        turns.put(caller, lambda caller=caller, number=number: taken.append((caller, number)))  # type: ignore[misc]
        if number % 3 == 0:
            found, task = turns.take()
            task()
            turns.charge(found, cost)
    while turns:
        turns.take()[1]()
    assert sorted(number for _, number in taken) == list(range(len(calls)))
    for caller in "abc":
        mine = [number for found, number in taken if found == caller]
        assert mine == sorted(mine)


def test_who_comes_after_a_pause_is_not_owed_for_it() -> None:
    turns = CallTurns[Callable[[], object]]()
    for _ in range(1000):
        turns.put("busy", nothing)
        turns.charge(turns.take()[0], 0.01)
    order = []
    for caller in ("busy", "new"):
        for _ in range(100):
            turns.put(caller, nothing)
    for _ in range(20):
        caller, _ = turns.take()
        order.append(caller)
        turns.charge(caller, 0.01)
    assert 9 <= order.count("new") <= 15


def test_a_long_call_puts_its_caller_behind_for_a_moment_only() -> None:
    turns, order = CallTurns[Callable[[], object]](), list[str]()
    turns.put("stream", nothing)
    turns.charge(turns.take()[0], 3600.0)
    for _ in range(100):
        turns.put("stream", nothing)
        turns.put("other", nothing)
    for _ in range(100):
        caller, _ = turns.take()
        order.append(caller)
        turns.charge(caller, 0.001)
    assert 20 <= order.count("stream") <= 30, "0.05 s of the others' calls, and then every other one"


def test_callers_without_number_are_forgotten() -> None:
    turns = CallTurns[Callable[[], object]]()
    for number in range(20_000):
        turns.put(str(number), nothing)
        turns.charge(turns.take()[0], 1e-6)
    assert len(turns._had) < 5000
