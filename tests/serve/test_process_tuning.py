"""Pools whose threads all run from the beginning, and memory that is given back when no large messages come."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gristmill.errors import UnavailableError
from gristmill_service import process_tuning
from gristmill_service.process_tuning import started_pool


def test_a_pool_needs_no_thread_more_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started_pool(3, "test-pool")

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    all_at_once = threading.Barrier(3)
    assert len([pool.submit(all_at_once.wait, 20).result for _ in range(3)]) == 3
    pool.shutdown()


def test_where_the_system_gives_no_threads_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def two_threads(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", two_threads)
    with pytest.raises(UnavailableError, match=r"cannot start 3 more threads .*ulimit -u"):
        started_pool(3, "test-pool")
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()


def test_memory_is_given_back_once_after_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    given, count = list[int](), 0
    monkeypatch.setattr(process_tuning, "_QUIET_S", 0.01)
    monkeypatch.setattr(process_tuning, "give_back_memory", lambda: given.append(count))

    async def test() -> None:
        nonlocal count
        task = asyncio.create_task(process_tuning.give_back_memory_when_quiet(lambda: count))
        await asyncio.sleep(0.1)
        assert given == []
        count = 3
        while not given:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert given == [3]
        task.cancel()

    asyncio.run(asyncio.wait_for(test(), 20))
