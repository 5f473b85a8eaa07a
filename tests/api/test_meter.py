"""The processor time of a call: that of its steps and of its work in threads, without that of others."""

from __future__ import annotations

import asyncio
import time

import pytest

from gristmill_service.api.meter import MeteredPool, metered, spent_s


def compute(seconds: float) -> str:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return "done"


def test_steps_and_threads_count_and_waiting_and_other_calls_do_not() -> None:
    async def call() -> list[float]:
        compute(0.02)
        so_far = [spent_s()]
        await asyncio.sleep(0.05)
        so_far.append(spent_s())
        assert await asyncio.to_thread(compute, 0.03) == "done"
        return [*so_far, spent_s()]

    async def test() -> list[float]:
        asyncio.get_running_loop().set_default_executor(MeteredPool(1))
        other = asyncio.create_task(asyncio.sleep(0.01))
        other.add_done_callback(lambda _: compute(0.1))
        return await metered(call())

    step, waited, in_all = asyncio.run(test())
    assert 0.02 <= step <= waited < 0.05
    assert 0.05 <= in_all < 0.1


def test_errors_and_cancellations_pass_through() -> None:
    async def wait() -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            raise ValueError("cancelled") from None

    async def call() -> None:
        await metered(wait())

    async def test() -> None:
        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(ValueError, match="cancelled"):
            await task

    asyncio.run(test())


def test_outside_of_a_call_nothing_is_counted() -> None:
    assert spent_s() == 0.0
    with MeteredPool(1) as pool:
        assert pool.submit(compute, 0.001).result() == "done"
