"""GRPO in one file: a small random transformer learns to say low words, through gristmill, in half a minute on a CPU.

    gristmill serve &
    python examples/grpo.py

Nothing is downloaded: the model and its words are made here. One process alternates between sampling and training, so
that every batch is on-policy. In a real setup the two halves are separate processes: `roll_out` next to the engines,
`train` on each rank.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import Tensor, nn

from gristmill import Batch, RolloutClient, TrainerClient
from gristmill.torch import MicroBatch

WORDS, LOW, PROMPT, RESPONSE = 64, 16, 4, 6
PROMPTS, SAMPLES = 8, 8
CLIP = 0.2

SETTINGS = {
    "train_batch_size": PROMPTS,
    "n_samples_per_prompt": SAMPLES,
    "policy_mini_batch_size": PROMPTS // 2,
    "loss_reduction": "token_mean",
    "micro_batch": {"max_tokens": 512},
}


class TinyModel(nn.Module):
    """A causal transformer of two layers. outputs: the size of its output at each token, WORDS for logits."""

    def __init__(self, outputs: int = WORDS, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(PROMPT + RESPONSE, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Map left-padded rows (rows, length), as shards have them, to (rows, length, outputs)."""
        length = sequences.shape[1]
        before = torch.ones(length, length, dtype=torch.bool).tril()
        # Padding sees itself: a softmax over nothing would be NaN.
        seen = (before & attention_mask.bool()[:, None]) | torch.eye(length, dtype=torch.bool)
        hidden = self.words(sequences.long()) + self.positions(position_ids.long())
        hidden = self.layers(hidden, mask=~seen.repeat_interleave(self.heads, 0))
        outputs: Tensor = self.head(hidden)
        return outputs


@torch.no_grad()
def sample(model: TinyModel, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a response to each prompt: its tokens and their log-probabilities, (prompts, RESPONSE) each."""
    tokens, logprobs = prompts, []
    for _ in range(RESPONSE):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = model(tokens, torch.ones_like(tokens), positions)[:, -1].log_softmax(-1)
        chosen = torch.multinomial(logits.exp(), 1)
        tokens = torch.cat([tokens, chosen], 1)
        logprobs.append(logits.gather(1, chosen))
    return tokens[:, prompts.shape[1] :], torch.cat(logprobs, 1)


def roll_out(client: RolloutClient, model: TinyModel, step: int) -> None:
    """Answer each of a batch of prompts SAMPLES times, and submit. The reward is the share of low words."""
    uids = [f"step-{step}/prompt-{number}" for number in range(PROMPTS)]
    while admitted := client.begin_groups(uids):
        uids = [uid for uid in uids if uid not in admitted]
        for uid in admitted:
            prompt = [random.randrange(WORDS) for _ in range(PROMPT)]
            responses, logprobs = sample(model, torch.tensor([prompt] * SAMPLES))
            for number in range(SAMPLES):
                with client.trajectory(uid, number, policy_version=step) as trajectory:
                    trajectory.step(
                        prompt,
                        responses[number],
                        rollout_logprobs=logprobs[number],
                        reward=(responses[number] < LOW).float().mean().item(),
                        is_last_step=True,
                    )


def train(batch: Batch, model: TinyModel, optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer step for each mini-batch."""
    for shard in batch.mini_batches():
        optimizer.zero_grad()
        for micro in shard.micro_batches():
            policy_loss(model, micro).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        shard.ack()


def policy_loss(model: TinyModel, micro: MicroBatch) -> Tensor:
    """Compute PPO's clipped loss. Advantages are scaled so that its sum over the mini-batch is the mean over tokens."""
    logits = model(micro["sequences"], micro["attention_mask"], micro.position_ids())
    logprobs = micro.logprobs(logits)
    mask, advantages = micro["loss_mask"], micro["advantages"]
    ratio = ((logprobs - micro["rollout_logprobs"]) * mask).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages) * mask).sum()


def flags(run: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1:50051", help="of gristmill serve (default: %(default)s)")
    parser.add_argument(
        "--run", default=run, help="the run's name; an existing run is deleted first (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=30, help="batches to train on (default: %(default)s)")
    return parser


def main() -> None:
    given = flags("grpo-example").parse_args()
    torch.manual_seed(0)
    random.seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with RolloutClient(given.address, given.run) as client, TrainerClient(given.address, given.run, rank=0) as trainer:
        client.delete_run()
        client.create_run(SETTINGS)
        batches = iter(trainer)
        for step in range(given.steps):
            roll_out(client, model, step)
            batch = next(batches)
            train(batch, model, optimizer)
            trainer.announce_policy_version(step + 1)
            print(f"step {step}: reward {batch.plan['metrics']['score_mean']:.2f}", flush=True)
        client.finish()


if __name__ == "__main__":
    main()
