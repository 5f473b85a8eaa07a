"""Computes the log-probabilities for which a batch waits, like TRL's generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from gristmill import Shard
from gristmill.adapters.trl._inputs import response_width
from gristmill.adapters.trl._session import Session
from gristmill.torch import MicroBatch


def write_columns(trainer: Any, session: Session, batch: Any) -> None:
    """Compute the columns for which the batch waits with the current weights, and write them for this rank's shards.

    trainer: a `GRPOTrainer`.
    """
    trainer.model_wrapped.train()
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        names = {name: name for name in batch.awaits}
        session.write_back(
            batch.awaits, names, ((shard, _computed(trainer, shard, names)) for shard in batch.forward())
        )


def _computed(trainer: Any, shard: Shard, names: Iterable[str]) -> dict[str, list[torch.Tensor]]:
    """Return each column's values, with one tensor per micro-batch."""
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for micro in shard.micro_batches():
        for name, values in columns.items():
            values.append(_COMPUTED[name](trainer, micro).cpu())
    return columns


def _old(trainer: Any, micro: MicroBatch) -> torch.Tensor:
    return _logprobs(trainer, trainer.model, micro)


def _reference(trainer: Any, micro: MicroBatch) -> torch.Tensor:
    """Compute log-probabilities with the reference model; with LoRA, with the initial adapter or without an adapter."""
    if trainer.ref_model is not None:
        return _logprobs(trainer, trainer.ref_model, micro)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        return _logprobs(trainer, trainer.model, micro)


def _logprobs(trainer: Any, model: Any, micro: MicroBatch) -> torch.Tensor:
    """Return log-probabilities, (rows, max_response), float."""
    width = response_width(micro)
    logprobs: torch.Tensor = trainer._get_per_token_logps_and_entropies(
        model, micro["sequences"], micro["attention_mask"], width
    )[0]
    return torch.nn.functional.pad(logprobs, (micro["response_mask"].shape[1] - width, 0))


_COMPUTED = {"old_per_token_logps": _old, "ref_per_token_logps": _reference}
