"""Ctrl-C while a caller waits for its rows: they arrive all the same, and closing the client ends, also while the
service is unreachable."""

from __future__ import annotations

import _thread
import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress

import numpy as np
import pytest

from gristmill import AsyncRolloutClient, RolloutClient
from gristmill.environments.feeding import Feeder, Prompt, Rollout, RunShape
from gristmill.v1 import rollout_pb2
from tests.client.faulty import FaultyService, serving
from tests.on_loop import Service
from tests.rows import make_config, make_row
from tests.serving import StartService
from tests.strategies import Row

CONFIG = make_config(
    train_batch_size=4096,
    n_samples_per_prompt=2,
    policy_mini_batch_size=4096,
    max_buffered_batches=8,
    micro_batch={"size": 4},
    step_wise=False,
)


def rows_of(uid: str, length: int = 2) -> list[Row]:
    return [make_row(uid=uid, sample=sample, prompt=np.ones(length, np.int32), response=[3]) for sample in range(2)]


def test_rows_of_an_interrupted_call_arrive_with_the_next_flush(service: Service, run_name: str) -> None:
    """Interrupts at random moments, as from a terminal."""
    stopped = threading.Event()

    def interrupt() -> None:
        rng = np.random.default_rng(1)
        while not stopped.wait(rng.random() * 0.02):
            _thread.interrupt_main()

    interrupted, given = 0, 0
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        thread = threading.Thread(target=interrupt)
        thread.start()
        deadline = time.monotonic() + 30
        while interrupted < 40 and time.monotonic() < deadline:
            try:
                client.submit(rows_of(f"p{given}"))
                given += 1
            except KeyboardInterrupt:
                interrupted += 1
        while True:
            try:
                stopped.set()
                thread.join()
                break
            except KeyboardInterrupt:
                continue
        assert interrupted > 5
        client.flush()
        for uid in range(given + 1):
            client.submit(rows_of(f"p{uid}"))
        assert client.status().rows_accepted == 2 * (given + 1)


def test_two_interrupts_while_large_messages_are_under_way_leave_nothing_hanging(
    start_service: StartService, run_name: str
) -> None:
    process = start_service()
    with RolloutClient(process.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        rows = [row for uid in range(4) for row in rows_of(f"p{uid}", 500_000)]
        process.process.send_signal(signal.SIGSTOP)
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            for pause_s in (1.0, 0.2):
                time.sleep(pause_s)
                signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.5)
            process.process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.submit(rows)
        # On a busy machine the second one may come late.
        while thread.is_alive():
            with suppress(KeyboardInterrupt):
                thread.join()
        client.flush()
        client.submit(rows)
        assert client.status().rows_accepted == 8


# The service is unreachable. Rows and calls are retried for a minute unless the client was interrupted.
RETRIED_S = 60.0
LEAVES_S = 20.0


@contextmanager
def leaving() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LEAVES_S


def test_an_interrupted_worker_with_many_trajectories_leaves_at_once_while_the_service_is_unreachable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = ExitStack()
    with serving(FaultyService()) as address:
        client = stack.enter_context(RolloutClient(address, "interrupted", timeout_s=RETRIED_S))
        opened = [stack.enter_context(client.trajectory("p", sample, policy_version=0)) for sample in range(30)]
        for trajectory in opened:
            trajectory.step([1], [2])
        client.flush()
    for trajectory in opened:
        trajectory.step([1, 2], [3])
    with leaving(), pytest.raises(KeyboardInterrupt) as interrupted, stack:
        raise KeyboardInterrupt
    assert any("uid 'p' sample 0 could not be aborted" in note for note in interrupted.value.__notes__)
    assert [text for text in caplog.messages if "of run 'interrupted' were not delivered" in text] == []


def test_rows_that_an_interrupted_client_gave_up_are_logged_and_whoever_waits_for_them_is_woken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(FaultyService()) as address:
        client = RolloutClient(address, "given-up", timeout_s=RETRIED_S)
        trajectory = client.trajectory("p", 0, policy_version=0)
        trajectory.step([1], [2])
        client.flush()
    trajectory.step([1, 2], [3])
    woken: list[BaseException] = []

    def flush() -> None:
        try:
            client.flush()
        except BaseException as error:  # noqa: BLE001
            woken.append(error)

    waiting = threading.Thread(target=flush)
    waiting.start()
    with leaving():
        interrupt = KeyboardInterrupt()
        try:
            raise interrupt
        except KeyboardInterrupt:
            client.close()
        waiting.join(RETRIED_S)
        client.close()
    assert "rows were not delivered" in interrupt.__notes__[0]
    assert "the client was interrupted before the row was delivered" in str(woken)
    assert "1 rows of run 'given-up' were not delivered: the client was interrupted" in caplog.messages


def test_an_interrupt_while_the_client_closes_ends_it() -> None:
    with serving(FaultyService()) as address:
        client = RolloutClient(address, "closing", timeout_s=RETRIED_S)
    client.trajectory("p", 0, policy_version=0).step([1], [2])
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with leaving(), pytest.raises(KeyboardInterrupt):
        client.close()
    timer.join()


def test_cancelled_agents_leave_at_once_while_the_service_is_unreachable() -> None:
    async def worker(address: str, away: threading.Event, stepped: threading.Event) -> None:
        async with AsyncRolloutClient(address, "cancelled", timeout_s=RETRIED_S) as client, AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(client.trajectory("p", sample, policy_version=0))
                for sample in range(30)
            ]
            for trajectory in opened:
                await trajectory.step([1], [2])
            await client.flush()
            stepped.set()
            await asyncio.to_thread(away.wait)
            for trajectory in opened:
                await trajectory.step([1, 2], [3])
            await client.flush()

    async def main() -> None:
        away, stepped = threading.Event(), threading.Event()
        with serving(FaultyService()) as address:
            task = asyncio.create_task(worker(address, away, stepped))
            await asyncio.to_thread(stepped.wait)
        away.set()
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with leaving():
        asyncio.run(main())


def test_a_cancelled_feed_leaves_at_once_while_the_service_is_unreachable() -> None:
    async def never(task: int) -> Rollout:
        await asyncio.sleep(RETRIED_S)
        return Rollout(())

    async def feed(address: str) -> None:
        async with AsyncRolloutClient(address, "feed", timeout_s=RETRIED_S) as client:
            feeder = Feeder(client, RunShape(1, 0, False), never)
            feeder._open.update("abcdef")
            await feeder.feed([Prompt("a", "", 0)], 0)

    async def main(address: str) -> None:
        task = asyncio.create_task(feed(address))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(FaultyService()) as address:
        pass
    with leaving():
        asyncio.run(main(address))


class SlowAborts(FaultyService):
    """Answers aborts later than a cancelled agent waits for them."""

    def AbortTrajectories(
        self, request: rollout_pb2.AbortTrajectoriesRequest, context: object
    ) -> rollout_pb2.AbortTrajectoriesResponse:
        time.sleep(2.0)
        self.aborted = [key.sample for key in request.trajectories]
        return rollout_pb2.AbortTrajectoriesResponse(changed=1)


def test_an_agent_with_a_time_limit_is_aborted_in_the_background_if_the_service_is_slow() -> None:
    """Its group would otherwise wait for its sample without end."""
    service = SlowAborts()

    async def agent(client: AsyncRolloutClient) -> None:
        async with client.trajectory("p", 3, policy_version=0) as trajectory:
            await trajectory.step([1], [2])
            await asyncio.sleep(RETRIED_S)

    async def main(address: str) -> None:
        async with AsyncRolloutClient(address, "slow", timeout_s=RETRIED_S) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(agent(client), 0.2)
            assert not hasattr(service, "aborted")

    with serving(service) as address, leaving():
        asyncio.run(main(address))
    assert service.aborted == [3]


FORGETFUL = """
import sys, time
from gristmill import RolloutClient
client = RolloutClient(sys.argv[1], "forgotten", timeout_s=60.0)
trajectory = client.trajectory("p", 0, policy_version=0)
trajectory.step([1], [2])
client.flush()
print("flushed", flush=True)
sys.stdin.readline()
trajectory.step([1, 2], [3])
print("added", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_process_that_did_not_close_its_client_while_the_service_is_unreachable() -> None:
    with serving(FaultyService()) as address:
        worker = subprocess.Popen(
            [sys.executable, "-c", FORGETFUL, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "flushed\n"
    worker.stdin.write("\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "added\n"
    with leaving():
        worker.send_signal(signal.SIGINT)
        _, told = worker.communicate(timeout=RETRIED_S)
    assert "1 rows of run 'forgotten' were not delivered: the client was interrupted" in told
