"""SkyRL's workers on the CPU: its own forward and backward passes and losses, with DDP over gloo in place of FSDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

import ray
import torch
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.distributed.strategy import DistributedStrategy
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.backends.skyrl_train.workers.worker import CriticWorkerBase, PolicyWorkerBase, RefWorkerBase
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel

WEIGHTS = "weights.pt"
SAVES_LATER = hasattr(PolicyWorkerBase, "finalize_pending_saves")
"""Whether this SkyRL can write checkpoints in the background, as 0.4 does: the tests' workers then do."""


class CpuStrategy(DistributedStrategy):  # type: ignore[misc]
    """Every rank has the whole model; rank 0 writes it."""

    _unfinished: Path | None = None

    def setup_distributed(self) -> None:
        self.world_size = distributed.get_world_size()

    def backward(self, loss: torch.Tensor, model: nn.Module, optimizer: Any, **_: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, optimizer: Any, model: nn.Module, scheduler: Any, **_: Any) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return norm

    def save_checkpoint(self, model: nn.Module, ckpt_dir: str, optimizer: Any, **_: Any) -> None:
        if distributed.get_rank() == 0:
            os.makedirs(ckpt_dir, exist_ok=True)
            self._unfinished = Path(ckpt_dir) / "state.unfinished"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self._unfinished)
        if not SAVES_LATER:
            self.finalize_pending_saves()
        distributed.barrier()

    def finalize_pending_saves(self) -> None:
        if self._unfinished is not None:
            self._unfinished.rename(self._unfinished.with_suffix(".pt"))
            self._unfinished = None

    def load_checkpoint(self, model: nn.Module, ckpt_dir: str, optimizer: Any, **_: Any) -> tuple[str, dict[str, Any]]:
        state = torch.load(f"{ckpt_dir}/state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return ckpt_dir, {}

    def save_hf_model(self, *_: Any, **more: Any) -> None:
        raise NotImplementedError


class _OnCpu:
    def renew(self, **arguments: Any) -> None:
        """Becomes the worker that these arguments make."""
        type(self).__init__(self, **arguments)

    def init_worker_process_group(self) -> None:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        size = distributed.get_world_size()
        self.device_mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "sp"))
        self.mesh_rank = MeshRank(dp=distributed.get_rank(), sp=0, tp=0, pp=0, world_size=size, dp_size=size, pp_size=1)

    def empty_cache(self) -> None:
        pass

    def _train(self, model: nn.Module, config: Any) -> None:
        torch.set_num_threads(1)
        self.strategy = CpuStrategy()
        self.strategy.setup_distributed()
        self.model = DistributedDataParallel(model)
        # Without betas, plain gradient descent: what a step changes is its gradient.
        self.optimizer = (
            torch.optim.Adam(model.parameters(), config.lr)
            if any(config.adam_betas)
            else torch.optim.SGD(model.parameters(), config.lr)
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)


def _language_model(path: str, config: Any) -> HFModelWrapper:
    made = HFModelWrapper(path, bf16=False, logprobs_chunk_size=64)
    # It asks for flash attention, and packs as well before any other that goes by positions.
    made.remove_microbatch_padding = config.remove_microbatch_padding
    return made


class ValueModel(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        self.head = nn.Linear(self.backbone.config.hidden_size, 1)

    def forward(
        self, sequences: torch.Tensor, num_actions: int, attention_mask: torch.Tensor, return_output: bool = False
    ) -> Any:
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        output = self.backbone(sequences, attention_mask=attention_mask, position_ids=positions)
        values = self.head(output.last_hidden_state).squeeze(-1)[:, -num_actions - 1 : -1]
        return (values, output) if return_output else values


class _Kept:
    """A class of Ray's actors whose processes are kept: to import PyTorch and SkyRL takes longer than to train here. A
    worker of a training that has ended becomes that of the next."""

    def __init__(self, kind: Any) -> None:
        self._kind = ray.remote(kind)
        self._actors: dict[tuple[int, int], Any] = {}

    def options(self, **_: Any) -> _Kept:
        """Their place is no matter on one machine without GPUs."""
        return self

    def remote(self, **arguments: Any) -> Any:
        rank = (arguments["world_size"], arguments["rank"])
        if rank in self._actors:
            ray.get(self._actors[rank].renew.remote(**arguments))
        else:
            self._actors[rank] = self._kind.remote(**arguments)
        return self._actors[rank]


@_Kept
class PolicyWorker(_OnCpu, PolicyWorkerBase):  # type: ignore[misc]
    def init_model(self, path: str, num_training_steps: int | None = None) -> None:
        self._train(_language_model(path, self.cfg), self.cfg.policy.optimizer_config)

    def _set_pad_token_id(self, pad_token_id: int) -> None:
        self.model.module.model.config.pad_token_id = pad_token_id

    async def init_weight_sync_state(self, *_: Any) -> None:
        pass

    async def broadcast_to_inference_engines(self, *_: Any, **more: Any) -> None:
        """Writes them where samplers look, whole or not at all."""
        if distributed.get_rank() == 0:
            path = Path(self.cfg.export_path) / WEIGHTS
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(dict(self._weights()), path.with_suffix(".draft"))
            path.with_suffix(".draft").rename(path)
        distributed.barrier()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.model.module.model.named_parameters():
            yield name, weight.detach().clone()


@_Kept
class CriticWorker(_OnCpu, CriticWorkerBase):  # type: ignore[misc]
    def init_model(self, path: str, num_training_steps: int | None = None) -> None:
        self._train(ValueModel(path), self.cfg.critic.optimizer_config)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.module.named_parameters()}


@_Kept
class RefWorker(_OnCpu, RefWorkerBase):  # type: ignore[misc]
    def init_model(self, path: str) -> None:
        torch.set_num_threads(1)
        self.model = _language_model(path, self.cfg)
