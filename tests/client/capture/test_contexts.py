"""Tasks, threads and nested blocks each record on the trajectory of their own block."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

import gristmill
from gristmill import (
    AsyncRolloutClient,
    AsyncTrajectory,
    RolloutClient,
)
from tests.client.capture.callers import (
    ASYNC,
    HI,
    ask,
    by_async_openai,
    by_openai,
    expected,
    steps,
    user,
)
from tests.on_loop import Service
from tests.recorder.engine import Engine
from tests.recorder.recorders import create_run, trained


@asynccontextmanager
async def two_trajectories(service: Service, run: str) -> AsyncIterator[list[AsyncTrajectory]]:
    async with AsyncRolloutClient(service.grpc_address, run, timeout_s=20) as rollouts:
        yield [rollouts.trajectory(uid, 0) for uid in ("a", "b")]


def test_tasks_at_the_same_time_record_each_on_its_own_trajectory(
    engine: Engine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, train_batch_size=2, policy_mini_batch_size=2)

    async def work() -> None:
        async def agent(trajectory: AsyncTrajectory) -> None:
            with gristmill.capture(trajectory, f"{engine.url}/v1"):
                said = [f"say {trajectory.key.uid}{number}" for number in range(5)]
                calls = [by_async_openai(engine.url, {"model": "toy", "messages": [user(text)]}) for text in said]
                await asyncio.gather(*calls)
            await trajectory.finish(1.0)

        async with two_trajectories(service, run_name) as both:
            await asyncio.gather(*map(agent, both))

    asyncio.run(work())
    rows = [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run_name)]
    assert sorted(rows[:5]) == [f"a{number}".encode() for number in range(5)]
    assert sorted(rows[5:]) == [f"b{number}".encode() for number in range(5)]


def test_the_innermost_block_records_and_then_the_outer_one_again(
    agent: openai.OpenAI, rollouts: RolloutClient
) -> None:
    outer, inner = rollouts.trajectory("a", 0), rollouts.trajectory("b", 0)
    with gristmill.capture(outer, str(agent.base_url)):
        with gristmill.capture(inner, str(agent.base_url)):
            ask(agent, "say hi")
        ask(agent, "say hi")
        with gristmill.capture(outer, str(agent.base_url)):
            ask(agent, "say hi")
    ask(agent, "say hi")
    assert (steps(outer), steps(inner)) == (2, 1)
    for trajectory in (outer, inner):
        trajectory.abort("a test")


def test_threads_of_a_pool_record_in_a_copied_context_or_in_a_block_of_their_own(
    agent: openai.OpenAI, service: Service, rollouts: RolloutClient, run: str
) -> None:
    with rollouts.trajectory("a", 0) as trajectory:

        def in_block() -> None:
            with gristmill.capture(trajectory, str(agent.base_url)):
                ask(agent, "say c")

        with gristmill.capture(trajectory, str(agent.base_url)), ThreadPoolExecutor(3) as pool:
            plain = pool.submit(ask, agent, "say a")
            copied = pool.submit(contextvars.copy_context().run, ask, agent, "say b")
            blocks = [pool.submit(in_block) for _ in range(5)]
            assert [one.exception() for one in (plain, copied, *blocks)] == [None] * 7
        trajectory.finish(1.0)
    rows = [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run)]
    assert sorted(set(rows)) == [b"b", b"c"]


AGENTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import gristmill
from tests.client.capture.callers import by_openai, steps, user

engine, address, run = sys.argv[1:]
barrier = Barrier(4)

with gristmill.RolloutClient(address, run, timeout_s=20) as client:

    def agent(number):
        trajectory = client.trajectory("a", number)
        barrier.wait()
        with gristmill.capture(trajectory, f"{engine}/v1"):
            barrier.wait()
            by_openai(engine, {"model": "toy", "messages": [user("say hi")]})
        trajectory.finish(1.0)
        return steps(trajectory)

    with ThreadPoolExecutor(4) as pool:
        print(*pool.map(agent, range(4)))
"""


def test_threads_that_open_the_first_blocks_of_a_process_at_once_record_each_call_once(
    engine: Engine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=4)
    command = [sys.executable, "-c", AGENTS, engine.url, service.grpc_address, run_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1"] * 4


def test_a_call_that_blocks_the_loop_of_its_recording_is_refused_and_one_in_a_thread_is_not(
    engine: Engine, service: Service, run: str
) -> None:
    body = {"model": "toy", "messages": HI}

    async def work() -> None:
        async with (
            AsyncRolloutClient(service.grpc_address, run, timeout_s=20) as rollouts,
            rollouts.trajectory("a", 0) as trajectory,
        ):
            with gristmill.capture(trajectory, f"{engine.url}/v1"):
                with pytest.raises(openai.BadRequestError, match="AsyncOpenAI"):
                    by_openai(engine.url, body)
                await asyncio.to_thread(by_openai, engine.url, body)
            await trajectory.finish(1.0)

    asyncio.run(work())
    assert trained(service.grpc_address, run) == [expected()]


@pytest.mark.parametrize("call", ASYNC)
def test_an_answer_whose_task_is_cancelled_while_it_is_recorded_is_recorded_once(
    call: Callable[[str, Any], Awaitable[str]], engine: Engine, service: Service, run: str
) -> None:
    async def work() -> None:
        recording, goes_on = asyncio.Event(), asyncio.Event()

        class Slow(AsyncTrajectory):
            async def _capture(self, choices: Any) -> None:
                recording.set()
                await goes_on.wait()
                await super()._capture(choices)

        async with AsyncRolloutClient(service.grpc_address, run, timeout_s=20) as rollouts:
            trajectory = rollouts.trajectory("a", 0)
            trajectory.__class__ = Slow
            with gristmill.capture(trajectory, f"{engine.url}/v1"):
                asked = asyncio.ensure_future(call(engine.url, {"model": "toy", "messages": HI}))
                await recording.wait()
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            goes_on.set()
            while not steps(trajectory):
                await asyncio.sleep(0)
            await trajectory.finish(1.0)

    asyncio.run(work())
    assert trained(service.grpc_address, run) == [expected()]
