"""What happens to a run on both sides of an upgrade: what the older service is sent, what the newer one is asked."""

from __future__ import annotations

from typing import Any

from gristmill import RolloutClient, TrainerClient
from tests.serving import FREE_PORTS

RUN = "kept"
CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 2},
    "dp_size": 2,
    "step_wise": True,
    "merge": "prefix",
    "max_buffered_batches": 4,
    "columns": [{"name": "verdict", "dtype": "float32", "scope": "row"}],
}
SETTINGS: dict[str, Any] = {**FREE_PORTS, "shutdown_grace_s": 5.0}


def begin(address: str) -> None:
    """A run with a batch that is half trained, one that is built, and a group that lacks a sample."""
    with RolloutClient(address, RUN) as client:
        client.create_run(CONFIG)
        for number, uid in enumerate("abcd"):
            client.begin_groups([uid])
            _roll_out(client, uid, number, range(2))
        client.begin_groups(["e"])
        _roll_out(client, "e", 4, range(1))
        client.flush()
    with TrainerClient(address, RUN, ranks="all") as trainer:
        next(iter(next(iter(trainer)).mini_batches())).ack()


def go_on(address: str) -> dict[str, Any]:
    """What the run is found to be; and every shard that is still to be trained, once the open group is complete."""
    shards = []
    with RolloutClient(address, RUN) as client:
        groups = [[group.uid, group.state, group.batch] for group in client.groups()]
        status = client.status()
        _roll_out(client, "e", 4, range(1, 2))
        # Which of two groups is complete first is otherwise for the client's connection to say.
        client.flush()
        client.begin_groups(["f"])
        _roll_out(client, "f", 5, range(2))
        client.finish()
    with TrainerClient(address, RUN, ranks="all") as trainer:
        for batch in trainer:
            for mini_batch in batch.mini_batches():
                of_ranks = [
                    {name: shard[name].tolist() for name in ("sequences", "loss_mask", "verdict")}
                    for shard in mini_batch.shards.values()
                ]
                shards.append([batch.number, mini_batch.position.mini_batch, of_ranks])
                mini_batch.ack()
    return {"groups": groups, "rows_accepted": status.rows_accepted, "generation": status.generation, "shards": shards}


def _roll_out(client: RolloutClient, uid: str, number: int, samples: range) -> None:
    for sample in samples:
        with client.trajectory(uid, sample, policy_version=0) as trajectory:
            prompt = [10 * number + 1, 10 * number + 2]
            trajectory.step(prompt, [3 + sample], rollout_logprobs=[-0.5], columns={"verdict": 0.25})
            trajectory.step(
                [*prompt, 3 + sample, 7],
                [8, 9],
                rollout_logprobs=[-0.25, -0.125],
                columns={"verdict": 0.75},
                reward=float(sample),
                is_last_step=True,
            )
