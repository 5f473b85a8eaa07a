"""prime-rl's own modules, imported from a checkout of its source: what they import that needs a GPU, or packages that
have nothing to do with data, is stood in for.

Tried with prime-rl 0.8.0, github.com/PrimeIntellect-ai/prime-rl at 559b44772e471d1538537b8805cc77f3824a5e64.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class _Annotation:
    """Replaces jaxtyping's `Float[Tensor, "batch seq"]`."""

    def __class_getitem__(cls, _: object) -> type[object]:
        return object


_STAND_INS: dict[str, dict[str, Any]] = {
    "jaxtyping": dict.fromkeys(("Bool", "Float", "Int"), _Annotation),
    "prime_rl.utils.logger": {"get_logger": lambda: logging.getLogger("prime_rl")},
    "prime_rl.configs": {},
    "prime_rl.configs.shared": {"TransportConfig": object, "ZMQTransportConfig": object},
    "prime_rl.configs.trainer": {"FakeDataLoaderConfig": object},
}
_CONFIGS = ("ActionLossType", "AlgoConfig", "FrozenModelConfig", "RAEAlgoConfig", "HierarchicalGRPOAlgoConfig")
_OF_ALGORITHMS: dict[str, dict[str, Any]] = {
    "verifiers": {},
    "verifiers.v1": {},
    "prime_rl.configs.algorithm": dict.fromkeys((*_CONFIGS, "GRPOAlgoConfig"), object),
    "prime_rl.transports.rollouts": {"TrainingSample": object},
}


@contextmanager
def prime_rl(source: Path) -> Iterator[SimpleNamespace]:
    """`batch`, `rollouts`, `types`, `data` and `pathing` of a checkout; forgotten afterwards."""
    with _importing(source, _STAND_INS):
        yield SimpleNamespace(
            batch=importlib.import_module("prime_rl.trainer.batch"),
            rollouts=importlib.import_module("prime_rl.transports.rollouts"),
            types=importlib.import_module("prime_rl.transports.rollouts.types"),
            data=importlib.import_module("prime_rl.trainer.rl.data"),
            pathing=importlib.import_module("prime_rl.utils.pathing"),
        )


@contextmanager
def algorithms(source: Path) -> Iterator[SimpleNamespace]:
    """The orchestrator's algorithms `RAEAlgorithm`, `HierarchicalGRPOAlgorithm` and `GRPOAlgorithm` of a checkout."""
    package = "prime_rl.orchestrator.algo"
    # Their package imports all of the orchestrator, so its modules are found without it.
    folders = {name: {"__path__": [str(source / "src" / name.replace(".", "/"))]} for name in (package[:-5], package)}
    with _importing(source, _STAND_INS | _OF_ALGORITHMS | folders):
        yield SimpleNamespace(
            RAEAlgorithm=importlib.import_module(f"{package}.rae").RAEAlgorithm,
            HierarchicalGRPOAlgorithm=importlib.import_module(f"{package}.hierarchical_grpo").HierarchicalGRPOAlgorithm,
            GRPOAlgorithm=importlib.import_module(f"{package}.grpo").GRPOAlgorithm,
        )


@contextmanager
def _importing(source: Path, stand_ins: dict[str, dict[str, Any]]) -> Iterator[None]:
    before = dict(sys.modules)
    sys.path.insert(0, str(source / "src"))
    try:
        for name, values in stand_ins.items():
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(values)
        yield
    finally:
        sys.path.remove(str(source / "src"))
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("prime_rl", "jaxtyping", "verifiers"):
                del sys.modules[name]
