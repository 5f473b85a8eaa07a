"""TRL warns of `rollout_func`, which tests replay rollouts with. Nothing is fetched from anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# Of several threads each waits for the others on a busy machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRL 1.16 uses names that later versions of transformers deprecate."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"))
