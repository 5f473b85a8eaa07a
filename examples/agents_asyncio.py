"""Agents with asyncio: a hundred and more play at once in one event loop, and send every turn as it is played.

    gristmill serve &
    python examples/agents_asyncio.py

The game: guess a number; after each wrong guess the agent gets "higher" or "lower". The engine here is a stand-in
that waits a moment and guesses by chance: put a call of your own in its place. It needs no trainer, as all batches fit
into the run's buffer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter

from gristmill import AsyncRolloutClient

LARGEST, TURNS = 20, 4
START, HIGHER, LOWER = LARGEST + 1, LARGEST + 2, LARGEST + 3
PROMPTS, SAMPLES = 16, 8

SETTINGS = {
    "train_batch_size": 8,
    "n_samples_per_prompt": SAMPLES,
    "policy_mini_batch_size": 4,
    "step_wise": True,
    "merge": "prefix",
    "loss_reduction": "token_mean",
    "micro_batch": {"max_tokens": 128},
}


async def engine(context: list[int]) -> tuple[list[int], list[float]]:
    """Return a response and the log-probability of each of its tokens."""
    await asyncio.sleep(random.uniform(0.001, 0.01))
    if random.random() < 0.002:
        raise ConnectionError("the engine is gone")
    return [random.randint(1, LARGEST)], [-3.0]


async def play(client: AsyncRolloutClient, uid: str, sample: int, secret: int) -> None:
    """Play one agent's game. An error aborts its trajectory, and its group continues without it."""
    async with client.trajectory(uid, sample) as trajectory:
        context = [START]
        for turn in range(1, TURNS + 1):
            response, logprobs = await engine(context)
            is_right = response == [secret]
            # The whole context, each time: the client does not send tokens again that the service has.
            await trajectory.step(
                context,
                response,
                rollout_logprobs=logprobs,
                reward=float(is_right),
                is_last_step=is_right or turn == TURNS,
            )
            if is_right:
                break
            context = [*context, *response, HIGHER if response[0] < secret else LOWER]


async def play_group(client: AsyncRolloutClient, uid: str) -> int:
    """Play all samples of a prompt at once; return how many of them failed."""
    secret = random.randint(1, LARGEST)

    async def attempt(sample: int) -> bool:
        try:
            await play(client, uid, sample, secret)
        except ConnectionError:
            return False
        return True

    return (await asyncio.gather(*map(attempt, range(SAMPLES)))).count(False)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1:50051", help="of gristmill serve (default: %(default)s)")
    parser.add_argument(
        "--run", default="agents-example", help="its name; an existing run is deleted first (default: %(default)s)"
    )
    given = parser.parse_args()
    async with AsyncRolloutClient(given.address, given.run) as client:
        await client.delete_run()
        await client.create_run(SETTINGS)
        waiting = [f"game-{number}" for number in range(PROMPTS)]
        games: list[asyncio.Task[int]] = []
        async with asyncio.TaskGroup() as group:
            # Waits while the trainer is behind, which paces the agents. Empty when all groups are finished.
            while admitted := await client.begin_groups(waiting):
                games += [group.create_task(play_group(client, uid)) for uid in admitted]
                waiting = [uid for uid in waiting if uid not in admitted]
        batches = await client.finish()
        groups = await client.groups(f"game-{number}" for number in range(PROMPTS))
        states = dict(Counter(group.state.value for group in groups))
        turns = (await client.status()).rows_accepted
        failed = sum(game.result() for game in games)
        print(f"{PROMPTS} groups: {states}; {failed} agents failed; {turns} turns; {batches} batches")


if __name__ == "__main__":
    asyncio.run(main())
