"""Work that two threads share."""

from __future__ import annotations

import threading
import time

import pytest

from gristmill_service.helper_thread import _helper, in_two_threads


def test_every_task_is_done_once_and_what_they_give_stands_in_their_order() -> None:
    done: list[int] = []

    def double(number: int) -> int:
        done.append(number)
        time.sleep(0.001)
        return 2 * number

    assert in_two_threads(range(50), double) == [2 * number for number in range(50)]
    assert sorted(done) == list(range(50))
    assert in_two_threads([], double) == []


def test_two_tasks_are_done_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=30)
    in_two_threads(range(2), lambda _: meeting.wait())


@pytest.mark.parametrize("failing", [{0}, {7}, {3, 4}, {4, 5, 6}])
def test_the_first_failure_is_raised_whichever_is_faster_and_nothing_is_done_any_more(failing: set[int]) -> None:
    done: list[int] = []

    def fail(number: int) -> None:
        time.sleep(0.002 if number == min(failing) else 0)
        if number in failing:
            raise ValueError(f"task {number}")
        done.append(number)

    with pytest.raises(ValueError, match=f"task {min(failing)}"):
        in_two_threads(range(200), fail)
    assert set(done) >= set(range(min(failing)))
    before = len(done)
    time.sleep(0.02)
    assert len(done) == before


def test_without_a_second_thread_the_first_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    _helper.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        assert in_two_threads(range(3), lambda number: 2 * number) == [0, 2, 4]
    _helper.cache_clear()
