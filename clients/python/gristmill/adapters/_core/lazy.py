"""Imports the names of an adapter that need its trainer at their first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importer(package: str, modules: Mapping[str, str], needs: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, so that its other names, such as `run_settings`, work without the trainer.

    modules: the module of each name. needs: the install command, for the ImportError.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{modules[name]}")
        except ImportError as missing:
            raise ImportError(f"{package}.{name} needs more packages ({missing}); run {needs}") from missing
        return getattr(module, name)

    return get
