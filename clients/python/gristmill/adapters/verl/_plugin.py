"""Registers the trainer with verl when verl's trainers are imported.

`import verl` imports this module in every process, so it must not import the clients or verl's trainers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_log = logging.getLogger("gristmill")

_TRAINERS = "verl.trainer.ppo.v1"
_ADAPTER = "gristmill.adapters.verl._trainer"


class _AfterTrainers(MetaPathFinder):
    """Finds the package of verl's trainers as usual, and registers the adapter after its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TRAINERS or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    try:
        import_module(_ADAPTER)
    except (ImportError, AttributeError) as error:
        # verl's other trainers work without the adapter.
        _log.warning("trainer.v1.trainer_mode=gristmill is not available: %s", error)


def install() -> None:
    """Register the trainer now if verl's trainers are already imported, else when they are imported."""
    if _TRAINERS in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterTrainers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTrainers())


install()
