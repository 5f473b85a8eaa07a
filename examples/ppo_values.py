"""PPO with a critic: the trainer writes the critic's values back, and gristmill makes advantages and returns of them.

    gristmill serve &
    python examples/ppo_values.py

The task, the policy and the sampling are those of grpo.py. A batch is read twice: first its forward shards, for which
the critic's values are written; then its train shards, which have `advantages` and `returns` by GAE.
"""

from __future__ import annotations

import random

import torch
from grpo import PROMPTS, SETTINGS, TinyModel, flags, roll_out, train

from gristmill import Batch, RolloutClient, TrainerClient
from gristmill.torch import MicroBatch

PPO_SETTINGS = {
    **SETTINGS,
    "advantage_estimator": "gae",
    "lambda": 0.95,
    "whiten": "batch",
    "critic_mini_batch_size": PROMPTS,
    "columns": [{"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}],
}


def values(critic: TinyModel, micro: MicroBatch) -> torch.Tensor:
    """Compute the critic's value of each response token, in the shape of the response tensors."""
    output = critic(micro["sequences"], micro["attention_mask"], micro.position_ids())[..., 0]
    return micro.at_responses(output)


def write_values(trainer: TrainerClient, batch: Batch, critic: TinyModel) -> None:
    with torch.no_grad():
        for shard in batch.forward():
            whole = torch.cat([values(critic, micro) for micro in shard.micro_batches()])
            trainer.write(shard, {"values": whole})


def train_critic(batch: Batch, critic: TinyModel, optimizer: torch.optim.Optimizer) -> float:
    """Make an optimizer step for each of the critic's mini-batches; return the mean squared error of the last."""
    error = 0.0
    for shard in batch.mini_batches():
        optimizer.zero_grad()
        error = 0.0
        for micro in shard.micro_batches():
            wrong = (values(critic, micro) - micro["returns"]) * micro["loss_mask"]
            loss = wrong.square().sum() / shard.metadata["loss_denominators"]["loss_tokens"]
            loss.backward()
            error += loss.item()
        optimizer.step()
        shard.ack()
    return error


def main() -> None:
    given = flags("ppo-example").parse_args()
    torch.manual_seed(0)
    random.seed(0)
    policy, critic = TinyModel(), TinyModel(outputs=1)
    policy_optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    with (
        RolloutClient(given.address, given.run) as client,
        TrainerClient(given.address, given.run, rank=0) as policy_trainer,
        TrainerClient(given.address, given.run, rank=0, model="critic") as critic_trainer,
    ):
        client.delete_run()
        client.create_run(PPO_SETTINGS)
        policy_batches, critic_batches = iter(policy_trainer), iter(critic_trainer)
        for step in range(given.steps):
            roll_out(client, policy, step)
            batch = next(policy_batches)
            write_values(policy_trainer, batch, critic)
            train(batch, policy, policy_optimizer)
            error = train_critic(next(critic_batches), critic, critic_optimizer)
            policy_trainer.announce_policy_version(step + 1)
            reward = batch.plan["metrics"]["score_mean"]
            print(f"step {step}: reward {reward:.2f}, the critic's error {error:.3f}", flush=True)
        client.finish()


if __name__ == "__main__":
    main()
