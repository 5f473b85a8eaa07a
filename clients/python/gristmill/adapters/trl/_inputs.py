"""The input of `GRPOTrainer._compute_loss` for a micro-batch, scaled so that losses add up to the mini-batch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.adapters.trl._settings import ROW_MEANS
from gristmill.errors import InvalidArgumentError
from gristmill.torch import MicroBatch, Shard

LOSS_WEIGHT = "loss_weight"
"""The key of the factor of a micro-batch's loss."""

_OPTIONAL = frozenset({"sampling_per_token_logps"})
"""Columns without which the loss can be computed."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Normalizer:
    """Divides TRL's loss of a micro-batch by counts of the batch that the service planned.

    loss_type, steps_per_generation: as in `GRPOConfig`. dp_size: ranks, whose gradients are averaged. is_scaled:
    whether the run has a `loss_reduction`, which is in the advantages, so that nothing else is divided.
    """

    loss_type: str
    steps_per_generation: int
    dp_size: int
    is_scaled: bool

    def apply(self, inputs: Inputs, micro: MicroBatch, micro_batches: int, tokens: float) -> None:
        """Add `num_items_in_batch` and the loss's weight.

        micro_batches: of this rank's shard. tokens: trained tokens of an optimizer step, the mean over the batch's
        steps, as TRL counts them for a generation.

        TRL divides a loss by tokens by `num_items_in_batch / ranks * micro_batches / steps_per_generation`. A loss by
        rows it takes as a mean over the micro-batch's rows, and divides by `micro_batches`: that is the mean over the
        mini-batch's rows if all micro-batches have the same number.
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
    """Return the trained tokens of an optimizer step of the policy, the mean over the batch's."""
    counts = [mini_batch["loss_tokens"] for mini_batch in plan["mini_batches"] if mini_batch["model"] == "policy"]
    return float(sum(counts) / len(counts))


def training_inputs(
    shard: Shard, columns: Mapping[str, str], normalizer: Normalizer, tokens: float
) -> Iterator[Inputs]:
    """Yield the input of `_compute_loss` for each micro-batch.

    columns: by TRL's name the shard's name of each column that the loss reads. tokens: as for `Normalizer.apply`.
    Raises InvalidArgumentError for rows without such a column.
    """
    count = len(shard.metadata["micro_batches"])
    for micro in shard.micro_batches():
        inputs = _inputs(micro, {"advantages": "advantages", "tool_mask": "loss_mask", **columns}, shard)
        normalizer.apply(inputs, micro, count, tokens)
        yield inputs


def response_width(micro: MicroBatch) -> int:
    """Return the width of the completions. TRL also predicts the first of their columns, from the column before: if a
    response is as wide as its row, which rounded widths allow, the first column is left to the prompt or padding."""
    return min(micro["response_mask"].shape[1], micro["sequences"].shape[1] - 1)


def _inputs(micro: MicroBatch, columns: Mapping[str, str], shard: Shard) -> Inputs:
    """Return prompts, completions and tensors of completions, int64 and float32, by TRL's names.

    They are views of the shard: all rows are cut where the longest response begins. Both parts may begin with padding,
    and completions with tokens of the prompt, which `tool_mask` excludes from training.
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
                f"{shard.position}: rows have no {column}, which the loss reads as {name}; have workers send it with "
                "every step, or set old_logprobs='trainer'"
            )
    return inputs
