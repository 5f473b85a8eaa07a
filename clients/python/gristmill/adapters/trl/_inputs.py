"""A micro-batch as `GRPOTrainer._compute_loss` takes it, and what makes its loss part of the mini-batch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.adapters.trl._settings import ROW_MEANS
from gristmill.errors import InvalidArgumentError
from gristmill.torch import MicroBatch, Shard

LOSS_WEIGHT = "loss_weight"
"""The key of the number that a micro-batch's loss is multiplied by."""

_OPTIONAL = frozenset({"sampling_per_token_logps"})
"""What the loss does without."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Normaliser:
    """What TRL's loss of a micro-batch is divided by, of the batch that the service planned.

    loss_type, steps_per_generation: as in `GRPOConfig`. dp_size: ranks, whose gradients are averaged. is_scaled:
    whether the run has a `loss_reduction`, so that the advantages hold it and nothing is divided any more.
    """

    loss_type: str
    steps_per_generation: int
    dp_size: int
    is_scaled: bool

    def apply(self, inputs: Inputs, micro: MicroBatch, micro_batches: int, tokens: float) -> None:
        """Adds `num_items_in_batch` and the loss's weight.

        micro_batches: of this rank's shard. tokens: trained ones of an optimizer step, the mean over the batch's, as
        TRL counts those of a generation.

        TRL divides a loss by tokens by `num_items_in_batch / ranks * micro_batches / steps_per_generation`; one by rows
        it takes as a mean over the micro-batch's rows, and divides it by `micro_batches`, which is the mean over the
        mini-batch's rows where all micro-batches are equally long.
        """
        weight, items = 1.0, tokens * self.steps_per_generation / micro_batches
        if self.is_scaled:
            inputs["advantages"] = inputs["advantages"] * micro_batches
            items = self.steps_per_generation
        elif self.loss_type in ROW_MEANS:
            weight = len(micro) * micro_batches * self.dp_size / micro.metadata["loss_denominators"]["rows"]
        inputs["num_items_in_batch"] = torch.tensor(float(items), device=inputs["advantages"].device)
        inputs[LOSS_WEIGHT] = weight


def tokens_a_step(plan: Mapping[str, Any]) -> float:
    """The trained tokens of an optimizer step of the policy, the mean over the batch's."""
    counts = [mini_batch["loss_tokens"] for mini_batch in plan["mini_batches"] if mini_batch["model"] == "policy"]
    return float(sum(counts) / len(counts))


def training_inputs(
    shard: Shard, columns: Mapping[str, str], normaliser: Normaliser, tokens: float
) -> Iterator[Inputs]:
    """Of each micro-batch what `_compute_loss` takes, made when it is asked for.

    columns: by TRL's name the shard's, of what the loss reads beside the tokens. tokens: as for `Normaliser.apply`.
    Raises InvalidArgumentError where the rows lack a column.
    """
    count = len(shard.metadata["micro_batches"])
    for micro in shard.micro_batches():
        inputs = _inputs(micro, {"advantages": "advantages", "tool_mask": "loss_mask", **columns}, shard)
        normaliser.apply(inputs, micro, count, tokens)
        yield inputs


def response_width(micro: MicroBatch) -> int:
    """The columns that are completions. TRL predicts the first of them too, from the one before: where a response is as
    wide as its row, as widths that are rounded up may be, the first column is a prompt's or padding."""
    return min(micro["response_mask"].shape[1], micro["sequences"].shape[1] - 1)


def _inputs(micro: MicroBatch, columns: Mapping[str, str], shard: Shard) -> Inputs:
    """Prompts, completions and what stands beside completions, int64 and float32, by TRL's names.

    All rows are cut where the longest response begins: views of the shard, nothing is moved. Both parts may begin with
    padding, and the completions with tokens of the prompt, which `tool_mask` leaves untrained.
    """
    tokens, present, width = micro["sequences"], micro["attention_mask"], response_width(micro)
    found = {
        "prompt_ids": tokens[:, :-width],
        "prompt_mask": present[:, :-width],
        "completion_ids": tokens[:, -width:],
        "completion_mask": present[:, -width:],
    }
    for name, column in columns.items():
        if column in micro:
            found[name] = micro[column][:, -width:]
        elif name not in _OPTIONAL:
            raise InvalidArgumentError(
                f"{shard.position}: rows have no {column}, which the loss reads as {name}; have workers send it with "
                "every step, or set old_logprobs='trainer'"
            )
    return found
