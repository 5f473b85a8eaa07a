"""slime's own modules, imported from a checkout of its source: what they import that needs a GPU, Ray or an inference
engine is stood in for.

Tried with slime 0.3.1, github.com/THUDM/slime at 624b824a898ab0ec1fcb4d373004c7f3852bf515.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class _ActorClass:
    """As much of what `ray.remote` makes of a class as is used here."""

    def __init__(self, plain: type) -> None:
        self.plain = plain
        self.__ray_metadata__ = SimpleNamespace(modified_class=SimpleNamespace(__ray_actor_class__=plain))


class _StandIn(ModuleType):
    """A module that has any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def _remote(plain: type) -> _ActorClass:
    return _ActorClass(plain)


def _itself(value: Any, **_: Any) -> Any:
    return value


_STAND_INS = (
    *("ray", "ray.util", "ray.util.scheduling_strategies", "sglang", "sglang.srt", "sglang.srt.constants"),
    *(
        "megatron",
        "megatron.core",
        "megatron.core.packed_seq_params",
        "httpx",
        "transformers",
        "wandb",
        "torch_memory_saver",
    ),
    *("slime.backends.sglang_utils.external", "slime.backends.sglang_utils.sglang_config"),
    *("slime.backends.sglang_utils.sglang_engine", "slime.observability.logging_utils"),
    *("slime.observability.rollout_metrics", "slime.utils.health_monitor", "slime.utils.http_utils"),
    *("slime.utils.accelerator", "slime.ray.utils"),
)


@contextmanager
def slime(source: Path) -> Iterator[SimpleNamespace]:
    """`rollout`, `types`, `cp_utils`, `data` (of Megatron's backend) of a checkout; forgotten afterwards.

    Ray keeps objects where they are, and there is one process, without parallelism.
    """
    before = dict(sys.modules)
    sys.path.insert(0, str(source))
    try:
        for name in _STAND_INS:
            sys.modules[name] = _StandIn(name)
        ray: Any = sys.modules["ray"]
        ray.remote, ray.put, ray.get = _remote, _itself, _itself
        packed: Any = sys.modules["megatron.core.packed_seq_params"]
        packed.PackedSeqParams = SimpleNamespace
        # Its package imports all of Megatron's backend.
        backend = ModuleType("slime.backends.megatron_utils")
        backend.__path__ = [str(source / "slime/backends/megatron_utils")]
        sys.modules[backend.__name__] = backend
        mpu: Any = _StandIn("mpu")
        core: Any = sys.modules["megatron.core"]
        core.mpu = mpu
        mpu.get_context_parallel_world_size = lambda: 1
        mpu.get_virtual_pipeline_model_parallel_world_size = lambda: None
        yield SimpleNamespace(
            rollout=importlib.import_module("slime.ray.rollout"),
            types=importlib.import_module("slime.utils.types"),
            cp_utils=importlib.import_module("slime.backends.megatron_utils.cp_utils"),
            data=importlib.import_module("slime.backends.megatron_utils.data"),
        )
    finally:
        sys.path.remove(str(source))
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)
