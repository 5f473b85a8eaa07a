"""Names of an adapter that need its trainer, imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importer(package: str, modules: Mapping[str, str], needs: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, so that its other names, such as `run_settings`, work without the trainer.

    modules: by name the module that has it. needs: what to install, for the ImportError.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{modules[name]}")
        except ImportError as missing:
            raise ImportError(f"{package}.{name} needs more than is installed ({missing}): {needs}") from missing
        return getattr(module, name)

    return get
