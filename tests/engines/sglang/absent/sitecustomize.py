"""Stands in for packages that SGLang imports and that have no build for CPUs: its own kernels, and torchvision for a
torch without CUDA. Python imports this file when it starts with this folder on PYTHONPATH.

SGLang computes by torch alone then, and nothing of what stands in is called.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers.utils import import_utils

# It keeps its answer: no.
import_utils.is_torchvision_available()


class _Absent(ModuleType):
    """Has a class for every name that is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for absent in ("sgl_kernel", "torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
    module = _Absent(absent)
    module.__spec__ = ModuleSpec(absent, None)
    module.__path__ = []
    sys.modules[absent] = module
