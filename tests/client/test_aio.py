"""The asyncio client in its loop. All that it shares with the blocking one is tested with both, in test_rollout."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from gristmill import (
    AsyncRolloutClient,
    AsyncTrajectory,
    DeadlineExceededError,
    ResourceExhaustedError,
    RolloutClient,
    RowOutcome,
    TrainerClient,
    Trajectory,
)
from gristmill.converters import from_skyrl
from tests.client.faulty import FaultyService, serving
from tests.on_loop import Service

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "step_wise": True,
    "merge": "prefix",
    "micro_batch": {"size": 4},
    "max_buffered_batches": 1,
}


def public(kind: type) -> dict[str, Any]:
    members = inspect.getmembers(kind, lambda member: inspect.isfunction(member) or isinstance(member, property))
    return {name: member for name, member in members if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "awaited"), [(RolloutClient, AsyncRolloutClient), (Trajectory, AsyncTrajectory)])
def test_the_twins_have_the_same_methods_and_arguments(blocking: type, awaited: type) -> None:
    assert public(blocking).keys() == public(awaited).keys()
    for name, member in public(blocking).items():
        if inspect.isfunction(member) and name != "trajectory":
            assert inspect.signature(member) == inspect.signature(getattr(awaited, name)), name
            assert inspect.iscoroutinefunction(getattr(awaited, name)), name
            assert inspect.getdoc(member) == inspect.getdoc(getattr(awaited, name)), name


async def roll_out(client: AsyncRolloutClient, uid: str, sample: int) -> None:
    async with client.trajectory(uid, sample, policy_version=0) as trajectory:
        assert await trajectory.step([1, 2], [3])
        assert await trajectory.step([1, 2, 3, 4], [5], reward=float(sample), is_last_step=True)


def test_many_rollouts_in_one_loop(service: Service, run_name: str) -> None:
    async def work() -> int:
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            assert await client.create_run(CONFIG) == []
            assert await client.policy_version() == 0
            assert await client.begin_groups(["a", "b", "c"]) == ["a", "b"]
            await asyncio.gather(*(roll_out(client, uid, sample) for uid in "ab" for sample in range(2)))
            assert await client.finish() == 1
            return (await client.status()).rows_accepted

    assert asyncio.run(work()) == 8
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert shard["sequences"].tolist() == [[1, 2, 3, 4, 5]] * 4


def test_callers_that_wait_for_capacity_are_not_woken_by_refusals(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal woke all of them, so that with 2,000 callers their loop was busy with that alone."""
    row = {"prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0, "is_last_step": True}

    async def work() -> int:
        async with AsyncRolloutClient(service.grpc_address, run_name, timeout_s=3) as client:
            await client.create_run(CONFIG)
            await client.submit([{**row, "uid": uid, "sample": sample} for uid in "ab" for sample in range(2)])
            progress, woken = client.sender._progress, 0
            wait = progress.wait

            async def counted(seconds: float | None) -> None:
                nonlocal woken
                await wait(seconds)
                woken += 1

            monkeypatch.setattr(progress, "wait", counted)
            callers = [client.submit([{**row, "uid": f"late-{number}", "sample": 0}]) for number in range(20)]
            waiting = asyncio.gather(*callers, return_exceptions=True)
            await asyncio.wait([waiting], timeout=1.5)
            before_the_end = woken
            assert all(isinstance(error, ResourceExhaustedError) for error in await waiting)
            return before_the_end

    assert asyncio.run(work()) == 0


def test_every_other_call(service: Service, run_name: str) -> None:
    async def work() -> None:
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            await client.create_run(CONFIG)
            row = {"uid": "a", "sample": 0, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1]}
            assert await client.submit([row]) == [RowOutcome.ACCEPTED]
            output = {"prompt_token_ids": [[1]], "response_ids": [[2]], "rewards": [1.0], "trajectory_ids": [("b", 0)]}
            assert await client.submit(from_skyrl(output)) == [RowOutcome.ACCEPTED]
            assert await client.set_reward("a", 0, 0.5) is True
            assert await client.abort_trajectory("a", 1, reason="lost") is True
            assert await client.seal(0) == (0, 1)
            assert await client.abort_group("b") is True
            waiting = asyncio.create_task(client.wait_policy_version(1, 20))
            with TrainerClient(service.grpc_address, run_name, 0) as trainer:
                await asyncio.to_thread(trainer.announce_policy_version, 1)
            assert await waiting == 1
            with pytest.raises(DeadlineExceededError):
                await client.wait_policy_version(2, 0.01)

    asyncio.run(work())


def test_a_cancelled_worker_aborts_its_trajectory() -> None:
    faulty = FaultyService()

    async def work(address: str) -> None:
        async with AsyncRolloutClient(address, "run") as client:
            started = asyncio.Event()

            async def roll_out_slowly() -> None:
                async with client.trajectory("a", 0) as trajectory:
                    await trajectory.step([1], [2])
                    started.set()
                    await asyncio.Event().wait()

            worker = asyncio.create_task(roll_out_slowly())
            await started.wait()
            worker.cancel()
            await asyncio.wait([worker])
            assert worker.cancelled()

    with serving(faulty) as address:
        asyncio.run(work(address))
    assert faulty.dropped_uids == {"a"}
    assert faulty.reasons == "CancelledError"


@pytest.mark.parametrize("call", ["submit", "flush"])
def test_cancelling_who_waits_takes_no_rows_along(call: str) -> None:
    faulty = FaultyService()
    faulty.gate.clear()
    row = {"uid": "a", "sample": 0, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}

    async def work(address: str) -> None:
        async with AsyncRolloutClient(address, "run") as client:
            if call == "submit":
                waiting: asyncio.Task[Any] = asyncio.create_task(client.submit([row]))
            else:
                await roll_out(client, "a", 0)
                waiting = asyncio.create_task(client.flush())
            await asyncio.to_thread(faulty.entered.wait, 60)
            waiting.cancel()
            await asyncio.wait([waiting], timeout=60)
            assert waiting.cancelled()
            faulty.gate.set()
            await client.flush()

    with serving(faulty) as address:
        asyncio.run(work(address))
    assert faulty.arrivals[0] == ("a", 0, 0)
    assert faulty.calls == [1 if call == "submit" else 2], "sent once"


def test_a_loop_that_ends_without_closing_logs_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyService()
    faulty.gate.clear()

    async def work(address: str) -> None:
        await AsyncRolloutClient(address, "run").trajectory("a", 0).step([1], [2])

    with serving(faulty) as address:
        asyncio.run(work(address))
    assert "1 rows of run 'run' were not delivered: the client was not closed" in caplog.text
