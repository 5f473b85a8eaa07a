"""Groups into a run, with rollouts that these tests write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from gristmill import AsyncRolloutClient, InvalidArgumentError, TrainerClient, UnavailableError
from gristmill.environments.feeding import Feeder, Progress, Prompt, Rollout, RunShape
from tests.on_loop import Service
from tests.rows import make_config

CONFIG = make_config(train_batch_size=2, n_samples_per_prompt=2, policy_mini_batch_size=2, micro_batch={"size": 8})


def rollout(reward: float = 1.0, token: int = 5) -> Rollout:
    first = {"prompt_token_ids": [1], "response_ids": [token], "loss_mask": [1], "reward": 0.0}
    return Rollout([first, {**first, "prompt_token_ids": [1, token, 2], "reward": reward}])


def prompts(*names: str) -> list[Prompt[str]]:
    return [Prompt(f"game/{name}", "game", name) for name in names]


class Played:
    """An environment: `play` gives the n-th rollout of a task, and may wait or raise."""

    def __init__(self, play: Callable[[str, int], Awaitable[Rollout]]) -> None:
        self.began: dict[str, int] = {}
        self._play = play

    async def roll_out(self, task: str) -> Rollout:
        number = self.began[task] = self.began.get(task, -1) + 1
        return await self._play(task, number)


async def well(task: str, number: int) -> Rollout:
    return rollout(float(number))


async def fed(
    service: Service,
    run: str,
    played: Played,
    tasks: Iterable[Prompt[str]],
    config: dict[str, Any] | None = None,
    round: int = 0,
    **options: Any,
) -> Progress:
    async with AsyncRolloutClient(service.grpc_address, run) as client:
        await client.create_run(CONFIG | (config or {}))
        feeder = Feeder(client, await RunShape.of(client), played.roll_out, **options)
        return await feeder.feed(tasks, round)


def groups(service: Service, run: str) -> dict[str, tuple[str, str]]:
    async def ask() -> dict[str, tuple[str, str]]:
        async with AsyncRolloutClient(service.grpc_address, run) as client:
            return {group.uid: (group.state, group.reason) for group in await client.groups()}

    return asyncio.run(ask())


def test_every_prompt_becomes_a_group_of_as_many_samples_as_the_run_wants(service: Service, run_name: str) -> None:
    counts: list[int] = []
    progress = asyncio.run(
        fed(service, run_name, Played(well), prompts("a", "b"), on_group=lambda now: counts.append(now.groups))
    )
    assert (progress.groups, progress.trajectories, progress.mean_reward, counts) == (2, 4, 0.5, [1, 2])
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert (shard["loss_mask"].sum().item(), len(shard["row"])) == (8, 8)
        assert set(shard.metadata["tags"]) == {"game"}


def test_the_first_samples_that_end_make_the_group_and_the_others_are_cancelled(
    service: Service, run_name: str
) -> None:
    cancelled = []

    async def play(task: str, number: int) -> Rollout:
        if number == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(task)
                raise
        return rollout()

    progress = asyncio.run(fed(service, run_name, Played(play), prompts("a", "b"), {"surplus": 1}))
    assert (progress.trajectories, sorted(cancelled)) == (4, ["a", "b"])
    assert {state for state, _ in groups(service, run_name).values()} == {"sealed"}


def test_a_sample_that_fails_is_aborted_and_its_group_goes_on(service: Service, run_name: str) -> None:
    async def play(task: str, number: int) -> Rollout:
        if (task, number) == ("a", 0):
            return Rollout((), "the sandbox is gone")
        if (task, number) == ("b", 1):
            raise KeyError("answer")
        return rollout()

    progress = asyncio.run(fed(service, run_name, Played(play), prompts("a", "b")))
    assert (progress.groups, progress.trajectories, progress.failures) == (2, 2, 2)
    assert {state for state, _ in groups(service, run_name).values()} == {"sealed"}


def test_an_engine_that_is_down_does_not_use_up_the_prompts(service: Service, run_name: str) -> None:
    async def play(task: str, number: int) -> Rollout:
        raise ConnectionError("refused")

    played = Played(play)
    tasks = prompts(*map(str, range(20)))
    with pytest.raises(UnavailableError, match=r"last 3 groups .* ConnectionError: refused; check the engine"):
        asyncio.run(fed(service, run_name, played, tasks, concurrent_groups=1))
    assert len(played.began) <= 4


def test_what_was_consumed_in_a_round_is_left_out_and_another_round_samples_it_again(
    service: Service, run_name: str
) -> None:
    played = Played(well)
    asyncio.run(fed(service, run_name, played, prompts("a", "b")))
    again = asyncio.run(fed(service, run_name, played, prompts("a", "b")))
    assert (again.groups, again.consumed) == (0, 2)
    next_round = asyncio.run(fed(service, run_name, played, prompts("a", "b"), round=1))
    assert (next_round.groups, next_round.consumed) == (2, 0)


def test_the_open_group_of_a_worker_that_was_killed_is_rolled_out_again(service: Service, run_name: str) -> None:
    async def killed() -> None:
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            await client.create_run(CONFIG)
            await client.begin_groups(["game/a"], tag="game")
            for attempt in range(2):
                key = {"uid": "game/a", "sample": 0, "attempt": attempt}
                rows = rollout(token=7).steps
                await client.submit({**key, "step": n, "is_last_step": n == 1, **row} for n, row in enumerate(rows))

    asyncio.run(killed())
    progress = asyncio.run(fed(service, run_name, Played(well), prompts("a", "b")))
    assert (progress.trajectories, progress.late) == (4, 0)
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert 7 not in shard["sequences"]


def test_cancelling_ends_the_rollouts_and_aborts_their_groups(service: Service, run_name: str) -> None:
    async def work() -> None:
        begun = asyncio.Event()

        async def play(task: str, number: int) -> Rollout:
            if task == "a":
                return rollout()
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        feeding = asyncio.create_task(fed(service, run_name, Played(play), prompts("a", "b", "c")))
        await begun.wait()
        feeding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await feeding
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())
    states = groups(service, run_name)
    assert states.pop("game/b")[0] == "dropped"
    assert {state for state, _ in states.values()} <= {"complete", "dropped"}


def test_what_the_run_refuses_ends_the_feeding(service: Service, run_name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="step_wise"):
        asyncio.run(fed(service, run_name, Played(well), prompts("a"), {"step_wise": False}))


def test_no_group_at_a_time_is_refused(service: Service, run_name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="concurrent_groups is 0"):
        asyncio.run(fed(service, run_name, Played(well), prompts("a"), concurrent_groups=0))
