"""Builds the input of `GRPOTrainer._compute_loss` per micro-batch, so that losses add up to the mini-batch's loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.adapters.trl._settings import ROW_MEANS
from gristmill.errors import InvalidArgumentError
from gristmill.torch import MicroBatch, Shard

LOSS_WEIGHT = "loss_weight"
"""The key of the weight by which a micro-batch's loss is multiplied."""

_OPTIONAL = frozenset({"sampling_per_token_logps"})
"""Columns that the loss does not require."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Normalizer:
    """Divides TRL's loss of a micro-batch by counts of the batch that the service planned.

    loss_type, steps_per_generation: as in `GRPOConfig`. dp_size: the number of ranks, which average gradients.
    is_scaled: whether the run has a `loss_reduction`, so that the advantages are already divided.
    """

    loss_type: str
    steps_per_generation: int
    dp_size: int
    is_scaled: bool

    def apply(self, inputs: Inputs, micro: MicroBatch, micro_batches: int, tokens: float) -> None:
        """Add `num_items_in_batch` and the loss's weight.

        micro_batches: the number in this rank's shard. tokens: the trained tokens per optimizer step, as the mean over
        the batch's steps, like TRL's count for a generation.

        TRL divides a loss per token by `num_items_in_batch / ranks * micro_batches / steps_per_generation`. It computes
        a loss per row as the mean over the micro-batch's rows, divided by `micro_batches`. This equals the mean over
        the mini-batch's rows if all micro-batches have the same number of rows.
        """
        weight, items = 1.0, tokens * self.steps_per_generation / micro_batches
        if self.is_scaled:
            inputs["advantages"] = inputs["advantages"] * micro_batches
            items = self.steps_per_generation
        elif self.loss_type in ROW_MEANS:
            weight = len(micro) * micro_batches * self.dp_size / micro.metadata["loss_denominators"]["rows"]
        inputs["num_items_in_batch"] = torch.tensor(float(items), device=inputs["advantages"].device)
        inputs[LOSS_WEIGHT] = weight


def tokens_per_step(plan: Mapping[str, Any]) -> float:
    """Return the trained tokens per optimizer step of the policy, as the mean over the batch's steps."""
    counts = [mini_batch["loss_tokens"] for mini_batch in plan["mini_batches"] if mini_batch["model"] == "policy"]
    return float(sum(counts) / len(counts))


def training_inputs(
    shard: Shard, columns: Mapping[str, str], normalizer: Normalizer, tokens: float
) -> Iterator[Inputs]:
    """Yield the input of `_compute_loss` for each micro-batch.

    columns: the columns that the loss reads: TRL's names, mapped to names in shards. tokens: as in `Normalizer.apply`.
    Raises InvalidArgumentError if rows lack a required column.
    """
    count = len(shard.metadata["micro_batches"])
    for micro in shard.micro_batches():
        inputs = _inputs(micro, {"advantages": "advantages", "tool_mask": "loss_mask", **columns}, shard)
        normalizer.apply(inputs, micro, count, tokens)
        yield inputs


def response_width(micro: MicroBatch) -> int:
    """Return the width of the completions. TRL predicts the first column of the completions from the previous column.
    If a response is as wide as its row, as rounded widths allow, the first column therefore counts as prompt."""
    return min(micro["response_mask"].shape[1], micro["sequences"].shape[1] - 1)


def _inputs(micro: MicroBatch, columns: Mapping[str, str], shard: Shard) -> Inputs:
    """Return prompts, completions and tensors of completions, int64 and float32, by TRL's names.

    They are views of the shard. All rows are split where the longest response begins. Both parts may begin with
    padding. Completions may begin with tokens of the prompt, which `tool_mask` excludes from training.
    """
    tokens, present, width = micro["sequences"], micro["attention_mask"], response_width(micro)
    inputs = {
        "prompt_ids": tokens[:, :-width],
        "prompt_mask": present[:, :-width],
        "completion_ids": tokens[:, -width:],
        "completion_mask": present[:, -width:],
    }
    for name, column in columns.items():
        if column in micro:
            inputs[name] = micro[column][:, -width:]
        elif name not in _OPTIONAL:
            raise InvalidArgumentError(
                f"{shard.position}: rows have no {column}, which the loss reads as {name}; let workers send it with "
                "every step, or set old_logprobs='trainer'"
            )
    return inputs
