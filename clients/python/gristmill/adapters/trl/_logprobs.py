"""Log-probabilities of the rows of a batch that waits for them, computed as TRL computes them as it generates."""

from __future__ import annotations

from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from gristmill import Batch
from gristmill.adapters.trl._inputs import response_width
from gristmill.adapters.trl._session import Session
from gristmill.torch import MicroBatch


def write_columns(trainer: Any, session: Session, batch: Batch) -> None:
    """Writes the columns that the batch waits for, of this rank's shards, with the weights as they are now.

    trainer: a `GRPOTrainer`.
    """
    trainer.model_wrapped.train()
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        for shard in batch.forward():
            columns: dict[str, list[torch.Tensor]] = {name: [] for name in batch.awaits}
            for micro in shard.micro_batches():
                for name, computed in columns.items():
                    computed.append(_COMPUTED[name](trainer, micro).cpu())
            session.write(shard, columns)


def _old(trainer: Any, micro: MicroBatch) -> torch.Tensor:
    return _logprobs(trainer, trainer.model, micro)


def _reference(trainer: Any, micro: MicroBatch) -> torch.Tensor:
    """Under the reference model; of an adapter that is trained, under the model without it, or with its first state."""
    if trainer.ref_model is not None:
        return _logprobs(trainer, trainer.ref_model, micro)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        return _logprobs(trainer, trainer.model, micro)


def _logprobs(trainer: Any, model: Any, micro: MicroBatch) -> torch.Tensor:
    """(rows, max_response), float."""
    width = response_width(micro)
    found: torch.Tensor = trainer._get_per_token_logps_and_entropies(
        model, micro["sequences"], micro["attention_mask"], width
    )[0]
    return torch.nn.functional.pad(found, (micro["response_mask"].shape[1] - width, 0))


_COMPUTED = {"old_per_token_logps": _old, "ref_per_token_logps": _reference}
