"""verl finds the trainer by gristmill's entry point, and nothing changes for anyone who does not ask for it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytestmark = pytest.mark.timeout(400)


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_verl_registers_the_trainer_where_its_trainers_are_looked_for() -> None:
    assert [point.name for point in entry_points(group="verl.plugins", name="gristmill")] == ["gristmill"]
    printed = python(
        "import sys, verl\n"
        "loaded = [name for name in sys.modules if name.startswith('gristmill')]\n"
        "print(loaded, 'verl.trainer.ppo.v1' in sys.modules)\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print(get_trainer_cls('gristmill').__name__, get_trainer_cls('sync').__name__)\n"
    )
    before, after = printed.strip().splitlines()[-2:]
    # The namespace and this module: neither the client, nor verl's trainers earlier than without it.
    assert "gristmill.adapters.verl._plugin" in before
    assert "gristmill.torch" not in before
    assert "gristmill._client" not in before
    assert before.endswith("False")
    assert after == "GristmillTrainer PPOTrainerSync"


def test_a_trainer_that_cannot_be_loaded_leaves_verls_own() -> None:
    printed = python(
        "import sys, verl\n"
        "sys.modules['gristmill.torch'] = None\n"
        "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY\n"
        "import verl.trainer.ppo.v1\n"
        "print(sorted(TRAINER_REGISTRY))\n"
    )
    assert printed.strip().splitlines()[-1] == "['colocate_async', 'separate_async', 'sync']"


@pytest.mark.parametrize("module", ["gristmill.adapters.verl", "gristmill.adapters.verl._plugin"])
def test_it_is_harmless_without_verl(module: str) -> None:
    printed = python(
        f"import sys; sys.modules['verl'] = None; import {module}\nprint('torch' in sys.modules, 'ray' in sys.modules)"
    )
    assert printed.strip() == "False False"
