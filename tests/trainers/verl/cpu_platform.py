"""verl on a machine without an accelerator: its own interface for platforms, for `torch.cpu` and gloo.

Named by VERL_USE_EXTERNAL_MODULES and VERL_PLATFORM=cpu, in every process that imports verl.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForTokenClassification
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(ModuleType):
    """`torch.cpu`, and the calls that verl makes of every device, with what they say where there is none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        said = {"mem_get_info": (0, 0), "get_device_name": "CPU"}.get(name, 0)
        return lambda *args, **settings: said


_init_process_group = torch.distributed.init_process_group


def _init_gloo(backend: str | None = None, **settings: Any) -> None:
    """verl names a backend for the CPU and one for the accelerator, and PyTorch takes no device twice."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **settings)


torch.distributed.init_process_group = _init_gloo  # type: ignore[assignment]

_load_critic = AutoModelForTokenClassification.from_pretrained


def _load_critic_for_cpu(*names: Any, **settings: Any) -> Any:
    """verl asks for FlashAttention by name where it loads a critic, whatever its settings say."""
    return _load_critic(*names, **settings | {"attn_implementation": "eager"})


AutoModelForTokenClassification.from_pretrained = _load_critic_for_cpu


def _offload_unpinned(policy: CPUOffloadPolicy, pin_memory: bool = True) -> None:
    """verl has the weights of a reference pinned, which an accelerator does."""
    object.__setattr__(policy, "pin_memory", False)


CPUOffloadPolicy.__init__ = _offload_unpinned  # type: ignore[assignment, method-assign]


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NO_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def cudart(self) -> None:
        return None

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass
