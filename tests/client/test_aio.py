"""The asyncio twin: the same names and meanings, and the same care for every row."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill import (
    AsyncRolloutClient,
    AsyncTrajectory,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    RolloutClient,
    RowOutcome,
    TrainerClient,
    Trajectory,
    UnavailableError,
)
from gristmill._client import requests
from tests.client.faulty import FaultyService, serving, unavailable

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "step_wise": True,
    "merge": "prefix",
    "micro_batch": {"size": 4},
    "max_buffered_batches": 1,
}


def public(kind):
    members = inspect.getmembers(kind, lambda member: inspect.isfunction(member) or isinstance(member, property))
    return {name: member for name, member in members if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "awaited"), [(RolloutClient, AsyncRolloutClient), (Trajectory, AsyncTrajectory)])
def test_the_twins_have_the_same_methods_and_arguments(blocking, awaited):
    assert public(blocking).keys() == public(awaited).keys()
    for name, member in public(blocking).items():
        if inspect.isfunction(member) and name != "trajectory":
            assert inspect.signature(member) == inspect.signature(getattr(awaited, name)), name
            assert inspect.iscoroutinefunction(getattr(awaited, name)), name
            assert inspect.getdoc(member) == inspect.getdoc(getattr(awaited, name)), name


async def roll_out(client, uid, sample):
    async with client.trajectory(uid, sample, policy_version=0) as trajectory:
        assert await trajectory.step([1, 2], [3])
        assert await trajectory.step([1, 2, 3, 4], [5], reward=float(sample), is_last_step=True)


def test_many_rollouts_in_one_loop(service, run_name):
    async def work():
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


def test_a_long_wait_for_room_tells_why(service, run_name, monkeypatch, caplog):
    async def work():
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            await client.create_run(CONFIG)
            await client.begin_groups(["a", "b"])
            return await client.begin_groups(["c"], wait_s=0.05)

    monkeypatch.setattr(requests, "ROOM_NOTICE_S", 0.0)
    assert asyncio.run(work()) == []
    assert "no room for groups for 0 s now: max_buffered_batches: 1 batches" in caplog.text


def test_every_other_call(service, run_name):
    async def work():
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            await client.create_run(CONFIG)
            row = {"uid": "a", "sample": 0, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1]}
            assert await client.submit_rows([row]) == [RowOutcome.ACCEPTED]
            output = {"prompt_token_ids": [[1]], "response_ids": [[2]], "rewards": [1.0], "trajectory_ids": [("b", 0)]}
            assert await client.submit(output) == [RowOutcome.ACCEPTED]
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


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.sampled_from([None, unavailable]), max_size=4),
    st.lists(st.sampled_from([None, unavailable]), max_size=4),
    st.integers(1, 7),
)
def test_retries_after_lost_replies_keep_each_row_exactly_once(before, after, batch_rows):
    faulty = FaultyService()
    faulty.before.extend(before)
    faulty.after.extend(after)

    async def work(address):
        async with AsyncRolloutClient(address, "run", max_batch_rows=batch_rows) as client:
            await asyncio.gather(*(roll_out(client, "a", sample) for sample in range(5)))

    with serving(faulty) as address:
        asyncio.run(work(address))
    for sample in range(5):
        assert [step for _, found, step in faulty.arrivals if found == sample] == [0, 1]


def test_too_much_under_way_holds_the_producer_back():
    faulty = FaultyService()
    faulty.gate.clear()

    async def work(address):
        async with AsyncRolloutClient(address, "run", max_batch_rows=1) as client:
            producers = [asyncio.create_task(roll_out(client, "a", sample)) for sample in range(20)]
            await asyncio.to_thread(faulty.entered.wait, 10)
            _, waiting = await asyncio.wait(producers, timeout=0.2)
            assert waiting
            faulty.gate.set()
            await asyncio.gather(*producers)

    with serving(faulty) as address:
        asyncio.run(work(address))
    assert len(faulty.arrivals) == 40


def test_what_was_not_taken_is_told_by_name():
    faulty = FaultyService()
    faulty.refused_uids["a"] = InvalidArgumentError("uid 'a' sample 0: no")

    async def work(address):
        async with AsyncRolloutClient(address, "run") as client:
            trajectory = client.trajectory("a", 0)
            await trajectory.step([1], [2])
            with pytest.raises(InvalidArgumentError, match="rows were not taken of uid 'a' sample 0"):
                await client.flush()
            with pytest.raises(InvalidArgumentError):
                await trajectory.step([1], [2])

    with serving(faulty) as address:
        asyncio.run(work(address))


def test_a_cancelled_worker_aborts_its_trajectory():
    faulty = FaultyService()

    async def work(address):
        async with AsyncRolloutClient(address, "run") as client:
            started = asyncio.Event()

            async def roll_out_slowly():
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


def test_a_block_that_forgets_the_last_step_is_an_error():
    async def work(address):
        async with AsyncRolloutClient(address, "run") as client, client.trajectory("a", 0) as trajectory:
            await trajectory.step([1], [2])

    with serving(FaultyService()) as address, pytest.raises(FailedPreconditionError, match="without a last one"):
        asyncio.run(work(address))


def test_a_closed_client_says_so():
    async def work(address):
        client = AsyncRolloutClient(address, "run")
        await client.close()
        await client.close()
        for call in (client.policy_version(), client.trajectory("a", 0).step([1], [2])):
            with pytest.raises(FailedPreconditionError, match="this AsyncRolloutClient is closed"):
                await call

    with serving(FaultyService()) as address:
        asyncio.run(work(address))


def test_a_loop_that_ends_without_closing_logs_what_is_lost(caplog):
    faulty = FaultyService()
    faulty.gate.clear()

    async def work(address):
        await AsyncRolloutClient(address, "run").trajectory("a", 0).step([1], [2])

    with serving(faulty) as address:
        asyncio.run(work(address))
    assert "1 rows of run 'run' were not delivered: the client was not closed" in caplog.text


def test_nobody_there_is_told_with_the_address():
    async def work():
        async with AsyncRolloutClient("127.0.0.1:1", "run", timeout_s=0.2) as client:
            await client.policy_version()

    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1: the service cannot be reached"):
        asyncio.run(work())
