"""Ctrl-C in a task that tidies up, where a package's handler raises."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from gristmill.environments.interrupts import cancelled_by_sigint


@pytest.fixture
def packages_handler() -> Iterator[list[int]]:
    """Of the signals that it was called for."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGINT, before)


async def interrupted(times: int, tidied: list[str]) -> None:
    with cancelled_by_sigint():
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(times - 1):
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            tidied.append("all")


@pytest.mark.parametrize("times", [1, 2])
def test_the_first_cancels_the_task_and_a_second_is_the_packages(packages_handler: list[int], times: int) -> None:
    tidied: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted(times, tidied))
    assert (tidied, len(packages_handler)) == (["all"], times - 1)


def test_without_one_the_handler_is_the_packages_again(packages_handler: list[int]) -> None:
    async def work() -> None:
        with cancelled_by_sigint():
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)

    asyncio.run(work())
    assert packages_handler == [signal.SIGINT]


def test_another_cancellation_stays_one() -> None:
    async def work() -> None:
        with cancelled_by_sigint():
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
