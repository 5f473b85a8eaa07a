"""A batch in training: stores values that were computed before its updates, and computes verl's metrics."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.utils.debug.metrics import calculate_debug_metrics

from gristmill.adapters.verl._tensor_dicts import MiniBatchData, joined
from gristmill.torch import Jagged

_SHOWN = (
    "response_mask",
    "advantages",
    "returns",
    "rewards",
    "values",
    "entropy",
    "old_log_probs",
    "rollout_log_probs",
)


class TrainedBatch:
    """computed: by mini-batch and verl's name, values of response tokens computed before the first update."""

    def __init__(self) -> None:
        self.computed: dict[int, dict[str, Jagged]] = {}
        self._parts: list[MiniBatchData] = []

    def add(self, mini_batch: int, part: MiniBatchData) -> None:
        """Add a mini-batch of the policy, and add the values that were computed for it."""
        part.add(self.computed.get(mini_batch, {}))
        if len(self._parts) == mini_batch:
            # This is the first epoch.
            self._parts.append(part)

    def metrics(self, actor: DictConfig, timing_raw: dict[str, float], n_gpus: int) -> dict[str, Any]:
        """Return verl's metrics of the batch's rows, without padding. actor: verl's settings of the actor."""
        real = torch.cat([part.is_real for part in self._parts])
        lengths = torch.cat([part.lengths for part in self._parts])[real]
        responses = torch.cat([part["responses"].lengths for part in self._parts])[real]
        data = {name: self._padded(name)[real] for name in _SHOWN if name in self._parts[0]}
        rewards, prompts = data.pop("rewards"), lengths - responses
        data |= {
            "token_level_scores": rewards,
            "token_level_rewards": rewards,
            "returns": data.get("returns", data["advantages"]),
            "prompt_length": prompts.float(),
            "response_length": responses.float(),
            # verl reads only the widths of these.
            "prompts": torch.zeros(1).expand(len(prompts), int(prompts.max())),
            "responses": torch.zeros(1).expand(len(responses), data["response_mask"].shape[1]),
        }
        batch = DataProto(
            batch=TensorDict(data, batch_size=len(lengths)), meta_info={"global_token_num": lengths.tolist()}
        )
        metrics: dict[str, Any] = compute_data_metrics(batch=batch, use_critic="values" in data)
        metrics |= compute_timing_metrics(batch=batch, timing_raw=timing_raw)
        metrics |= compute_throughout_metrics(batch=batch, timing_raw=timing_raw, n_gpus=n_gpus)
        if "entropy" in data:
            metrics["actor/entropy"] = agg_loss(
                loss_mat=data["entropy"],
                loss_mask=data["response_mask"],
                loss_agg_mode=actor.loss_agg_mode,
                loss_scale_factor=actor.loss_scale_factor,
            ).item()
            if "rollout_log_probs" in data:
                metrics |= calculate_debug_metrics(batch)
        return metrics

    def _padded(self, name: str) -> torch.Tensor:
        return joined(part[name] for part in self._parts).nested().to_padded_tensor(0.0)
