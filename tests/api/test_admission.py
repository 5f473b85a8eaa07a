"""Admission: what callers may occupy, and how those who are wrong too often are throttled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import get_args

import pytest

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.caller import Caller
from gristmill_service.api import admission as module
from gristmill_service.api.admission import REQUEST_S, SMALL_BYTES, Admission, Kind, Limits, Slot

LARGE = SMALL_BYTES + 1
SPENT_S = 0.3e-3
"""The processor time of a refused call."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(within_time())


async def settle() -> None:
    """Lets everything continue that can."""
    for _ in range(10):
        await asyncio.sleep(0)


# --- Slots


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait for a slot only for a moment."""
    monkeypatch.setattr(module, "_RETRY_S", 0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["call", "stream", "probe"])
def test_one_caller_leaves_a_quarter_to_others(kind: Kind) -> None:
    async def test() -> None:
        admission = Admission(Limits(calls=8, streams=8, probes=8))
        for _ in range(6):
            await admission.enter("greedy", kind)
        with pytest.raises(ResourceExhaustedError) as caught:
            await admission.enter("greedy", kind)
        assert caught.value.retry_after_s == 0.01
        for caller in ("modest", "another"):
            await admission.enter(caller, kind)
        with pytest.raises(ResourceExhaustedError):
            await admission.enter("third", kind)

    run(test)


def test_requests_of_a_caller_are_checked_row_by_row_one_at_a_time_and_another_caller_need_not_wait() -> None:
    async def test() -> None:
        admission, order = Admission(), list[str]()

        async def check(caller: str) -> None:
            slot = await admission.enter(caller, "call")
            async with slot.check_rows():
                order.append(f"{caller} begins")
                await settle()
                order.append(f"{caller} ends")

        await asyncio.gather(*(check(caller) for caller in ("greedy", "greedy", "greedy", "modest")))
        assert order[:2] == ["greedy begins", "modest begins"]
        assert [step for step in order if step.startswith("greedy")] == ["greedy begins", "greedy ends"] * 3
        assert not admission.row_checks.total

    run(test)


@pytest.mark.usefixtures("impatient")
def test_a_slot_that_is_closed_is_there_for_another_and_is_closed_once() -> None:
    async def test() -> None:
        admission = Admission(Limits(streams=1))
        first = await admission.enter("a", "stream")
        first.close()
        first.close()
        second = await admission.enter("b", "stream")
        with pytest.raises(ResourceExhaustedError, match="max_streams"):
            await admission.enter("c", "stream")
        first.close()
        second.close()
        assert not admission.slots

    run(test)


def test_a_call_that_finds_no_slot_waits_for_one() -> None:
    async def test() -> None:
        admission = Admission(Limits(streams=1))
        first = await admission.enter("a", "stream")
        waiting = [asyncio.ensure_future(admission.enter(caller, "stream")) for caller in "ab"]
        await settle()
        waiting[0].cancel()
        first.close()
        assert (await waiting[1]).caller == "b"

    run(test)


@pytest.mark.usefixtures("impatient")
def test_calls_that_find_no_slot_are_refused_one_after_another() -> None:
    async def test() -> None:
        admission = Admission(Limits(streams=1))
        held = await admission.enter("a", "stream")
        refused = list[float]()

        async def enter() -> None:
            with pytest.raises(ResourceExhaustedError):
                await admission.enter("a", "stream")
            refused.append(asyncio.get_running_loop().time())

        calls = [asyncio.ensure_future(enter()) for _ in range(120)]
        done, _ = await asyncio.wait(calls, timeout=0.3)
        assert 100 <= len(done) < 120, "100 at once, and 40 per second"
        held.close()
        for call in calls:
            call.cancel()

    run(test)


def test_kinds_are_counted_apart() -> None:
    async def test() -> None:
        admission = Admission(Limits(calls=1, streams=1, probes=1, strangers=1))
        assert len({await admission.enter("a", kind) for kind in get_args(Kind)}) == 4

    run(test)


def test_a_slot_moves_to_its_caller_when_that_is_known() -> None:
    async def test() -> None:
        admission = Admission(Limits(calls=4, strangers=4))
        slots = [await admission.enter("machine", "stranger") for _ in range(3)]
        await slots[0].move("worker", "call")
        await admission.enter("machine", "stranger")
        for slot in slots:
            slot.close()
        assert [(await admission.enter("worker", "call")).caller for _ in range(3)] == ["worker"] * 3

    run(test)


# --- Large requests


async def reading(admission: Admission, caller: str, ended: list[str] | None = None, *, is_large: bool = True) -> Slot:
    slot = await admission.enter(caller, "call")
    slot.end = lambda: (ended if ended is not None else []).append(caller)
    await slot.place(is_large=is_large)
    return slot


def test_a_request_of_a_call_that_is_never_large_does_not_wait_for_large_ones() -> None:
    async def test() -> None:
        admission = Admission(Limits(requests=1, small_requests=4))
        upload = await reading(admission, "a")
        acknowledgement = await reading(admission, "a", is_large=False)
        await acknowledgement.came(100)
        for _ in range(3):
            await reading(admission, "a", is_large=False)
        waiting = asyncio.ensure_future(reading(admission, "a", is_large=False))
        await settle()
        assert not waiting.done(), "they have bounds of their own"
        waiting.cancel()
        large = await reading(admission, "b", is_large=False)
        coming = asyncio.ensure_future(large.came(LARGE))
        await settle()
        assert not coming.done(), "its bytes occupy memory like those of any large request"
        upload.close()
        await coming
        assert (admission.requests.by_caller, admission.small_requests.by_caller) == ({"b": 1}, {"a": 3})
        large.close()
        assert admission.requests.by_caller == {}

    run(test)


def test_small_requests_give_their_places_back_and_large_ones_keep_them() -> None:
    async def test() -> None:
        admission = Admission(Limits(requests=1))
        small = await reading(admission, "a")
        await small.came(SMALL_BYTES)
        large = await reading(admission, "a")
        await large.came(LARGE)
        waiting = asyncio.ensure_future(reading(admission, "b"))
        await settle()
        assert not waiting.done()
        large.close()
        assert (await waiting).caller == "b"

    run(test)


def test_callers_with_fewer_places_come_first() -> None:
    async def test() -> None:
        admission = Admission(Limits(requests=4))
        held = [await reading(admission, "greedy") for _ in range(3)] + [await reading(admission, "modest")]
        for slot in held:
            await slot.came(LARGE)
        order: list[str] = []

        async def ask(caller: str) -> None:
            await reading(admission, caller)
            order.append(caller)

        tasks = [asyncio.ensure_future(ask(caller)) for caller in ("greedy", "greedy", "modest", "new")]
        await settle()
        assert order == []
        held[3].close()
        held[0].close()
        await settle()
        assert sorted(order) == ["modest", "new"]
        for slot in held[1:3]:
            slot.close()
        await asyncio.gather(*tasks)

    run(test)


def test_a_place_is_taken_back_from_the_caller_with_the_most_whose_bytes_do_not_come() -> None:
    async def test() -> None:
        clock, ended = Clock(), list[str]()
        admission = Admission(Limits(requests=4), clock)
        at_work = await reading(admission, "busy", ended)
        await at_work.came(LARGE)
        silent = [await reading(admission, "silent", ended) for _ in range(3)]
        waiting = asyncio.ensure_future(reading(admission, "new"))
        await settle()
        assert ended == ["silent"]
        silent[0].close()
        assert (await waiting).caller == "new"
        # Two of silent's are left, so that another of its calls takes none of one that has as many.
        more = asyncio.ensure_future(reading(admission, "silent"))
        await settle()
        assert ended == ["silent"]
        more.cancel()

    run(test)


def test_a_request_in_parts_takes_all_its_places_at_once_and_none_while_it_waits() -> None:
    async def test() -> None:
        admission = Admission(Limits(requests=4, message_bytes=100))
        uploads = [await reading(admission, caller) for caller in ("a", "c")]
        for upload in uploads:
            await upload.came(LARGE)
        parts = await reading(admission, "b")
        await parts.came(SMALL_BYTES)
        waiting = asyncio.ensure_future(parts.place_parts(201))
        await settle()
        assert not waiting.done()
        assert admission.requests.by_caller == {"a": 1, "c": 1}
        for upload in uploads:
            upload.close()
        await waiting
        assert admission.requests.by_caller == {"b": 3}
        await parts.came(201)
        parts.close()
        assert (admission.requests.by_caller, admission.requests.total) == ({}, 0)

    run(test)


def test_a_request_in_parts_has_time_for_each_of_its_messages() -> None:
    async def test() -> None:
        clock, ended = Clock(), list[str]()
        admission = Admission(Limits(requests=4, message_bytes=100), clock)
        slot = await reading(admission, "a", ended)
        await slot.came(SMALL_BYTES)
        await slot.place_parts(300)
        assert slot.due == clock.now + REQUEST_S
        slot.came_part(100)
        slot.came_part(50)
        assert slot.due == clock.now + 2.5 * REQUEST_S
        other = await reading(admission, "b")
        new = asyncio.ensure_future(reading(admission, "c"))
        await settle()
        assert ended == ["a"], "others need its places"
        slot.came_part(50)
        assert slot.due is None
        slot.close()
        assert (await new).caller == "c"
        other.close()

    run(test)


def test_where_no_place_comes_free_the_caller_is_asked_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.01)

    async def test() -> None:
        admission = Admission(Limits(requests=1))
        await (await reading(admission, "a")).came(LARGE)
        with pytest.raises(
            ResourceExhaustedError, match=r"1 large requests are being read or answered \(0 of this caller\)"
        ):
            await reading(admission, "b")

    run(test)


def test_a_caller_that_goes_while_it_waits_for_a_place_takes_none() -> None:
    async def test() -> None:
        admission = Admission(Limits(requests=1))
        holding = await reading(admission, "a")
        await holding.came(LARGE)
        gone, waiting = (asyncio.ensure_future(reading(admission, "b")) for _ in range(2))
        await settle()
        # The place is granted to it in the moment in which it goes.
        holding.close()
        gone.cancel()
        assert (await waiting).caller == "b"
        assert admission.requests.total == 1

    run(test)


# --- Waits


def test_waits_are_bounded_for_a_caller_and_in_all() -> None:
    async def test() -> None:
        admission = Admission(Limits(waits=2))
        slots = [await admission.enter(caller, "call") for caller in ("a", "a", "a", "b", "b", "c")]
        assert [slot.wait() for slot in slots] == [True, True, False, True, True, False]
        assert slots[0].wait(), "it waits already"
        slots[0].stop_waiting()
        assert slots[2].wait()
        slots[1].close()
        assert slots[5].wait()

    run(test)


# --- Answers


def test_answers_wait_until_those_before_were_sent() -> None:
    async def test() -> None:
        admission = Admission(Limits(answer_bytes=100))
        first, second = [await admission.enter("a", "stream") for _ in range(2)]
        await first.hold(70)
        waiting = asyncio.ensure_future(second.hold(70))
        other = await admission.enter("b", "stream")
        await other.hold(30)
        await settle()
        assert not waiting.done(), "75 are one caller's share"
        await first.hold(0)
        await waiting
        second.close()
        other.close()
        assert admission.answers.total == 0

    run(test)


def test_one_answer_beyond_the_share_is_sent_alone() -> None:
    async def test() -> None:
        admission = Admission(Limits(answer_bytes=100))
        slot = await admission.enter("a", "stream")
        await slot.hold(1000)
        await slot.hold(1000)
        slot.close()
        assert admission.answers.total == 0

    run(test)


def test_calls_that_had_much_in_memory_are_counted_when_they_end() -> None:
    async def test() -> None:
        admission = Admission()
        unread, cut, small = [await admission.enter("a", "call") for _ in range(3)]
        await unread.hold(LARGE)
        await cut.place(is_large=False)
        await small.place(is_large=False)
        await small.came(10)
        assert admission.large_messages == 1
        for slot, count in ((unread, 2), (cut, 3), (small, 3)):
            slot.close()
            assert admission.large_messages == count

    run(test)


# --- Times


def test_slots_are_ended_where_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.001)

    async def test() -> None:
        clock, ended = Clock(), list[str]()
        admission = Admission(Limits(request_s=500), clock)
        ending = asyncio.ensure_future(admission.end_overdue())

        async def enter(name: str) -> Slot:
            return await admission.enter(name, "call", lambda: ended.append(name))

        await enter("silent")
        coming, working, unread, read = [await enter(name) for name in ("coming", "working", "unread", "read")]
        await coming.place()
        await working.place()
        await working.came(10)
        await unread.hold(10)
        await read.hold(10)
        for seconds, expected in ((19, []), (2, ["silent"]), (38, ["silent"])):
            clock.now += seconds
            await asyncio.sleep(0.02)
            assert ended == expected
        await read.hold(20)
        clock.now += 2
        await asyncio.sleep(0.02)
        assert ended == ["silent", "unread"]
        clock.now += 450
        await asyncio.sleep(0.02)
        assert ended == ["silent", "unread", "read", "coming"] or ended == ["silent", "unread", "coming", "read"]
        ending.cancel()

    run(test)


# --- Limits of tokens and runs


def test_calls_of_a_token_and_of_a_run_are_limited() -> None:
    async def test() -> None:
        admission = Admission(Limits(run_calls=2))
        limited, other = Caller("limited", frozenset(), max_requests=1), Caller("other", frozenset())
        first = await admission.enter("limited", "call")
        first.count(limited, "r")
        with pytest.raises(ResourceExhaustedError, match=r"1 calls of caller 'limited' .* max_requests of the token"):
            (await admission.enter("limited", "call")).count(limited, "s")
        (await admission.enter("other", "call")).count(other, "r")
        with pytest.raises(ResourceExhaustedError, match=r"2 calls of run 'r' .* max_run_requests"):
            (await admission.enter("other", "call")).count(other, "r")
        assert dict(admission.counts()) == {("caller", "limited"): 1, ("run", "r"): 2}
        first.close()
        assert dict(admission.counts()) == {("run", "r"): 1}

    run(test)


# --- Wrong calls


def wrong_until(
    admission: Admission, name: str, is_reached: Callable[[float], bool], code: str = "INVALID_ARGUMENT"
) -> int:
    """Refuses calls until one is delayed so. Returns how many there were before."""
    for count in range(100_000):
        if is_reached(admission.refused(name, f"{name}'s connection", code, 100, SPENT_S)):
            return count
    raise AssertionError("it was never reached")


def test_wrong_calls_are_delayed_and_then_refused_unread() -> None:
    clock = Clock()
    admission = Admission(clock=clock)
    free = wrong_until(admission, "a", lambda delay_s: delay_s > 0)
    assert free > 400, "now and then a call is wrong"
    admission.check("a's connection")

    def is_refused(_: float) -> bool:
        try:
            admission.check("a's connection")
        except ResourceExhaustedError as error:
            return bool(error.retry_after_s)
        return False

    wrong_until(admission, "a", is_refused)
    assert admission.refused("b", "b's connection", "INVALID_ARGUMENT", 100, SPENT_S) == 0
    admission.check("b's connection")
    clock.now += 200
    assert admission.refused("a", "a's connection", "INVALID_ARGUMENT", 100, SPENT_S) == 0
    admission.check("a's connection")


def test_delayed_refusals_leave_one_after_another_and_one_alone_within_seconds() -> None:
    clock = Clock()
    admission = Admission(clock=clock)
    wrong_until(admission, "a", lambda delay_s: delay_s > 4)
    delays = [admission.refused("a", "a's connection", "INVALID_ARGUMENT", 100, SPENT_S) for _ in range(100)]
    assert all(0.09 < later - earlier < 0.11 for earlier, later in pairwise(delays)), "10 per second"
    clock.now += delays[-1]
    assert 0 < admission.refused("a", "a's connection", "INVALID_ARGUMENT", 100, SPENT_S) <= 5
    assert admission.refused("a", "a's connection", "NOT_FOUND", 100, SPENT_S) > 0, "whatever is refused"


def test_unknown_callers_of_a_machine_wait_seconds_however_many_there_are() -> None:
    admission = Admission(clock=Clock())
    delays = [admission.refused("machine", "machine", "UNAUTHENTICATED", 0, SPENT_S) for _ in range(10_000)]
    assert (delays[0], delays[-1]) == (0, 5)


def test_a_caller_with_many_connections_has_a_limit_too() -> None:
    admission = Admission(clock=Clock())
    delays = [admission.refused("a", f"connection {number}", "UNAUTHENTICATED", 0, SPENT_S) for number in range(2000)]
    assert delays[900] == 0
    assert 20 < delays[-1] < 30, "40 per second"


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"])
def test_what_is_not_the_callers_fault_costs_nothing(code: str) -> None:
    admission = Admission()
    assert not any(admission.refused("a", "a", code, 1000, SPENT_S) for _ in range(10_000))


def test_large_requests_that_are_refused_cost_by_their_bytes() -> None:
    admission = Admission(clock=Clock())
    assert [admission.refused("a", "a", "RESOURCE_EXHAUSTED", 64 << 20, SPENT_S) > 0 for _ in range(5)][-1]


def test_callers_that_were_never_wrong_again_are_forgotten() -> None:
    admission = Admission()
    for number in range(20_000):
        admission.refused(f"caller {number}", f"caller {number}", "UNAUTHENTICATED", 0, SPENT_S)
    assert len(admission._wrong_of_caller._accounts) <= 4096


# --- Probes


def test_probes_of_a_connection_are_paced() -> None:
    async def test() -> None:
        admission = Admission()
        probes = [asyncio.ensure_future(admission.pace_probe("greedy")) for _ in range(20)]
        await admission.pace_probe("modest")
        await settle()
        assert sum(probe.done() for probe in probes) == 10
        for probe in probes:
            probe.cancel()

    run(test)


# --- All at once


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("limit", ["calls", "streams", "probes", "requests", "small_requests", "waits", "answer_bytes"])
def test_40_calls_at_once_pass_no_limit(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.01)
    kinds: dict[str, Kind] = {"streams": "stream", "probes": "probe"}

    async def test() -> None:
        admission = Admission(Limits(**{limit: 4}))
        kind = kinds.get(limit, "call")
        shared = {
            **dict.fromkeys(("calls", "streams", "probes"), admission.by_kind[kind]),
            "requests": admission.requests,
            "small_requests": admission.small_requests,
            "waits": admission.waits,
            "answer_bytes": admission.answers,
        }[limit]
        most, reached = 8 if limit == "waits" else 4, 0

        async def call(number: int) -> None:
            nonlocal reached
            try:
                slot = await admission.enter(f"caller {number}", kind)
                if limit.endswith("requests"):
                    await slot.place(is_large=limit == "requests")
                slot.wait()
                await slot.hold(1)
            except ResourceExhaustedError:
                return
            reached = max(reached, shared.total)
            await settle()
            slot.close()

        await asyncio.gather(*(call(number) for number in range(40)))
        assert (reached, shared.total) == (most, 0)

    run(test)
