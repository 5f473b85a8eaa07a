"""A trainer rank: GRPO on the shards that gristmill made for it.

Owns the optimizer and the loss. Rank 0 also writes the new weights, announces their version, and reports each batch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from experiment import DP_SIZE, RUN, Experiment
from game import REWARDS
from gristmill import Batch, MicroBatch, TrainerClient
from policy import Policy, causal, entropies, load_weights, next_logprobs, save_weights

LEARNING_RATE = 2e-3
CLIP = 0.2
ENTROPY_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch as the table shows it. lag: by how many policy versions its rows were behind, on average."""

    batch: int
    reward: float
    success: float
    rows_received: int
    rows: int
    padding_share: float
    lag: float
    seconds: float


class Trainer:
    def __init__(self, experiment: Experiment, client: TrainerClient, rank: int) -> None:
        self._experiment = experiment
        self._client = client
        self._rank = rank
        self._policy = Policy()
        self._version = load_weights(self._policy, experiment.weights)
        self._parallel = DistributedDataParallel(self._policy)
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def train(self, report: Callable[[BatchReport], None]) -> None:
        """Train on every batch of the run."""
        began = time.monotonic()
        if self._rank == 0:
            self._client.announce_policy_version(self._version, keep_later=True)
        for batch in self._client:
            counts = self._train_batch(batch)
            self._version += 1
            if self._rank == 0:
                save_weights(self._policy, self._version, self._experiment.weights)
                self._client.announce_policy_version(self._version)
                report(_batch_report(batch, counts, time.monotonic() - began))
            began = time.monotonic()

    def _train_batch(self, batch: Batch) -> Tensor:
        """Train a batch; return over all ranks the games won, the rows, and the sum of their lags in versions."""
        counts = torch.zeros(3)
        for shard in batch.mini_batches():
            self._optimizer.zero_grad()
            for micro in shard.micro_batches():
                # The ranks' losses sum to the mini-batch's; DDP averages their gradients, hence the factor.
                loss = self._loss(micro, shard.metadata["loss_denominators"]["loss_tokens"]) * DP_SIZE
                loss.backward()  # type: ignore[no-untyped-call]
                counts += self._counts(micro)
            torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
            self._optimizer.step()
            shard.ack()
        dist.all_reduce(counts)
        return counts

    def _loss(self, micro: MicroBatch, loss_tokens: int) -> Tensor:
        """Compute PPO's clipped loss against the rollout's logprobs, with a small entropy bonus for exploration."""
        logits, logprobs = self._of_tree(micro) if micro.is_tree else self._of_rows(micro)
        mask, advantages = micro["loss_mask"], micro["advantages"]
        ratio = ((logprobs - micro["rollout_logprobs"]) * mask).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages) * mask
        entropy = micro.at_responses(entropies(logits)) * mask
        return -gain.sum() - ENTROPY_WEIGHT * entropy.sum() / loss_tokens

    def _of_rows(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return logits, and the logprobs of the response tensors."""
        sequences = micro["sequences"]
        logits = self._parallel(sequences, causal(micro["attention_mask"]), micro.position_ids())
        return logits, micro.at_responses(next_logprobs(logits, sequences))

    def _of_tree(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the same for a micro-batch of layout `prefix_tree`."""
        sequences = micro["sequences"]
        logits = self._parallel(sequences[None], micro.tree.mask[None], micro.position_ids()[None])[0]
        return logits, micro.tree.logprobs(logits, sequences.clamp(max=logits.shape[-1] - 1))

    def _counts(self, micro: MicroBatch) -> Tensor:
        real = micro["is_padding"] == 0
        lag = (self._version - micro["policy_version"])[real]
        return torch.tensor([(micro["rewards"] == REWARDS["correct"]).sum(), real.sum(), lag.sum()])


def _batch_report(batch: Batch, counts: Tensor, seconds: float) -> BatchReport:
    metrics = batch.plan["metrics"]
    won, rows, lag = counts.tolist()
    return BatchReport(
        batch=batch.plan["batch"],
        reward=metrics["score_mean"],
        success=won / metrics["trajectories"],
        rows_received=batch.plan["rows_received"],
        rows=batch.plan["rows"],
        padding_share=metrics["padding_share"],
        lag=lag / rows,
        seconds=seconds,
    )


def train(experiment: Experiment, address: str, rank: int, report: Callable[[BatchReport], None]) -> None:
    """Run the trainer process. Returns when the run is finished and trained."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it looks up the host's name, which may have no address
    rendezvous = experiment.directory / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=DP_SIZE)
    try:
        with TrainerClient(address, RUN, rank, dp_size=DP_SIZE, dtypes={"tokens": torch.int64}) as client:
            Trainer(experiment, client, rank).train(report)
    finally:
        dist.destroy_process_group()
