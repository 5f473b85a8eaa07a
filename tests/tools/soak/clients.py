"""Long-lived clients of one run, in a process of their own: a rollout client and a trainer's.

Each line on standard input is a round, as the JSON of `Round`; the line that answers it on standard output has the
groups that the client began. `python -m tests.tools.soak.clients sync|async ADDRESSES RUN`: the trainer uses the
addresses in reverse, so that with two replicas one of the clients is forwarded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gristmill import Batch, RolloutClient, TrainerClient
from gristmill._client.connection import credentials
from gristmill._client.rollout import rollout_core
from gristmill.aio import AsyncRolloutClient

GROUPS, SAMPLES, ABORTED = 4, 6, 4
"""Of a batch: its groups, and of each the samples, and those that are aborted for a reason of their own."""
CONFIG: dict[str, Any] = {
    "train_batch_size": GROUPS,
    "n_samples_per_prompt": SAMPLES,
    "policy_mini_batch_size": GROUPS,
    "micro_batch": {"size": 64},
    "step_wise": True,
    "merge": "prefix",
    "max_staleness": 1_000_000,
    "max_buffered_batches": 100,
}


class Round(NamedTuple):
    """Batches to roll out and train. first: the number of the first. is_whole: one request a batch, of whole groups;
    otherwise one a step."""

    first: int
    batches: int
    is_whole: bool = False

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.batches)


def _uids(batch: int) -> list[str]:
    return [f"prompt-{batch:08d}-{index}" for index in range(GROUPS)]


def _rows(uid: str) -> list[dict[str, Any]]:
    tokens = {"prompt_token_ids": [1, 2, 3], "response_ids": [4, 5], "loss_mask": [1, 1]}
    row = tokens | {"uid": uid, "step": 0, "is_last_step": True}
    return [row | {"sample": sample, "reward": float(sample)} for sample in range(SAMPLES)]


def roll_out(client: RolloutClient, batch: int, *, is_whole: bool) -> None:
    uids = client.begin_groups(_uids(batch))
    if is_whole:
        client.submit([row for uid in uids for row in _rows(uid)])
        return
    for uid in uids:
        for sample in range(SAMPLES):
            with client.trajectory(uid, sample) as trajectory:
                trajectory.step([1, 2, 3], [4, 5])
                client.flush()
                if sample < ABORTED:
                    trajectory.abort(f"reason {uid} {sample}")
                else:
                    trajectory.step([1, 2, 3, 4, 5, 6], [7], reward=float(sample), is_last_step=True)
                    client.flush()


async def roll_out_async(client: AsyncRolloutClient, batch: int, *, is_whole: bool) -> None:
    uids = await client.begin_groups(_uids(batch))
    if is_whole:
        await client.submit([row for uid in uids for row in _rows(uid)])
        return

    async def sample_one(uid: str, sample: int) -> None:
        async with client.trajectory(uid, sample) as trajectory:
            await trajectory.step([1, 2, 3], [4, 5])
            await client.flush()
            if sample < ABORTED:
                await trajectory.abort(f"reason {uid} {sample}")
            else:
                await trajectory.step([1, 2, 3, 4, 5, 6], [7], reward=float(sample), is_last_step=True)
                await client.flush()

    await asyncio.gather(*(sample_one(uid, sample) for uid in uids for sample in range(SAMPLES)))


def _train(batches: Iterator[Batch]) -> None:
    for shard in next(batches).mini_batches():
        shard.ack()


def _rounds(roll: Callable[[int, bool], None], batches: Iterator[Batch]) -> None:
    for line in sys.stdin:
        wanted = Round(*json.loads(line))
        for batch in wanted.numbers:
            roll(batch, wanted.is_whole)
            _train(batches)
        print(json.dumps(GROUPS * wanted.batches), flush=True)


async def _in_a_loop(addresses: str, run: str, batches: Iterator[Batch]) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncRolloutClient(addresses, run) as client:

        def roll(batch: int, is_whole: bool) -> None:
            rolling = roll_out_async(client, batch, is_whole=is_whole)
            asyncio.run_coroutine_threadsafe(rolling, loop).result()

        await asyncio.to_thread(_rounds, roll, batches)


def main() -> None:
    _, kind, addresses, run = sys.argv
    # Renewed certificates are looked for at each connection, instead of every five seconds.
    vars(credentials)["_LOOK_S"] = 0.1
    # Instead of 10,000 aborted trajectories, which no warm-up would reach.
    vars(rollout_core)["_ABORTS"] = 100
    last_first = ",".join(reversed(addresses.split(",")))
    with TrainerClient(last_first, run, 0, auto_commit=True) as trainer:
        batches = iter(trainer)
        if kind == "async":
            asyncio.run(_in_a_loop(addresses, run, batches))
            return
        with RolloutClient(addresses, run) as client:
            _rounds(lambda batch, is_whole: roll_out(client, batch, is_whole=is_whole), batches)


if __name__ == "__main__":
    main()
